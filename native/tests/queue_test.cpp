// The queue: which thread runs an entry, in which order, and what happens to the others if one fails.
#include "core/queue.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <iterator>
#include <mutex>
#include <set>
#include <thread>

#include "tests/testing.hpp"

using farpool::Direction;
using farpool::Piece;
using farpool::QueueCore;
using farpool::Result;
using farpool::Submission;

namespace {

constexpr double patience = 60.0;
constexpr std::size_t large = 1 << 20;
constexpr std::uint64_t never = 1000;

// A port that records each read, and refuses or delays some of them. Transfers no bytes.
class NotingPort : public farpool::Port {
public:
    explicit NotingPort(bool copies) : copies_(copies) {}
    void read(std::uint64_t offset, void*, std::size_t) override {
        while (offset == delayed || offset == second_delayed) {
            reached = true;
            std::this_thread::yield();
        }
        const std::lock_guard lock(mutex_);
        offsets.push_back(offset);
        threads.insert(std::this_thread::get_id());
        if (offset == refused) {
            throw farpool::PortFailure({farpool::ErrorKind::tier, "told to fail", "noting", 0, nullptr});
        }
    }
    void write(std::uint64_t, const void*, std::size_t) override {}
    bool copies() const noexcept override { return copies_; }

    std::atomic<std::uint64_t> delayed = never;
    std::atomic<std::uint64_t> second_delayed = never;
    std::atomic<bool> reached = false;
    std::uint64_t refused = never;
    std::vector<std::uint64_t> offsets;
    std::set<std::thread::id> threads;

private:
    bool copies_;
    std::mutex mutex_;
};

struct World {
    explicit World(bool copies) : port(copies), queue(std::make_shared<QueueCore>()) {}
    ~World() {
        port.delayed = never;
        queue->close(patience);
        queue->poll();
    }

    // Submits a read at offset `id`.
    void submit(std::int64_t id, std::int64_t priority, bool waits, std::vector<std::int64_t> after = {},
                std::size_t nbytes = 8) {
        const Piece piece{static_cast<std::uint64_t>(id), 0, nbytes};
        Submission submission{.id = id, .port = &port, .pieces = {&piece, 1}, .after = after, .priority = priority};
        queue->submit({&submission, 1}, waits);
    }
    // Keeps the only thread of the lane busy from now on.
    void delay(std::int64_t id) {
        port.delayed = static_cast<std::uint64_t>(id);
        submit(id, 100, false, {}, large);
        while (!port.reached) {
            std::this_thread::yield();
        }
    }
    std::vector<Result> finish(std::size_t count) {
        std::vector<Result> results;
        while (results.size() < count) {
            const QueueCore::Seen seen = queue->seen();
            std::vector<Result> more = queue->poll();
            if (more.empty()) {
                queue->wait_past(seen, 1, patience);
            }
            std::ranges::move(more, std::back_inserter(results));
        }
        return results;
    }

    NotingPort port;
    std::shared_ptr<QueueCore> queue;
};

}  // namespace

TEST("a waiting thread makes the small copies, the most urgent first") {
    World world(true);
    world.delay(500);
    std::vector<std::uint64_t> expected;
    for (std::int64_t id = 0; id < 100; ++id) {
        world.submit(id, id / 10, true);
        expected.push_back(static_cast<std::uint64_t>(90 - id / 10 * 10 + id % 10));
    }
    const QueueCore::Seen seen = world.queue->seen();
    CHECK_EQUAL(seen.results, std::uint64_t{0});
    world.queue->wait_past(seen, 100, patience);
    CHECK(world.port.threads == std::set{std::this_thread::get_id()});
    CHECK(world.port.offsets == expected);
    world.port.delayed = never;
    CHECK_EQUAL(world.finish(101).size(), std::size_t{101});
}

TEST("small copies that were left to a thread are made even if it stops waiting") {
    World world(true);
    world.submit(1, 0, true);
    world.queue->nudge();
    world.queue->wait_past({0, 0}, 1, patience);  // the nudge ends this at once
    while (world.queue->pending() > 0) {
        std::this_thread::yield();
    }
    world.submit(2, 0, true);
    world.queue->submit({});
    while (world.queue->pending() > 0) {
        std::this_thread::yield();
    }
    CHECK_EQUAL(world.finish(2).size(), std::size_t{2});
}

TEST("long copies, and all transfers of other ports, are left to the queue's threads") {
    for (const bool copies : {false, true}) {
        World world(copies);
        for (std::int64_t id = 0; id < 10; ++id) {
            world.submit(id, 0, true, {}, copies ? large : 8);
        }
        CHECK_EQUAL(world.finish(10).size(), std::size_t{10});
        CHECK(!world.port.threads.contains(std::this_thread::get_id()));
    }
}

TEST("a failed copy cancels the entries ordered after it, and no others") {
    World world(true);
    world.port.refused = 3;
    for (std::int64_t id = 0; id < 8; ++id) {
        world.submit(id, 0, true, id == 5 || id == 6 ? std::vector<std::int64_t>{id - 2} : std::vector<std::int64_t>{});
    }
    for (const Result& result : world.finish(8)) {
        CHECK(result.start <= result.end);
        CHECK_EQUAL(result.error.has_value(), result.id == 3);
        CHECK_EQUAL(result.cancelled, result.id == 5);
    }
    CHECK_EQUAL(world.port.offsets.size(), std::size_t{7});
}

TEST("an entry that gets another priority runs once, in its new place") {
    World world(false);
    world.delay(500);
    for (std::int64_t id = 1; id <= 3; ++id) {
        world.submit(id, id, false);
    }
    world.queue->reprioritize(1, 5);
    world.queue->reprioritize(3, 1);
    world.queue->reprioritize(3, 3);
    world.port.delayed = never;
    CHECK_EQUAL(world.finish(4).size(), std::size_t{4});
    CHECK((world.port.offsets == std::vector<std::uint64_t>{500, 1, 3, 2}));
    CHECK_EQUAL(world.queue->pending(), std::size_t{0});
}

TEST("closing waits for a copy that another thread makes") {
    World world(true);
    world.delay(500);
    world.port.reached = false;
    world.port.second_delayed = 1;
    world.submit(1, 0, true);
    std::thread waiter([&] { world.queue->wait_past({0, 0}, 1, patience); });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    world.port.delayed = never;        // the queue's thread ends
    CHECK(!world.queue->close(0.05));  // the copy may use its memory still
    world.port.second_delayed = never;
    CHECK(world.queue->close(patience));
    waiter.join();
}

int main() { return farpool::testing::run(); }
