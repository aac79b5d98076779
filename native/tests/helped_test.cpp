// Work that the process's second thread helps with: done once, and never touched after its end.
#include "core/helped.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "tests/testing.hpp"

namespace {

// Counts up to a number; the first of the two threads takes each step.
struct Count {
    std::vector<std::atomic<int>> seen;
    std::atomic<std::size_t> next = 0;

    explicit Count(std::size_t size) : seen(size) {}
    void go_on() noexcept {
        for (std::size_t one = next.fetch_add(1); one < seen.size(); one = next.fetch_add(1)) {
            seen[one].fetch_add(1, std::memory_order_relaxed);
        }
    }
};

void count(std::size_t size) {
    auto work = std::make_unique<Count>(size);
    {
        farpool::Helped help([](void* self) noexcept { static_cast<Count*>(self)->go_on(); }, work.get());
        help.offer();
        work->go_on();
    }
    for (const auto& one : work->seen) {
        CHECK(one.load(std::memory_order_relaxed) == 1);
    }
}

}  // namespace

TEST("each step is done once, by either thread") {
    std::vector<std::thread> threads;
    for (int thread = 0; thread < 4; ++thread) {
        threads.emplace_back([] {
            for (std::size_t turn = 0; turn < 500; ++turn) {
                count(turn % 100);
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
}

#if !defined(__SANITIZE_THREAD__)  // under which a child may start no threads
TEST("a forked child has a thread of its own") {
    count(1000);
    const pid_t child = fork();
    if (child == 0) {
        for (int turn = 0; turn < 100; ++turn) {
            count(1000);
        }
        _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(status == 0);
}
#endif

int main() { return farpool::testing::run(); }
