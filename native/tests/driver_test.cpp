// The driver with a real queue: threads that write and read through a small arena never see wrong bytes.
#include "pager/driver.hpp"

#include <atomic>
#include <cstring>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>

#include "core/clock.hpp"
#include "core/extent_allocator.hpp"
#include "core/queue.hpp"
#include "tests/testing.hpp"

using namespace farpool::pager;
using farpool::ExtentAllocator;
using farpool::QueueCore;

namespace {

constexpr double patience = 60.0;

class SimulatedSpace : public Space {
public:
    explicit SimulatedSpace(std::int64_t capacity) : extents_(capacity, 64) {}
    std::int64_t reserve(std::int64_t nbytes, int) override { return extents_.alloc(nbytes); }
    void free(std::int64_t offset, std::int64_t, int) override { extents_.free(offset); }

private:
    ExtentAllocator extents_;
};

// A port over memory; one transfer of this many fails.
class SimulatedPort : public farpool::Port {
public:
    SimulatedPort(std::size_t nbytes, unsigned one_in, bool copies = false)
        : bytes_(nbytes), one_in_(one_in), copies_(copies) {}
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override {
        fail_sometimes();
        std::memcpy(into, bytes_.data() + offset, nbytes);
    }
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override {
        fail_sometimes();
        std::memcpy(bytes_.data() + offset, from, nbytes);
    }

    bool copies() const noexcept override { return copies_; }

private:
    void fail_sometimes() {
        if (one_in_ != 0 && ++calls_ % one_in_ == 0) {
            throw farpool::PortFailure({farpool::ErrorKind::tier, "told to fail", "simulated", 0, nullptr});
        }
    }

    std::vector<std::byte> bytes_;
    unsigned one_in_;
    bool copies_;
    std::atomic<unsigned> calls_ = 0;
};

// Notes the calls, and fails the next one of a kind.
class Noting : public Observer {
public:
    void starting(std::span<const Command> commands) override {
        for (const Command& command : commands) {
            if (const auto* transfer = std::get_if<std::shared_ptr<const Transfer>>(&command)) {
                notes.push_back((*transfer)->kind == Kind::fetch ? "fetch" : "write back");
            } else {
                notes.push_back("move");
            }
        }
        fail("starting");
    }
    void moved(std::size_t index) override {
        notes.push_back("moved " + std::to_string(index));
        fail("moved");
    }
    void ended(TransferId, bool failed) override {
        notes.push_back(failed ? "failed" : "ended");
        fail("ended");
    }
    void released(const Access& access) override {
        CHECK(access.granted);  // the pager does not know it yet
        notes.push_back("released");
        fail("released");
    }
    void raise_findings() override {
        notes.push_back("findings");
        fail("raise_findings");
    }
    std::vector<std::string> take() { return std::exchange(notes, {}); }

    std::string failing;
    std::vector<std::string> notes;

private:
    void fail(const std::string& what) {
        if (failing == what) {
            failing.clear();
            throw std::runtime_error(what);
        }
    }
};

struct World {
    World(std::int64_t capacity, unsigned one_in, bool copies = false, Observer* observer = nullptr)
        : arena(static_cast<std::size_t>(capacity)),
          port(1 << 20, one_in, copies),
          queue(std::make_shared<QueueCore>()),
          driver(
              std::make_unique<Pager>(capacity, std::vector<std::shared_ptr<Space>>{std::make_shared<SimulatedSpace>(1 << 20)},
                                      1, 64, 1 << 12, true, false),
              queue, reinterpret_cast<std::uintptr_t>(arena.data()), nullptr, observer) {
        driver.add_port(&port);
    }
    ~World() { queue->close(patience); }

    // Accesses one block; false if a transfer failed.
    bool access(BlockId block, Mode mode, const std::function<void(std::byte*)>& work) {
        Pause pause;
        auto lock = driver.lock(pause);
        const auto access = driver.request({{block, 1, mode, -1}});
        if (!access->granted) {
            Wait outcome;
            try {
                outcome = driver.await(lock, *access, farpool::monotonic_seconds() + patience, pause);
            } catch (...) {
                driver.abandon(access);
                throw;
            }
            if (outcome == Wait::refused) {
                return false;
            }
            CHECK(outcome == Wait::granted);
        }
        lock.unlock();
        work(arena.data() + access->places[0]);
        lock.lock();
        driver.release(*access);
        return true;
    }

    std::vector<std::byte> arena;
    SimulatedPort port;
    std::shared_ptr<QueueCore> queue;
    Driver driver;
};

// Runs threads that write counts into blocks of their own and read them again.
void run_threads(unsigned one_in, int steps, bool copies) {
    constexpr int blocks = 24;  // of one thread more than there is room for
    constexpr std::int64_t nbytes = 1024;
    World world(16 * nbytes, one_in, copies);
    std::vector<BlockId> first;
    for (int thread = 0; thread < 4; ++thread) {
        first.push_back(world.driver.pager().create(std::vector<std::int64_t>(blocks, nbytes), 0));
    }
    std::atomic<int> wrong = 0;
    std::atomic<int> refused = 0;
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number) {
        threads.emplace_back([&, number] {
            std::mt19937 random(static_cast<unsigned>(number));
            std::vector<int> written(blocks, -1);
            for (int step = 0; step < steps; ++step) {
                const auto index = static_cast<std::size_t>(random() % blocks);
                const BlockId block = first[static_cast<std::size_t>(number)] + static_cast<BlockId>(index);
                const auto value = static_cast<std::byte>(step);
                bool done = false;
                if (written[index] < 0 || random() % 2 == 0) {
                    done = world.access(block, Mode::overwrite, [&](std::byte* at) {
                        std::memset(at, static_cast<int>(value), nbytes);
                        written[index] = static_cast<int>(value);
                    });
                } else {
                    done = world.access(block, Mode::read, [&](std::byte* at) {
                        for (std::int64_t byte = 0; byte < nbytes; ++byte) {
                            wrong += static_cast<int>(at[byte]) != written[index];
                        }
                    });
                }
                refused += !done;
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK_EQUAL(wrong.load(), 0);
    CHECK_EQUAL(refused.load() > 0, one_in != 0);
    CHECK_EQUAL(world.driver.granted(), 0);
    CHECK(world.driver.peak() <= 16 * nbytes);
    CHECK(world.driver.links().size() == 2);
}

}  // namespace

TEST("threads that share an arena see their own bytes") {
    for (const bool copies : {false, true}) {
        run_threads(0, 2000, copies);
    }
}

TEST("a failed transfer refuses the access that waits and loses no bytes") {
    for (const bool copies : {false, true}) {
        run_threads(41, 2000, copies);
    }
}

TEST("a wait ends at its deadline, at close, and at a release by another thread") {
    World world(1024, 0);
    const BlockId block = world.driver.pager().create(std::vector<std::int64_t>{1024, 1024}, 0);
    Pause pause;
    auto lock = world.driver.lock(pause);
    const auto holder = world.driver.request({{block, 1, Mode::overwrite, -1}});
    CHECK(holder->granted);
    const auto waiting = world.driver.request({{block + 1, 1, Mode::overwrite, -1}});
    CHECK(world.driver.await(lock, *waiting, farpool::monotonic_seconds() + 0.01, pause) == Wait::timed_out);
    lock.unlock();
    std::thread releaser([&] {
        Pause own;
        const auto lock = world.driver.lock(own);
        world.driver.release(*holder);
    });
    lock.lock();
    CHECK(world.driver.await(lock, *waiting, farpool::monotonic_seconds() + patience, pause) == Wait::granted);
    lock.unlock();
    releaser.join();
    lock.lock();
    const auto last = world.driver.request({{block, 1, Mode::overwrite, -1}});
    lock.unlock();
    std::thread closer([&] {
        Pause own;
        const auto lock = world.driver.lock(own);
        world.driver.close();
    });
    lock.lock();
    CHECK(world.driver.await(lock, *last, farpool::monotonic_seconds() + patience, pause) == Wait::closed);
    lock.unlock();
    closer.join();
}

TEST("an access that is granted after the pool was closed does not begin") {
    World world(1024, 0);
    const BlockId block = world.driver.pager().create(std::vector<std::int64_t>{1024, 1024}, 0);
    Pause pause;
    auto lock = world.driver.lock(pause);
    const auto holder = world.driver.request({{block, 1, Mode::overwrite, -1}});
    const auto waiting = world.driver.request({{block + 1, 1, Mode::overwrite, -1}});
    CHECK(!waiting->granted);
    world.driver.release(*holder);  // grants it, or starts the write-back that it waits for
    while (!waiting->granted) {
        world.driver.wait(patience, pause);
    }
    CHECK_EQUAL(world.driver.granted(), 0);  // no caller has it, so the arena may be freed
    world.driver.close();
    CHECK(world.driver.await(lock, *waiting, farpool::monotonic_seconds() + patience, pause) == Wait::closed);
}

TEST("a wait for several results ends with the first one that failed") {
    SimulatedPort failing(1024, 1);
    SimulatedPort stuck(1024, 0);
    const auto queue = std::make_shared<QueueCore>();
    const QueueCore::Seen seen = queue->seen();
    std::vector<std::byte> memory(1024);
    const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
    std::atomic<bool> ended = false;
    std::thread waiter([&] {
        queue->wait_past(seen, 1000, patience);
        ended = true;
    });
    const farpool::Piece piece{0, address, 8};
    farpool::Submission submission{.id = 1, .port = &stuck, .pieces = {&piece, 1}};
    queue->submit({&submission, 1});
    while (queue->seen().results == 0) {
        std::this_thread::yield();
    }
    CHECK(!ended);  // one of a thousand
    submission = {.id = 2, .port = &failing, .pieces = {&piece, 1}};
    queue->submit({&submission, 1});
    waiter.join();
    CHECK_EQUAL(queue->seen().results, std::uint64_t{2});
    CHECK_EQUAL(queue->poll().size(), std::size_t{2});
    queue->close(patience);
}

using Notes = std::vector<std::string>;

TEST("an observer hears of commands, ends and releases in the order in which they happen") {
    Noting noting;
    World world(1024, 0, false, &noting);
    const BlockId block = world.driver.pager().create(std::vector<std::int64_t>{1024, 1024}, 0);
    const auto nothing = [](std::byte*) {};
    CHECK(world.access(block, Mode::overwrite, nothing));
    CHECK(noting.take() == (Notes{"released", "findings"}));
    CHECK(world.access(block + 1, Mode::overwrite, nothing));
    // The second command is a barrier: the block's range is free when the write-back has ended.
    CHECK(noting.take() == (Notes{"write back", "fetch", "ended", "ended", "released", "findings"}));
    CHECK(world.access(block, Mode::read, nothing));
    CHECK(noting.take() == (Notes{"write back", "fetch", "ended", "ended", "released", "findings"}));
}

TEST("an observer hears of moves, those of the pager and those inside an access") {
    Noting noting;
    World world(3 * 1024, 0, false, &noting);
    std::vector<BlockId> blocks;
    for (int number = 0; number < 3; ++number) {
        blocks.push_back(world.driver.pager().create(std::vector<std::int64_t>{1024}, 0));
        CHECK(world.access(blocks.back(), Mode::overwrite, [&](std::byte* at) { std::memset(at, number, 1024); }));
    }
    const BlockId large = world.driver.pager().create(std::vector<std::int64_t>{2048}, 0);
    for (const BlockId block : blocks) {  // the outer ones
        if (world.driver.pager().residency()[block].place != 1024) {
            world.driver.pager().retire(block, 1);
            CHECK(world.driver.pager().forget(block, 1));
        }
    }
    noting.take();
    CHECK(world.access(large, Mode::overwrite, [](std::byte*) {}));
    CHECK(noting.take() == (Notes{"move", "moved 0", "released", "findings"}));
    Pause pause;
    auto lock = world.driver.lock(pause);
    const auto access = world.driver.request({{large, 1, Mode::write, -1}});
    CHECK(access->granted);
    std::memset(world.arena.data() + access->places[0], 7, 512);
    noting.take();
    world.driver.move(access->places[0], access->places[0] + 256, 512);
    CHECK(noting.take() == (Notes{"move", "moved 0"}));
    CHECK_EQUAL(static_cast<int>(world.arena[static_cast<std::size_t>(access->places[0] + 767)]), 7);
    world.driver.release(*access);
}

TEST("an error of an observer leaves a driver that works and pins nothing") {
    for (const char* const failing : {"starting", "ended", "released", "raise_findings"}) {
        Noting noting;
        World world(4 * 1024, 0, false, &noting);
        const BlockId block = world.driver.pager().create(std::vector<std::int64_t>(12, 1024), 0);
        std::mt19937 random(1);
        int errors = 0;
        std::vector<int> written(12, -1);
        for (int step = 0; step < 600; ++step) {
            if (step % 20 == 0) {
                noting.failing = failing;
            }
            const auto index = static_cast<std::size_t>(random() % 12);
            const bool write = written[index] < 0 || random() % 2 == 0;
            try {
                const bool done =
                    world.access(block + static_cast<BlockId>(index), write ? Mode::overwrite : Mode::read, [&](std::byte* at) {
                        if (write) {
                            std::memset(at, step, 1024);
                            written[index] = step % 256;
                        } else {
                            CHECK_EQUAL(static_cast<int>(at[1023]), written[index]);
                        }
                    });
                CHECK(done || std::string(failing) == "starting");
            } catch (const std::runtime_error& error) {
                CHECK_EQUAL(std::string(error.what()), std::string(failing));
                ++errors;
                written[index] = write ? -1 : written[index];  // a write that was given up leaves any bytes
            }
            CHECK_EQUAL(world.driver.granted(), 0);
        }
        CHECK(errors > 10);
        for (BlockId pinned = block; pinned < block + 12; ++pinned) {
            CHECK_EQUAL(world.driver.pager().residency()[pinned].pins, 0);
        }
    }
}

TEST("an access whose check fails is given up") {
    Noting noting;
    World world(1024, 0, false, &noting);
    const BlockId block = world.driver.pager().create(std::vector<std::int64_t>{1024}, 0);
    Pause pause;
    auto lock = world.driver.lock(pause);
    const auto access = world.driver.request({{block, 1, Mode::overwrite, -1}});
    CHECK_THROWS(std::runtime_error, world.driver.check_grant(access, [] { throw std::runtime_error("checked"); }));
    CHECK(!access->granted);
    CHECK_EQUAL(world.driver.granted(), 0);
    lock.unlock();
    CHECK(world.access(block, Mode::overwrite, [](std::byte*) {}));
    CHECK(noting.take() == (Notes{"released", "findings"}));  // it never heard of the first one
}

int main() { return farpool::testing::run(); }
