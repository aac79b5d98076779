// A device's queue when calls are refused, tiers fail, the device is lost, the queue is closed or the process forks.
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <new>
#include <random>
#include <tuple>

#include "tests/device_world.hpp"

using namespace farpool::testing;
using farpool::Direction;
using farpool::ErrorKind;
using farpool::PortFailure;
using farpool::pager::BlockId;

namespace {

constexpr std::size_t chunk = 1 << 10;
constexpr int out_of_memory = 2;

bool mentions(const std::optional<farpool::PortError>& error, const std::string& text) {
    return error && error->message.find(text) != std::string::npos;
}

// Each transfer has its own bytes of the tier: `after` orders only what happens in the arena.
std::uint64_t offset_of(std::int64_t id) { return static_cast<std::uint64_t>(id) * 8 * chunk; }

Order transfer(const Rig& rig, std::int64_t id, Direction direction, std::size_t chunks, std::vector<std::int64_t> after = {}) {
    return {.id = id,
            .direction = direction,
            .port = const_cast<SimulatedPort*>(&rig.port),
            .pieces = {rig.piece(offset_of(id), 0, chunks * chunk)},
            .after = std::move(after)};
}

// Submits a transfer of four chunks that is to fail, and what waits for it, and checks how they end. Then all staging memory
// can be used again.
void check_failure(Rig& rig, Direction direction, const std::string& error) {
    Order aside = transfer(rig, 6, direction == Direction::read ? Direction::write : Direction::read, 1);
    aside.priority = -1;
    rig.submit({transfer(rig, 1, direction, 4),
                transfer(rig, 2, Direction::read, 2, {1}),
                {.id = 3, .after = {2}},
                transfer(rig, 4, Direction::write, 2, {3}),
                {.id = 5, .after = {1}},
                aside});
    rig.collect(6);
    CHECK(mentions(rig.results.at(1).error, error) && !rig.results.at(1).cancelled);
    for (const std::int64_t id : {2, 3, 4, 5}) {
        CHECK(rig.results.at(id).cancelled && !rig.results.at(id).error);
        CHECK(rig.place(1) < rig.place(id));
    }
    CHECK(!rig.results.at(6).error && !rig.results.at(6).cancelled);
    rig.submit({transfer(rig, 7, Direction::write, 8), transfer(rig, 8, Direction::read, 8, {7})});
    rig.collect(8);
    CHECK(!rig.results.at(7).error && !rig.results.at(8).error && !rig.results.at(8).cancelled);
    CHECK(!rig.queue->trouble());
    rig.close();
}

// The message of the error that a call throws; empty if it throws none.
template <typename Call>
std::string error_of(Call call) {
    try {
        call();
        return {};
    } catch (const std::exception& error) {
        return error.what();
    }
}

// The program overwrites a block. `asked`: called when the access has been asked for.
void use(World& world, BlockId block, const std::function<void()>& asked = [] {}) {
    farpool::pager::Pause pause;
    auto lock = world.driver->lock(pause);
    const auto access = world.driver->request({{block, 1, farpool::pager::Mode::overwrite, -1}}, world.handle(0));
    asked();
    try {
        if (!access->granted) {
            const double deadline = farpool::monotonic_seconds() + patience;
            CHECK(world.driver->await(lock, *access, deadline, pause) == farpool::pager::Wait::granted);
        }
    } catch (...) {
        world.driver->abandon(access);
        throw;
    }
    world.driver->release(*access);
}

// While this lives, allocations of more than `most` bytes fail, the nth from now on and as many as `count` in all, on other
// threads than this one, or on this one alone.
class Exhausted {
public:
    enum class On : std::uint8_t { others, this_one };

    Exhausted(std::size_t most, std::size_t nth, std::size_t count = 1, On on = On::others) {
        owner = gettid();
        owner_alone = on == On::this_one;
        first = nth;
        last = nth + count - 1;
        asked = 0;
        largest = most;
    }
    Exhausted(const Exhausted&) = delete;
    Exhausted& operator=(const Exhausted&) = delete;
    ~Exhausted() { largest = SIZE_MAX; }

    static bool refuses(std::size_t nbytes) {
        if (nbytes <= largest || spared || (gettid() == owner) != owner_alone) {
            return false;
        }
        const std::size_t number = ++asked;
        return number >= first && number <= last;
    }
    // Whether an allocation has failed.
    static bool happened() { return asked >= first; }

    static inline thread_local bool spared = false;  // this thread's allocations never fail

private:
    static inline std::atomic<std::size_t> largest = SIZE_MAX;
    static inline std::atomic<std::size_t> first = 0;
    static inline std::atomic<std::size_t> last = 0;
    static inline std::atomic<std::size_t> asked = 0;
    static inline std::atomic<pid_t> owner = 0;
    static inline std::atomic<bool> owner_alone = false;
};

// A device whose own allocations never fail: the simulated driver is not what is tested.
class SparedCuda : public farpool::device::Cuda {
    using Event = farpool::device::Event;
    using Stream = farpool::device::Stream;
    struct Spared {
        Spared() { Exhausted::spared = true; }
        ~Spared() { Exhausted::spared = false; }
    };

public:
    using Cuda::Cuda;
    void enter() override {
        const Spared now;
        Cuda::enter();
    }
    Event make_event() override {
        const Spared now;
        return Cuda::make_event();
    }
    void record(Event event, Stream stream) override {
        const Spared now;
        Cuda::record(event, stream);
    }
    void wait(Stream stream, Event event) override {
        const Spared now;
        Cuda::wait(stream, event);
    }
    bool passed(Event event) override {
        const Spared now;
        return Cuda::passed(event);
    }
    void synchronize(Event event) override {
        const Spared now;
        Cuda::synchronize(event);
    }
    double elapsed(Event from, Event to) override {
        const Spared now;
        return Cuda::elapsed(from, to);
    }
    void copy_in(Stream stream, std::uintptr_t target, const void* source, std::size_t nbytes) override {
        const Spared now;
        Cuda::copy_in(stream, target, source, nbytes);
    }
    void copy_out(Stream stream, void* target, std::uintptr_t source, std::size_t nbytes) override {
        const Spared now;
        Cuda::copy_out(stream, target, source, nbytes);
    }
};

// A device of which calls fail with errors of any kind.
template <typename Error>
struct FailingCuda : farpool::device::Cuda {
    using Cuda::Cuda;
    void record(farpool::device::Event event, farpool::device::Stream stream) override {
        if (at_record) {
            throw Error();
        }
        Cuda::record(event, stream);
    }
    void synchronize(farpool::device::Event event) override {
        if (at_end) {
            throw Error();
        }
        Cuda::synchronize(event);
    }
    std::atomic<bool> at_record = false;
    std::atomic<bool> at_end = false;
};

Setup four_chunks(std::uint64_t seed) { return {.seed = seed, .policy = any_order, .staging = 4 * chunk, .chunk = chunk}; }

}  // namespace

// Not inlined: the compiler would warn of memory of `new` that goes to `free`.
[[gnu::noinline]] void* operator new(std::size_t nbytes) {
    void* const made = Exhausted::refuses(nbytes) ? nullptr : std::malloc(nbytes);
    if (made == nullptr) {
        throw std::bad_alloc();
    }
    return made;
}
[[gnu::noinline]] void* operator new(std::size_t nbytes, const std::nothrow_t&) noexcept { return std::malloc(nbytes); }
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, const std::nothrow_t&) noexcept { std::free(memory); }

TEST("a copy that the driver refuses fails its transfer, and cancels those that wait for it") {
    for (const std::uint64_t nth : {1, 2, 4}) {
        for (const auto& [direction, name] :
             {std::pair(Direction::read, "cuMemcpyHtoDAsync_v2"), std::pair(Direction::write, "cuMemcpyDtoHAsync_v2")}) {
            Rig rig(four_chunks(nth));
            fake_cuda().fail_call(name, nth, out_of_memory);
            check_failure(rig, direction, name);
        }
    }
}

TEST("a tier that refuses a part of a block fails its transfer, and cancels those that wait for it") {
    for (const unsigned nth : {1U, 2U, 4U}) {
        for (const Direction direction : {Direction::read, Direction::write}) {
            Rig rig(four_chunks(nth));
            rig.port.refused = offset_of(1) + (nth - 1) * chunk;
            check_failure(rig, direction, "told to fail");
        }
    }
}

TEST("an event or a wait that is refused before a copy fails its transfer only") {
    for (const char* const name : {"cuEventRecord", "cuStreamWaitEvent", "cuEventCreate"}) {
        Rig rig(four_chunks(1));
        rig.use(0, 0, [] {});
        fake_cuda().fail_call(name, 1, out_of_memory);
        Order order = transfer(rig, 1, Direction::write, 2);
        order.last_use = 0;
        rig.submit({order});
        rig.collect(1);
        CHECK(mentions(rig.results.at(1).error, name));
        order.id = 2;
        rig.submit({order});
        rig.collect(2);
        CHECK(!rig.results.at(2).error);
        rig.close();
    }
}

TEST("if the device cannot tell when a copy ends, its memory is not used again, and the queue says why") {
    Rig rig({.policy = any_order, .staging = chunk, .chunk = chunk});
    fake_cuda().fail_call("cuEventRecord", 2, out_of_memory);
    rig.submit({transfer(rig, 1, Direction::read, 1)});
    until("the trouble is known", [&] { return rig.queue->trouble().has_value(); });
    CHECK(mentions(rig.queue->trouble(), "cuEventRecord"));
    rig.submit({transfer(rig, 2, Direction::write, 1), {.id = 3}});
    rig.collect(1);  // the barrier
    linger();
    CHECK_EQUAL(calls("cuMemcpyDtoHAsync_v2"), 0U);
    CHECK_EQUAL(rig.port.calls(), 1U);
    while (fake_cuda().advance(1 << 20) > 0) {
    }
    CHECK(!rig.queue->close(patience));
    CHECK(!rig.queue->close(0));
    rig.collect(2);
    CHECK(rig.results.at(2).cancelled);
    rig.end();
}

TEST("after the device was lost no transfer is reported as done, and the queue says why") {
    for (const Direction direction : {Direction::read, Direction::write}) {
        Rig rig(four_chunks(3));
        fake_cuda().set(fake_copies_until_failure, 3);
        rig.submit({transfer(rig, 1, direction, 8), transfer(rig, 2, Direction::read, 1, {1})});
        until("the trouble is known", [&] { return rig.queue->trouble().has_value(); });
        CHECK(mentions(rig.queue->trouble(), "CUDA_ERROR_LAUNCH_FAILED"));
        CHECK(!rig.queue->close(patience));
        for (const auto& result : rig.queue->poll()) {
            CHECK(result.error || result.cancelled);
        }
        rig.queue.reset();
    }
}

TEST("an access that waits for a copy whose end is not known gives up at its deadline") {
    World world({.policy = any_order});
    farpool::pager::Pause pause;
    auto& driver = *world.driver;
    const auto block = driver.pager().create(std::vector<std::int64_t>{15 << 10}, 0);
    const auto other = driver.pager().create(std::vector<std::int64_t>{15 << 10}, 0);
    const auto ask = [&](farpool::pager::BlockId id, double seconds) {
        auto lock = driver.lock(pause);
        const auto access = driver.request({{id, 1, farpool::pager::Mode::overwrite, -1}}, world.handle(0));
        const auto outcome = access->granted ? farpool::pager::Wait::granted
                                             : driver.await(lock, *access, farpool::monotonic_seconds() + seconds, pause);
        if (outcome == farpool::pager::Wait::granted) {
            driver.release(*access);
        } else {
            driver.abandon(access);
        }
        return outcome;
    };
    CHECK(ask(block, patience) == farpool::pager::Wait::granted);
    fake_cuda().set(fake_copies_until_failure, 2);
    CHECK(ask(other, 0.3) == farpool::pager::Wait::timed_out);
    CHECK(mentions(world.queue->trouble(), "CUDA_ERROR_LAUNCH_FAILED"));
    CHECK(!world.queue->close(patience));
    world.driver.reset();
    world.queue.reset();
}

TEST("after a move that the device refuses, every access fails with that error") {
    constexpr const char* name = "cuMemcpyDtoDAsync_v2";
    for (const std::uint64_t nth : {1, 4}) {
        World world({.policy = any_order});
        std::vector<BlockId> blocks;
        for (const std::int64_t size : {3, 5, 2, 7, 4, 6}) {
            blocks.push_back(world.driver->pager().create(std::vector{size << 10}, 0));
        }
        // Blocks of many sizes in a small arena: some have to move.
        fake_cuda().fail_call(name, nth, out_of_memory);
        std::mt19937 random(7);
        std::string error;
        for (int step = 0; error.empty() && step < 10000; ++step) {
            error = error_of([&] { use(world, blocks[random() % blocks.size()]); });
        }
        CHECK(error.find("the device did not move bytes") != std::string::npos && error.find(name) != std::string::npos);
        CHECK(world.queue->broken() && mentions(world.queue->trouble(), error));
        for (const BlockId block : blocks) {
            CHECK_EQUAL(error_of([&] { use(world, block); }), error);
        }
        CHECK_EQUAL(error_of([&] { world.submit({{.id = 999}}); }), error);
        CHECK_EQUAL(world.driver->granted(), 0);
        world.close();
    }
}

TEST("a range whose work has no event at its end is not given to another block") {
    World world({.policy = any_order});
    const BlockId first = world.driver->pager().create(std::vector<std::int64_t>{10 << 10}, 0);
    const BlockId second = world.driver->pager().create(std::vector<std::int64_t>{10 << 10}, 0);
    use(world, first);
    farpool::pager::Pause pause;
    auto lock = world.driver->lock(pause);
    const auto access = world.driver->request({{first, 1, farpool::pager::Mode::write, -1}}, world.handle(0));
    CHECK(access->granted);
    lock.unlock();
    std::string waiting;  // until the first access is released, as both do not fit
    std::atomic<bool> asked = false;
    std::thread other([&] {
        world.cuda->enter();
        waiting = error_of([&] { use(world, second, [&] { asked = true; }); });
    });
    until("the other one waits", [&] { return asked.load(); });
    lock.lock();
    fake_cuda().fail_call("cuEventRecord", 1, out_of_memory);
    const std::string error = error_of([&] { world.driver->release(*access); });
    lock.unlock();
    other.join();
    CHECK(error.find("cuEventRecord") != std::string::npos);
    CHECK_EQUAL(waiting, error);
    CHECK_EQUAL(error_of([&] { use(world, first); }), error);
    CHECK_EQUAL(world.driver->granted(), 0);
    CHECK_EQUAL(world.port.calls(), 0U);  // nothing was written back, into or out of the range
    world.close();
}

TEST("if a thread of the queue fails, the process goes on, accesses fail, and the memory of copies stays as it is") {
    // A queue's threads expect no such errors of these calls.
    for (const bool launcher : {true, false}) {
        const auto cuda = std::make_shared<std::shared_ptr<FailingCuda<std::bad_exception>>>();
        Setup setup = four_chunks(1);
        setup.open = [&] { return *cuda = std::make_shared<FailingCuda<std::bad_exception>>(0, FAKE_CUDA_PATH); };
        World world(setup);
        const BlockId block = world.driver->pager().create(std::vector<std::int64_t>{1 << 10}, 0);
        use(world, block);
        (launcher ? (*cuda)->at_record : (*cuda)->at_end) = true;
        world.submit({transfer(world, 1, Direction::read, 2)});
        until("the queue is broken", [&] { return world.queue->broken(); });
        until("the other threads have nothing to do", others_sleep);
        CHECK(mentions(world.queue->trouble(), "a thread of the device's queue has ended: std::bad_exception"));
        CHECK(error_of([&] { use(world, block); }).find("bad_exception") != std::string::npos);
        CHECK(!world.queue->close(patience));
        CHECK(!world.queue->close(0));
        while (fake_cuda().advance(1 << 20) > 0) {
        }
        world.driver.reset();
        world.queue.reset();
    }
}

TEST("a transfer for which the queue's thread finds no memory fails alone") {
    constexpr std::size_t pieces = 3000;  // of 64 bytes
    constexpr std::size_t nbytes = 64 * pieces;
    for (const bool staged : {true, false}) {
        for (const Direction direction : {Direction::read, Direction::write}) {
            Rig rig({.policy = any_order,
                     .capacity = 2 * nbytes,
                     .page_locked = 2 * nbytes,
                     .locked_chunk = 1 << 19,
                     .staging = 2 * nbytes,
                     .chunk = nbytes});
            std::vector<farpool::device::HostPart> parts;
            until("the memory is page-locked", [&] { return rig.locks->parts(&rig.mapped, 0, rig.locked.nbytes(), parts); });
            farpool::Port* const port = staged ? static_cast<farpool::Port*>(&rig.port) : &rig.mapped;
            Order good{.id = 1, .direction = direction, .port = port, .pieces = {rig.piece(nbytes, nbytes, nbytes)}};
            std::size_t ended = 0;
            std::size_t failures = 0;
            // Each of the large allocations fails once, until there are no more.
            for (bool failed = true; failed; failures += failed ? 1 : 0) {
                Order large{.id = good.id + 1, .direction = direction, .port = port};
                for (std::size_t index = 0; index < pieces; ++index) {
                    large.pieces.push_back(rig.piece(64 * index, 64 * (pieces - 1 - index), 64));
                }
                Exhausted exhausted(80'000, failures + 1);  // more than a vector of 2048 parts, or 3000 pieces
                rig.submit({good, large, {.id = large.id + 1, .after = {large.id}}});
                ended += 3;
                rig.collect(ended);
                failed = rig.results.at(large.id).error.has_value();
                CHECK(!rig.results.at(good.id).error && !rig.results.at(good.id).cancelled);
                CHECK_EQUAL(failed, mentions(rig.results.at(large.id).error, "bad_alloc"));
                CHECK_EQUAL(rig.results.at(large.id + 1).cancelled, failed);
                CHECK(!rig.queue->broken() && !rig.queue->trouble());
                good.id += 3;
            }
            CHECK(failures >= 2);  // cut into parts and chunks, and copied or submitted
            rig.close();
        }
    }
}

TEST("a call to the device for which there is no memory fails its transfer, or is made again") {
    for (const bool launcher : {true, false}) {
        const auto cuda = std::make_shared<std::shared_ptr<FailingCuda<std::bad_alloc>>>();
        Setup setup = four_chunks(1);
        setup.open = [&] { return *cuda = std::make_shared<FailingCuda<std::bad_alloc>>(0, FAKE_CUDA_PATH); };
        Rig rig(setup);
        std::atomic<bool>& failing = launcher ? (*cuda)->at_record : (*cuda)->at_end;
        failing = true;
        rig.submit({transfer(rig, 1, Direction::read, 1)});
        if (launcher) {
            rig.collect(1);
            CHECK(mentions(rig.results.at(1).error, "bad_alloc"));
            failing = false;
        } else {
            until("the trouble is known", [&] { return mentions(rig.queue->trouble(), "bad_alloc"); });
            CHECK(rig.queue->poll().empty());
            failing = false;
            rig.collect(1);
            CHECK(!rig.results.at(1).error);
        }
        rig.submit({transfer(rig, 2, Direction::write, 4), transfer(rig, 3, Direction::read, 4, {2})});
        rig.collect(3);
        CHECK(!rig.results.at(2).error && !rig.results.at(3).error);
        CHECK(!rig.queue->broken() && !rig.queue->trouble());
        rig.close();
    }
}

TEST("whichever allocation of the queue's threads fails, no copy is lost, and the next transfers succeed") {
    constexpr std::size_t nbytes = 4 * chunk;
    for (const auto& [staged, direction, count] :
         {std::tuple(true, Direction::read, 1), std::tuple(true, Direction::write, 1), std::tuple(false, Direction::read, 1),
          std::tuple(false, Direction::write, 1), std::tuple(true, Direction::read, 5),
          std::tuple(true, Direction::write, 5)}) {
        std::size_t failures = 0;
        for (bool failed = true; failed; failures += failed ? 1 : 0) {
            CHECK(failures < 1000);
            Setup setup = four_chunks(failures);
            setup.page_locked = 64 << 10;
            setup.locked_chunk = 64 << 10;
            setup.open = [] { return std::make_shared<SparedCuda>(0, FAKE_CUDA_PATH); };
            Rig rig(setup);
            std::vector<farpool::device::HostPart> parts;
            until("the memory is page-locked", [&] { return rig.locks->parts(&rig.mapped, 0, rig.locked.nbytes(), parts); });
            rig.use(0, 0, [] {});
            auto* const port = staged ? static_cast<farpool::Port*>(&rig.port) : &rig.mapped;
            std::byte* const below = staged ? rig.port.at(0) : rig.locked.data();
            const bool fetch = direction == Direction::read;
            std::byte* const target = fetch ? rig.at(0) : below;
            std::memset(fetch ? below : rig.at(0), 7, nbytes);
            std::memset(below + nbytes, 7, nbytes);  // what the second transfer reads
            const Direction back = fetch ? Direction::write : Direction::read;
            const Order first{
                .id = 1, .direction = direction, .port = port, .pieces = {rig.piece(0, 0, nbytes)}, .last_use = 0};
            {
                const Exhausted exhausted(0, failures + 1, static_cast<std::size_t>(count));
                rig.submit({first,
                            {.id = 2, .direction = back, .port = port, .pieces = {rig.piece(nbytes, 0, nbytes)}, .after = {1}},
                            {.id = 3, .after = {2}}});
                rig.collect(3);
                failed = Exhausted::happened();
            }
            bool bad = false;
            for (const auto& [id, result] : rig.results) {
                CHECK(bad ? result.cancelled || result.error : !result.cancelled);
                CHECK(!result.error || mentions(result.error, "bad_alloc") || mentions(result.error, "out of memory"));
                bad = bad || result.error.has_value();
            }
            CHECK(failed || !bad);
            CHECK(rig.results.at(1).error || holds(target, nbytes, 7));
            CHECK(!rig.queue->broken() && !rig.queue->trouble());
            std::memset(target, 0, nbytes);
            Order again = first;
            again.id = 4;
            rig.submit({again, {.id = 5, .after = {4}}});
            rig.collect(5);
            CHECK(!rig.results.at(4).error && !rig.results.at(5).cancelled);
            CHECK(holds(target, nbytes, 7));
            rig.close();
        }
        CHECK(failures >= 5);
    }
}

TEST("whichever allocation of a submission fails, the entries before it are submitted, and the others can be submitted again") {
    for (std::size_t failures = 0, failed = 1; failed != 0; failures += failed) {
        CHECK(failures < 1000);
        Rig rig(four_chunks(failures));
        rig.port.allowed = 0;  // so that nothing has ended when something waits for it
        const std::vector<Order> orders = {transfer(rig, 1, Direction::write, 2),
                                           transfer(rig, 2, Direction::read, 2, {1}),
                                           {.id = 3, .after = {1, 2}},
                                           transfer(rig, 4, Direction::write, 1, {3, 1})};
        std::vector<farpool::Submission> batch;
        for (const Order& order : orders) {
            batch.push_back({order.id, order.port, order.direction, order.pieces, order.after, order.priority,
                             Rig::keepalive(order.id), order.last_use});
        }
        {
            const Exhausted exhausted(0, failures + 1, 1, Exhausted::On::this_one);
            try {
                rig.queue->submit(batch);
                failed = 0;
            } catch (const std::bad_alloc&) {
            }
        }
        const auto left = std::ranges::find_if(batch, [](const auto& one) { return one.keepalive != nullptr; });
        CHECK(std::all_of(left, batch.end(), [](const auto& one) { return one.keepalive != nullptr; }));
        CHECK_EQUAL(rig.queue->pending(), static_cast<std::size_t>(left - batch.begin()));
        CHECK_EQUAL(left == batch.end(), failed == 0);
        rig.queue->submit({left, batch.end()});
        rig.port.allowed = UINT32_MAX;
        rig.collect(orders.size());
        for (const auto& [id, result] : rig.results) {
            CHECK(!result.error && !result.cancelled);
        }
        CHECK(rig.place(1) < rig.place(2) && rig.place(2) < rig.place(3) && rig.place(3) < rig.place(4));
        rig.close();
    }
}

TEST("a queue that cannot be made gives back what it has taken") {
    const std::vector<std::pair<const char*, const char*>> pairs = {{"cuStreamCreate", "cuStreamDestroy_v2"},
                                                                    {"cuEventCreate", "cuEventDestroy_v2"},
                                                                    {"cuMemAlloc_v2", "cuMemFree_v2"},
                                                                    {"cuMemHostRegister_v2", "cuMemHostUnregister"}};
    const char* const others[] = {"cuEventRecord", "cuEventSynchronize", "cuStreamIsCapturing"};
    for (std::uint64_t nth = 1; nth <= 3; ++nth) {
        std::vector<const char*> names;
        for (const auto& [make, end] : pairs) {
            names.push_back(make);
        }
        names.insert(names.end(), std::begin(others), std::end(others));
        for (const char* const name : names) {
            fake_cuda().reset(nth, any_order);
            {
                const auto cuda = farpool::device::open_cuda(0, FAKE_CUDA_PATH);
                cuda->enter();
                fake_cuda().fail_call(name, nth, out_of_memory);
                bool refused = false;
                try {
                    const farpool::device::DeviceQueue queue(cuda, {.staging = 4096}, nullptr);
                } catch (const PortFailure&) {
                    refused = true;
                }
                for (const auto& [make, end] : pairs) {
                    const std::uint64_t failed = refused && std::string(make) == name ? 1 : 0;
                    CHECK_EQUAL(calls(make) - failed, calls(end));
                }
                CHECK(refused == (calls(name) >= nth));
            }
            CHECK_EQUAL(fake_cuda().violations(), std::string{});
        }
    }
}

TEST("an entry that is still pending is refused; those before it in its batch are submitted") {
    Rig rig(four_chunks(1));
    rig.port.allowed = 0;
    rig.submit({transfer(rig, 1, Direction::read, 1)});
    CHECK_THROWS(PortFailure, rig.submit({transfer(rig, 2, Direction::read, 1), transfer(rig, 1, Direction::read, 1)}));
    until("both are at the tier", [&] { return rig.port.calls() == 2; });
    rig.port.allowed = UINT32_MAX;
    rig.collect(2);
    rig.close();
}

TEST("a queue is closed while everything is under way, by several threads, and then again") {
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
        Rig rig({.seed = seed,
                 .policy = any_order,
                 .real_time_rate = seed % 2 == 0 ? 1e7 : 0,
                 .capacity = 24 * 4 * chunk,
                 .staging = 4 * chunk,
                 .chunk = chunk});
        std::vector<Order> orders;
        for (std::int64_t id = 0; id < 24; ++id) {
            orders.push_back(transfer(rig, id, static_cast<Direction>(id % 2), 4));
            orders.back().pieces[0].address += static_cast<std::size_t>(id) * 4 * chunk;  // others may run at the same time
            if (id % 3 == 0 && id > 0) {
                orders.back().after = {id - 1};
            } else if (id % 5 == 0) {
                orders.back().port = nullptr;
            }
        }
        rig.port.allowed = static_cast<unsigned>(4 * seed);
        rig.submit(orders);
        until("some are under way", [&] { return rig.port.calls() > 0 && rig.port.calls() >= 4 * seed; });
        std::vector<std::thread> threads;
        std::atomic<int> closed = 0;
        for (int number = 0; number < 3; ++number) {
            threads.emplace_back([&] {
                rig.cuda->enter();
                closed += rig.queue->close(patience) ? 1 : 0;
            });
        }
        linger();
        rig.port.allowed = UINT32_MAX;
        for (auto& thread : threads) {
            thread.join();
        }
        CHECK_EQUAL(closed.load(), 3);
        CHECK(rig.queue->close(0));
        rig.collect(24);  // each once, with its keepalive
        CHECK_EQUAL(rig.queue->pending(), 0U);
        CHECK_THROWS(PortFailure, rig.submit({{.id = 99}}));
        CHECK(!rig.queue->wait(0));
        rig.close();
    }
}

TEST("close gives up on a transfer that does not end, and a later one ends the queue") {
    Rig rig(four_chunks(1));
    rig.port.allowed = 0;
    rig.submit({transfer(rig, 1, Direction::read, 1)});
    until("it is at the tier", [&] { return rig.port.calls() == 1; });
    CHECK(!rig.queue->close(0.01));
    CHECK_EQUAL(rig.queue->pending(), 1U);
    rig.port.allowed = 1;
    CHECK(rig.queue->close(patience));
    CHECK(rig.collect(1).at(1).cancelled);
    rig.close();
}

TEST("a queue that is closed has given back all that it has taken of the device") {
    Rig rig(four_chunks(1));
    rig.use(0, 0, [] {});
    rig.queue->move(rig.arena + 1024, rig.arena, 512, 0);
    rig.submit({transfer(rig, 1, Direction::read, 4)});
    rig.collect(1);
    rig.stop();
    CHECK_EQUAL(calls("cuStreamDestroy_v2") + rig.streams.size(), calls("cuStreamCreate"));
    CHECK_EQUAL(calls("cuMemFree_v2") + 1, calls("cuMemAlloc_v2"));  // the arena is the test's
    CHECK_EQUAL(calls("cuMemHostUnregister"), calls("cuMemHostRegister_v2"));
    // `finish` has an event of its own, which it ends.
    CHECK_EQUAL(calls("cuEventDestroy_v2"), calls("cuEventCreate"));
    CHECK_EQUAL(rig.queue->streams().size(), 1U);  // the program's
    CHECK_THROWS(PortFailure, (rig.queue->move(rig.arena, rig.arena + 1024, 512, 0), 0));
    CHECK_THROWS(PortFailure, (rig.queue->fill(rig.arena, 512, 0), 0));
    CHECK_THROWS(PortFailure, (rig.queue->order_use(rig.handle(0), 0), 0));
    rig.queue->end_use(rig.handle(0), 1);
    CHECK(!rig.queue->broken());
    const auto destroyed = calls("cuStreamDestroy_v2");
    CHECK(rig.queue->close(0));
    rig.end();
    CHECK_EQUAL(calls("cuStreamDestroy_v2"), destroyed);
}

TEST("close gives nothing back while a move waits for the program's work") {
    Rig rig({.real_time_rate = 1e12});
    Gate& gate = rig.gate();
    rig.use(0, 0, [&] { gate.pass(); });
    rig.queue->move(rig.arena + 1024, rig.arena, 512, 0);
    CHECK(!rig.queue->close(0.01));
    CHECK_EQUAL(calls("cuStreamDestroy_v2") + calls("cuMemFree_v2") + calls("cuMemHostUnregister"), 0U);
    CHECK_EQUAL(rig.queue->streams().size(), 2U);
    gate.open();
    rig.close();
}

TEST("a forked child leaves the queue alone") {
    Rig rig(four_chunks(1));
    using farpool::device::DeviceQueue;
    auto idle = std::make_shared<DeviceQueue>(rig.cuda, DeviceQueue::Config{.staging = 4096}, nullptr);
    CHECK(rig.queue->ours());
    // The child reads counters of the simulated driver and gives memory back, so no other thread may hold a lock of these.
    until("all other threads sleep", others_sleep);
    const pid_t child = fork();
    if (child == 0) {
        alarm(20);
        const bool ours = rig.queue->ours();
        rig.queue->nudge();
        rig.queue.reset();
        idle->nudge();
        idle.reset();  // the last reference
        _exit(ours || calls("cuStreamDestroy_v2") + calls("cuEventDestroy_v2") + calls("cuMemFree_v2") > 0 ? 1 : 0);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    rig.submit({transfer(rig, 1, Direction::read, 4)});
    CHECK(!rig.collect(1).at(1).error);
    CHECK(idle.use_count() == 1);
    idle.reset();
    rig.close();
}

int main() { return run(); }
