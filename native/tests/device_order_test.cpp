// The order between a program's work, moves and copies: no copy comes too early, and none waits for work that it does not need.
// A kernel that waits at a gate shows both.
#include <cmath>
#include <numeric>
#include <random>

#include "tests/device_world.hpp"

using namespace farpool::testing;
using farpool::Direction;
using farpool::ErrorKind;
using farpool::PortFailure;
using farpool::device::Stream;

namespace {

constexpr double fast = 1e12;  // bytes per second

// The times of so many accesses.
std::vector<farpool::Ran> all_ran(Rig& rig, std::size_t count) {
    std::vector<farpool::Ran> ran;
    std::int64_t barrier = 0;
    until("all accesses are reported", [&] {
        rig.submit({{.id = ++barrier}});  // wakes the launcher
        const auto more = rig.queue->take_ran();
        ran.insert(ran.end(), more.begin(), more.end());
        return ran.size() == count;
    });
    return ran;
}

Setup in_real_time(std::size_t streams) { return {.real_time_rate = fast, .streams = streams}; }

void opened_after_copy(Gate& gate, const char* copy, std::uint64_t count) {
    until("the copy is queued", [&] { return calls(copy) >= count; });
    linger();
    gate.open();
}

void set(std::byte* at, std::size_t nbytes, int value) { std::memset(at, value, nbytes); }

}  // namespace

TEST("a copy waits for the work up to its last use on each stream, and for no later work") {
    Rig rig(in_real_time(2));
    Gate& earlier = rig.gate();
    Gate& later = rig.gate();
    std::atomic<bool> later_ran = false;
    set(rig.at(0), 512, 0);
    rig.use(0, 0, [&] { earlier.pass(), set(rig.at(0), 256, 1); });
    rig.use(1, 1, [&] { earlier.pass(), set(rig.at(256), 256, 2); });
    rig.use(0, 2, [&] { later.pass(), later_ran = true; });
    rig.use(1, 3, [&] { later.pass(), later_ran = true; });
    rig.submit({{.id = 1, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 0, 512)}, .last_use = 1}});
    opened_after_copy(earlier, "cuMemcpyDtoHAsync_v2", 1);
    CHECK(!rig.collect(1).at(1).error);
    CHECK(!later_ran);
    CHECK(holds(rig.port.at(0), 256, 1) && holds(rig.port.at(256), 256, 2));
    // A copy of bytes that no access uses waits for nothing.
    rig.submit({{.id = 2, .direction = Direction::read, .port = &rig.port, .pieces = {rig.piece(0, 1024, 512)}}});
    CHECK(!rig.collect(2).at(2).error);
    CHECK(!later_ran);
    later.open();
    rig.close();
}

TEST("a copy waits for an access that was released after accesses with higher ordinals") {
    Rig rig(in_real_time(1));
    Gate& gate = rig.gate();
    rig.use(0, 7, [] {});
    rig.use(0, 8, [] {});
    rig.use(0, 3, [&] { gate.pass(), set(rig.at(0), 512, 9); });
    rig.submit({{.id = 1, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 0, 512)}, .last_use = 3}});
    opened_after_copy(gate, "cuMemcpyDtoHAsync_v2", 1);
    CHECK(!rig.collect(1).at(1).error);
    CHECK(holds(rig.port.at(0), 512, 9));
    rig.close();
}

TEST("few events are kept, and a copy then waits for the next event that is kept") {
    Rig rig(in_real_time(1));
    constexpr int uses = 2000;
    constexpr int wanted = 100;
    Gate& first = rig.gate();
    Gate& gate = rig.gate();
    Gate& late = rig.gate();
    std::atomic<bool> late_ran = false;
    set(rig.at(0), uses, 0);
    for (int use = 0; use < uses; ++use) {
        rig.use(0, use, [&, use] {
            if (use == 0) {
                first.pass();
            } else if (use == wanted) {
                gate.pass();
            } else if (use == uses - 1) {
                late.pass();
                late_ran = true;
            }
            *rig.at(use) = std::byte{1};
        });
    }
    CHECK(calls("cuEventCreate") <= 600);
    rig.submit({{.id = 1,
                 .direction = Direction::write,
                 .port = &rig.port,
                 .pieces = {rig.piece(0, 0, wanted + 1)},
                 .last_use = wanted}});
    first.open();
    opened_after_copy(gate, "cuMemcpyDtoHAsync_v2", 1);
    CHECK(!rig.collect(1).at(1).error);
    CHECK(holds(rig.port.at(0), wanted + 1, 1));
    CHECK(!late_ran);
    late.open();
    rig.finish(rig.streams[0]);
    rig.submit(
        {{.id = 2, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 0, uses)}, .last_use = uses}});
    rig.collect(2);
    CHECK(holds(rig.port.at(0), uses, 1));
    // All work has ended. The launcher gives its events back, and knows when each access computed.
    std::size_t ran = 0;
    until("all accesses are reported", [&] {
        rig.queue->reprioritize(2, 0);
        ran += rig.queue->take_ran().size();
        return ran > 0 && calls("cuEventElapsedTime") > 0 && ran >= 256;
    });
    rig.close();
}

TEST("a stream that is seen for the first time after a move waits for it") {
    Rig rig(in_real_time(3));
    Gate& gate = rig.gate();
    std::atomic<bool> right = false;
    set(rig.at(0), 64, 5);
    rig.use(0, 0, [&] { gate.pass(), set(rig.at(0), 64, 6); });
    rig.queue->move(rig.arena + 1024, rig.arena, 64, 0);
    rig.use(2, 1, [&] { right = holds(rig.at(1024), 64, 6); });
    linger();
    gate.open();
    rig.finish(rig.streams[2]);
    CHECK(right);
    const auto waits = calls("cuStreamWaitEvent");
    rig.use(2, 2, [] {});  // has waited for the move
    CHECK_EQUAL(calls("cuStreamWaitEvent"), waits);
    rig.use(1, 3, [] {});
    CHECK(calls("cuStreamWaitEvent") > waits);
    const auto streams = rig.queue->streams();
    CHECK_EQUAL(streams.size(), 4U);  // also the stream of moves
    CHECK(std::ranges::find(streams, rig.handle(1)) != streams.end());
    rig.close();
}

TEST("a copy into memory waits for work that was queued where the arena was allocated") {
    Gate gate;
    std::function<void()> body;
    Setup setup = in_real_time(1);
    setup.before = [&](std::uintptr_t arena, Stream allocating) {
        body = [&gate, arena] { gate.pass(), std::memset(reinterpret_cast<void*>(arena), 7, 512); };
        fake_cuda().launch(allocating, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, &body, 0);
    };
    Rig rig(setup);
    set(rig.port.at(0), 512, 3);
    rig.submit({{.id = 1, .port = &rig.port, .pieces = {rig.piece(0, 0, 512)}}});
    opened_after_copy(gate, "cuMemcpyHtoDAsync_v2", 1);
    CHECK(!rig.collect(1).at(1).error);
    rig.finish(rig.streams[0]);
    CHECK(holds(rig.at(0), 512, 3));
    rig.close();
}

TEST("an access waits for work that was queued where the arena was allocated") {
    Gate gate;
    std::function<void()> body;
    Setup setup = in_real_time(2);
    setup.before = [&](std::uintptr_t arena, Stream allocating) {
        body = [&gate, arena] { gate.pass(), std::memset(reinterpret_cast<void*>(arena), 7, 512); };
        fake_cuda().launch(allocating, [](void* data) { (*static_cast<std::function<void()>*>(data))(); }, &body, 0);
    };
    Rig rig(setup);
    rig.use(1, 0, [&] { set(rig.at(0), 512, 3); });
    linger();
    gate.open();
    rig.finish(rig.streams[0]);
    rig.finish(rig.streams[1]);
    CHECK(holds(rig.at(0), 512, 3));
    rig.close();
}

TEST("uses on streams of a device are in order, whichever device the program's thread uses at present") {
    Rig rig(in_real_time(2));
    const auto other = farpool::device::open_cuda(1, FAKE_CUDA_PATH);
    Gate& gate = rig.gate();
    const auto use = [&](std::size_t stream, std::int64_t ordinal, const std::function<void()>& body) {
        {
            const farpool::device::Cuda::Entered entered(*other);
            rig.queue->begin_use(rig.handle(stream));
            rig.queue->order_use(rig.handle(stream), ordinal - 1);
        }
        rig.launch(stream, body);
        const farpool::device::Cuda::Entered entered(*other);
        rig.queue->end_use(rig.handle(stream), ordinal);
    };
    use(0, 0, [&] { gate.pass(), set(rig.at(0), 512, 5); });
    use(1, 1, [&] { set(rig.at(0), 512, 6); });
    {
        const farpool::device::Cuda::Entered entered(*other);
        rig.queue->move(rig.arena + 1024, rig.arena, 512, 1);
    }
    linger();
    gate.open();
    rig.submit({{.id = 1, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 1024, 512)}}});
    CHECK(!rig.collect(1).at(1).error);
    CHECK(holds(rig.port.at(0), 512, 6));
    rig.close();
}

TEST("the default stream of each thread is refused: it is one number for several streams") {
    Rig rig(in_real_time(1));
    CHECK_THROWS(PortFailure, (rig.queue->begin_use(2), 0));
    rig.close();
}

TEST("an access waits for accesses on other streams whose bytes it overwrites, although no bytes move") {
    Rig rig(in_real_time(2));
    Gate& gate = rig.gate();
    rig.use(1, -1, [] {});  // now both streams are known
    rig.use(0, 0, [&] { gate.pass(), set(rig.at(0), 64, 1); });
    const auto waits = calls("cuStreamWaitEvent");
    rig.use(0, 1, [] {}, 0);  // its own stream is in order anyway
    CHECK_EQUAL(calls("cuStreamWaitEvent"), waits);
    rig.use(1, 2, [&] { set(rig.at(0), 64, 2); }, 0);
    CHECK_EQUAL(calls("cuStreamWaitEvent"), waits + 1);
    linger();
    gate.open();
    rig.finish(rig.streams[0]);
    rig.finish(rig.streams[1]);
    CHECK(holds(rig.at(0), 64, 2));
    rig.close();
}

TEST("moves and fills come after the program's earlier work and before its later work and later copies") {
    Rig rig(in_real_time(1));
    Gate& gate = rig.gate();
    std::atomic<bool> right = false;
    set(rig.at(0), 1024, 1);
    rig.use(0, 0, [&] { gate.pass(), set(rig.at(0), 1024, 2), set(rig.at(2048), 1024, 2); });
    rig.queue->fill(rig.arena + 512, 512, 0x0404);
    rig.queue->move(rig.arena + 2048, rig.arena, 1024, 0);
    rig.use(0, 1, [&] { right = holds(rig.at(2048), 512, 2) && holds(rig.at(2048 + 512), 512, 4); });
    rig.submit({{.id = 1, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 2048, 1024)}}});
    opened_after_copy(gate, "cuMemcpyDtoHAsync_v2", 1);
    rig.collect(1);
    rig.finish(rig.streams[0]);
    CHECK(right);
    CHECK(holds(rig.port.at(0), 512, 2) && holds(rig.port.at(512), 512, 4));
    rig.close();
}

TEST("a move between ranges that overlap moves the bytes, with a bounded number of copies") {
    constexpr std::size_t nbytes = 4096;
    constexpr std::size_t bounce = 256;
    for (const std::size_t distance : {64, 192, 255, 256, 320, 1000, 4095, 4096, 6000}) {
        for (const bool down : {true, false}) {
            for (const Policy policy : {copies_first, any_order}) {
                Rig rig({.seed = distance, .policy = policy, .capacity = 16 << 10, .bounce = bounce});
                std::vector<std::byte> expected(rig.capacity);
                for (std::size_t index = 0; index < expected.size(); ++index) {
                    expected[index] = static_cast<std::byte>(index * 37 / 11);
                }
                std::memcpy(rig.at(0), expected.data(), expected.size());
                const std::size_t source = down ? distance : 64;
                const std::size_t target = down ? 0 : 64 + distance;
                std::memmove(expected.data() + target, expected.data() + source, nbytes);
                rig.queue->move(rig.arena + target, rig.arena + source, nbytes, -1);
                const std::size_t bound = distance < bounce ? 2 * (nbytes / bounce) : (nbytes + distance - 1) / distance;
                CHECK(calls("cuMemcpyDtoDAsync_v2") <= bound);
                while (fake_cuda().advance(1 << 20) > 0) {
                }
                CHECK(std::memcmp(rig.at(0), expected.data(), expected.size()) == 0);
                rig.close();
            }
        }
    }
}

TEST("a stream that is being captured is refused, and no move, fill or copy gets into a graph") {
    Rig rig({.policy = any_order, .streams = 2});
    rig.use(0, 0, [&] { set(rig.at(0), 512, 1); });
    CHECK_EQUAL(fake_cuda().capture(rig.streams[0], 1), 0);
    const auto waits = calls("cuStreamWaitEvent");
    const auto records = calls("cuEventRecord");
    try {
        rig.queue->begin_use(rig.handle(0));
        fail("begin_use refuses no capture", __FILE__, __LINE__);
    } catch (const PortFailure& failure) {
        CHECK(failure.error().kind == ErrorKind::unsupported);
    }
    CHECK_EQUAL(calls("cuStreamWaitEvent"), waits);
    CHECK_EQUAL(calls("cuEventRecord"), records);
    rig.queue->begin_use(rig.handle(1));  // others go on
    rig.queue->fill(rig.arena + 512, 512, 0x0303);
    rig.queue->move(rig.arena + 1024, rig.arena, 1024, 0);
    rig.submit(
        {{.id = 1, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 1024, 1024)}, .last_use = 0}});
    rig.collect(1);
    CHECK(holds(rig.port.at(0), 512, 1) && holds(rig.port.at(512), 512, 3));
    CHECK_EQUAL(fake_cuda().capture(rig.streams[0], 0), 0);  // not broken
    std::atomic<bool> right = false;
    rig.use(0, 1, [&] { right = holds(rig.at(1024), 512, 1); });
    rig.finish(rig.streams[0]);
    CHECK(right);
    rig.close();
}

TEST("a queue can be made while the stream on which the arena was allocated is captured") {
    Setup setup;
    setup.before = [](std::uintptr_t, Stream allocating) { CHECK_EQUAL(fake_cuda().capture(allocating, 1), 0); };
    Rig rig(setup);
    CHECK_EQUAL(fake_cuda().capture(rig.streams[0], 0), 0);
    rig.close();
}

// Time that a test passes, on the host and on the device.
double host_now = 0;

void pass(double seconds) {
    host_now += seconds;
    fake_cuda().set(fake_host_time, host_now);
}

// A device with a clock of its own. The test passes the time; the device's clock gains so many seconds in each of them.
struct Clocked {
    explicit Clocked(double gain = 0, Policy policy = copies_first)
        : cuda(reset(gain, policy)), events(cuda), stream(cuda), clock(cuda, events, stream.get(), [] { return host_now; }) {}

    static std::shared_ptr<farpool::device::Cuda> reset(double gain, Policy policy) {
        fake_cuda().reset(1, policy);
        fake_cuda().set(fake_fast_clock, gain);
        host_now = 0;
        pass(1000);
        auto cuda = farpool::device::open_cuda(0, FAKE_CUDA_PATH);
        cuda->enter();
        return cuda;
    }
    // An event that has passed on a stream.
    farpool::device::Event passed(Stream on) {
        const farpool::device::Event event = events.take();
        cuda->record(event, on);
        cuda->synchronize(event);
        return event;
    }

    std::shared_ptr<farpool::device::Cuda> cuda;
    farpool::device::EventPool events;
    farpool::device::OwnedStream stream;
    farpool::device::DeviceClock clock;
};

TEST("the first anchor of a clock has passed, also if nothing else makes the device go on") {
    Clocked device(0, latest_possible);
    const farpool::device::OwnedStream other(device.cuda);
    CHECK(device.clock.take_time(device.passed(other.get())) <= host_now);
}

TEST("a clock that gains or loses is never wrong by more than it gains in two seconds and the smallest delay") {
    constexpr double hours = 2;
    for (const double gain : {1e-4, -1e-4, 0.0}) {
        Clocked device(gain);
        std::mt19937_64 random(3);
        double worst = 0;
        while (host_now < 1000 + hours * 3600) {
            // Now and then nothing happens for up to ten minutes.
            pass(random() % 1000 == 0 ? static_cast<double>(random() % 600) : static_cast<double>(random() % 1000) * 1e-3);
            const double truth = host_now;
            const farpool::device::Event event = device.passed(device.stream.get());
            const double delay = 20e-6 + static_cast<double>(random() % 100) * 1e-6;  // until a thread has seen it
            pass(delay);
            const double time = device.clock.take_time(event);
            CHECK(time <= host_now);
            worst = std::max(worst, std::abs(time - truth));
        }
        CHECK(worst < 350e-6);  // twice 100 us of drift, a delay of up to 120 us, and the digits of a float
        CHECK(gain == 0 || worst > 20e-6);
    }
}

TEST("events that are seen long after they have passed keep their times") {
    Clocked device;
    for (int batch = 0; batch < 20; ++batch) {
        std::vector<std::pair<double, farpool::device::Event>> recorded;
        for (int index = 0; index < 3; ++index) {
            pass(10);
            recorded.emplace_back(host_now, device.passed(device.stream.get()));
        }
        pass(10);
        for (const auto& [truth, event] : recorded) {
            const double time = device.clock.take_time(event);
            CHECK(std::abs(time - truth) <
                  1e-4 * (40 * batch + 50));  // what the clocks may have drifted since the first anchor
        }
    }
}

// A device that does something else when it is asked for the first time whether an event has passed.
struct InterruptedCuda : farpool::device::Cuda {
    using Cuda::Cuda;
    bool passed(farpool::device::Event event) override {
        const bool answer = Cuda::passed(event);
        if (const auto call = std::exchange(meanwhile, nullptr)) {
            call();
        }
        return answer;
    }
    std::function<void()> meanwhile;
};

TEST("a copy waits for work whose event was given back while the device was asked about the events before it") {
    fake_cuda().reset(1, copies_first);
    fake_cuda().set(fake_real_time_rate, fast);
    const auto cuda = std::make_shared<InterruptedCuda>(0, FAKE_CUDA_PATH);
    cuda->enter();
    farpool::device::EventPool events(cuda);
    const farpool::device::OwnedStream program(cuda), copies(cuda);
    const auto handle = reinterpret_cast<farpool::ProgramStream>(program.get());
    farpool::device::DeviceClock clock(cuda, events, copies.get());
    farpool::device::ProgramOrder order(cuda, events, clock, handle);

    Gate gate;
    constexpr std::int64_t passed = 10;  // accesses; the others wait at the gate
    std::int64_t ordinal = 0;
    const auto access = [&] {
        order.begin(handle);
        order.order(handle, -1);
        order.end(handle, ordinal++);
    };
    while (ordinal < passed) {
        access();
    }
    const farpool::device::Event last = events.take();
    cuda->record(last, program.get());
    cuda->synchronize(last);
    const auto wait_at_gate = [](void* at) { static_cast<const Gate*>(at)->pass(); };
    CHECK_EQUAL(fake_cuda().launch(program.get(), wait_at_gate, &gate, 0), 0);
    while (ordinal < 500) {
        access();
    }
    cuda->meanwhile = [&] {
        while (ordinal < 600) {  // more than have an event each
            access();
        }
    };
    order.retire();

    std::uint64_t moves = 0;
    const auto waits = calls("cuStreamWaitEvent");
    order.follow(copies.get(), 2 * passed - 1, moves);
    const auto waited = calls("cuStreamWaitEvent") - waits;
    const farpool::device::Event followed = events.take();
    cuda->record(followed, copies.get());
    linger();
    const bool early = cuda->passed(followed);
    gate.open();
    cuda->synchronize(followed);
    CHECK_EQUAL(waited, 1U);
    CHECK(!early);
    CHECK_EQUAL(fake_cuda().violations(), std::string{});
}

TEST("a stream that has the handle of a destroyed one waits for its work and for moves like any other") {
    for (const bool numbered : {true, false}) {
        Setup setup = in_real_time(2);
        setup.version = numbered ? 12000 : 11080;
        Rig rig(setup);
        Gate& gate = rig.gate();
        std::atomic<bool> right = false;
        std::atomic<bool> moved = false;
        set(rig.at(0), 512, 1);
        rig.use(0, 0, [] {});
        rig.use(1, 1, [&] { gate.pass(), set(rig.at(0), 512, 2); });
        rig.queue->move(rig.arena + 1024, rig.arena, 64, 1);
        rig.use(1, 2, [] {});  // has waited for the move
        rig.cuda->end_stream(rig.streams[1]);
        fake_cuda().set(fake_next_stream, static_cast<double>(rig.handle(1)));
        CHECK(rig.cuda->make_stream() == rig.streams[1]);
        const auto waits = calls("cuStreamWaitEvent");
        rig.use(1, 3, [&] { right = holds(rig.at(0), 512, 2), moved = holds(rig.at(1024), 64, 2); }, 1);
        // For the move and the destroyed stream's work; at most one for the other stream's.
        CHECK_EQUAL(calls("cuStreamWaitEvent") - waits >= 2, numbered);
        CHECK_EQUAL(calls("cuStreamGetId") > 0, numbered);
        if (!numbered) {
            rig.finish(rig.streams[1]);  // it waits for nothing
        }
        linger();
        gate.open();
        rig.finish(rig.streams[1]);
        CHECK_EQUAL(right && moved, numbered);
        CHECK_EQUAL(rig.queue->streams().size(), 3U);  // one of them for moves
        // A copy waits for the work of both: the destroyed stream's events are known until they have passed.
        rig.submit(
            {{.id = 1, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 0, 512)}, .last_use = 3}});
        CHECK(!rig.collect(1).at(1).error);
        CHECK(holds(rig.port.at(0), 512, 2));
        rig.close();
    }
}

TEST("a queue is not closed before the work of a destroyed stream has ended") {
    Rig rig(in_real_time(2));
    Gate& gate = rig.gate();
    std::atomic<bool> ran = false;
    rig.use(1, 0, [] {});
    rig.use(1, 1, [&] { gate.pass(), ran = true; });
    rig.cuda->end_stream(rig.streams[1]);
    fake_cuda().set(fake_next_stream, static_cast<double>(rig.handle(1)));
    CHECK(rig.cuda->make_stream() == rig.streams[1]);
    rig.use(1, 2, [] {});
    rig.finish(rig.streams[1]);
    CHECK(!rig.queue->close(0.01));  // the caller would give away the arena
    CHECK(!ran);
    CHECK_EQUAL(calls("cuMemFree_v2") + calls("cuMemHostUnregister"), 0U);
    gate.open();
    rig.close();
    CHECK(ran);
}

TEST("accesses have the times of the device, in the order of their ends") {
    Rig rig(in_real_time(2));
    const double begun = farpool::monotonic_seconds();
    for (const int ordinal : {0, 1, 2}) {
        rig.queue->begin_use(rig.handle(0));
        rig.queue->order_use(rig.handle(0), -1);
        rig.launch(0, [] {}, 0.2);
        rig.queue->end_use(rig.handle(0), ordinal);
    }
    rig.use(1, 3, [] {});
    std::vector<farpool::Ran> ran = all_ran(rig, 4);
    std::ranges::sort(ran, {}, &farpool::Ran::end);
    CHECK_EQUAL(std::erase_if(ran, [](const farpool::Ran& one) { return one.ordinal == 3; }), 1U);
    for (const int ordinal : {0, 1, 2}) {
        const auto& one = ran[static_cast<std::size_t>(ordinal)];
        CHECK_EQUAL(one.ordinal, ordinal);
        CHECK(one.start >= begun - 1e-3 && one.end - begun >= 0.2 * (ordinal + 1) - 1e-3);
        CHECK(one.end - one.start >= 0.15);  // a busy host may set the clock some milliseconds late
    }
    CHECK(ran[1].start >= ran[0].end && ran[2].start >= ran[1].end);
    rig.close();
}

TEST("short accesses share the time between two events, and long ones have their own") {
    constexpr int brief = 48, all = 64;
    constexpr double brief_seconds = 1e-6, long_seconds = 1e-3, blocked_seconds = 0.3;
    Rig rig(in_real_time(1));
    std::atomic<bool> done = false;
    const double begun = farpool::monotonic_seconds();
    rig.launch(0, [] {}, blocked_seconds);
    for (int ordinal = 0; ordinal < all; ++ordinal) {
        rig.queue->begin_use(rig.handle(0));
        rig.queue->order_use(rig.handle(0), -1);
        rig.launch(0, [&, ordinal] { done = ordinal == all - 1; }, ordinal < brief ? brief_seconds : long_seconds);
        rig.queue->end_use(rig.handle(0), ordinal);
    }
    const std::uint64_t asked = calls("cuEventElapsedTime");
    // Otherwise the device waits for the host between them, so that they take longer.
    const bool queued_at_once = farpool::monotonic_seconds() - begun < blocked_seconds;
    until("the work is done", [&] { return done.load(); });
    std::vector<farpool::Ran> ran = all_ran(rig, all);
    CHECK(!queued_at_once || calls("cuEventElapsedTime") - asked <= all / 2);
    double seconds = 0;
    for (int ordinal = 1; ordinal < all - 1; ++ordinal) {
        const auto& one = ran[static_cast<std::size_t>(ordinal)];
        CHECK_EQUAL(one.ordinal, ordinal);
        CHECK(one.start >= ran[static_cast<std::size_t>(ordinal) - 1].end);
        seconds += ordinal < brief ? brief_seconds : long_seconds;
        CHECK(!queued_at_once || std::abs(one.end - ran[0].end - seconds) < long_seconds / 2);
    }
    rig.close();
}

int main() { return run(); }
