// How transfers flow through a device's queue: in parts that overlap, through little staging memory, and in order of urgency.
#include <random>

#include "tests/device_world.hpp"

using namespace farpool::testing;
using farpool::Direction;
using farpool::Piece;

namespace {

constexpr std::size_t chunk = 1 << 10;
const char* const copy_in = "cuMemcpyHtoDAsync_v2";

// A rig whose link is as fast as `rate`, with page-locked memory. The queue has measured the rate: while all copies waited at a
// gate, so that none was queued late.
struct Measured : Rig {
    Measured(double rate, std::size_t nbytes)
        : Rig({.real_time_rate = rate, .capacity = 64 << 10, .page_locked = 64 << 10, .chunk = nbytes}) {
        std::vector<farpool::device::HostPart> parts;
        until("the memory is page-locked", [&] { return locks->parts(&mapped, 0, locked.nbytes(), parts); });
        Gate& first = Rig::gate();
        use(0, 0, [&first] { first.pass(); });
        for (const Direction direction : {Direction::read, Direction::write}) {
            const std::size_t at = direction == Direction::read ? 0 : 16 << 10;
            submit({{.id = 100 + static_cast<int>(direction),
                     .direction = direction,
                     .port = &mapped,
                     .pieces = {piece((32 << 10) + at, at, 24 * nbytes)},
                     .last_use = 0}});
        }
        until("all copies are queued", [] { return calls(copy_in) == 24 && calls("cuMemcpyDtoHAsync_v2") == 24; });
        first.open();
        collect(2);
        use(0, 0, [this] { gate.pass(); });
    }
    Gate& gate = Rig::gate();
    std::uint64_t before = 24;
};

}  // namespace

TEST("a fetch that waits for a less urgent write-back leaves it the last of the staging memory") {
    for (const std::size_t chunks : {1, 2}) {
        Rig rig({.seed = chunks, .policy = any_order, .staging = chunks * chunk, .chunk = chunk});
        std::memset(rig.at(0), 1, 4 * chunk);
        std::memset(rig.port.at(4 * chunk), 2, 4 * chunk);
        rig.submit({{.id = 1, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 0, 4 * chunk)}},
                    {.id = 2, .port = &rig.port, .pieces = {rig.piece(4 * chunk, 0, 4 * chunk)}, .after = {1}, .priority = 9}});
        CHECK(!rig.collect(2).at(1).error && !rig.results.at(2).error);
        CHECK(rig.place(1) < rig.place(2));
        CHECK(holds(rig.port.at(0), 4 * chunk, 1) && holds(rig.at(0), 4 * chunk, 2));
        rig.close();
    }
}

TEST("chains of transfers with any priorities end through one chunk of staging memory") {
    for (std::uint64_t seed = 0; seed < 20; ++seed) {
        std::mt19937_64 random(seed);
        Rig rig({.seed = seed, .policy = static_cast<Policy>(seed % 4), .staging = chunk, .chunk = chunk});
        std::vector<Order> orders;
        for (std::int64_t id = 0; id < 60; ++id) {
            const std::size_t at = random() % 8 * chunk;
            Order order{.id = id, .direction = static_cast<Direction>(random() % 2), .port = &rig.port};
            order.pieces = {rig.piece(at, at, (1 + random() % 4) * chunk)};
            order.priority = static_cast<std::int64_t>(random() % 10);
            for (std::uint64_t other = 0; id > 0 && other < random() % 3; ++other) {
                order.after.push_back(static_cast<std::int64_t>(random()) & INT64_MAX);
                order.after.back() %= id;
            }
            if (random() % 8 == 0) {
                order.port = nullptr;
            }
            orders.push_back(order);
        }
        rig.submit(orders);
        rig.queue->reprioritize(static_cast<std::int64_t>(random() % 60), 20);
        rig.collect(60);
        for (const Order& order : orders) {
            CHECK(!rig.results.at(order.id).error && !rig.results.at(order.id).cancelled);
            for (const std::int64_t other : order.after) {
                CHECK(rig.place(other) < rig.place(order.id));
            }
        }
        CHECK_EQUAL(rig.queue->pending(), 0U);
        rig.close();
    }
}

TEST("a block starts to arrive before its tier has read it, and to be written before it has left") {
    Rig rig({.real_time_rate = 1e5, .capacity = 32 << 10, .staging = 32 * chunk, .chunk = chunk});
    rig.port.allowed = 1;
    rig.submit({{.id = 1, .port = &rig.port, .pieces = {rig.piece(0, 0, 16 * chunk)}}});
    until("the first chunk is copied", [&] { return calls(copy_in) == 1; });
    rig.port.allowed = UINT32_MAX;
    rig.collect(1);
    CHECK_EQUAL(rig.port.calls(), 16U);
    const auto ended = calls("cuEventElapsedTime");
    rig.submit({{.id = 2, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 0, 16 * chunk)}}});
    until("the first chunk is written", [&] { return rig.port.calls() > 16; });
    CHECK(calls("cuEventElapsedTime") - ended < 2 * 16);  // two for each copy that has ended
    rig.collect(2);
    rig.close();
}

TEST("two copies are queued on a link on which one takes longer than the time for which copies may wait") {
    Measured rig(1e5, 512);
    rig.submit({{.id = 1, .port = &rig.mapped, .pieces = {rig.piece(0, 0, 32 << 10)}, .priority = -1, .last_use = 0}});
    until("copies are queued", [&] { return calls(copy_in) >= rig.before + 2; });
    linger();
    CHECK_EQUAL(calls(copy_in) - rig.before, 2U);
    // More urgent transfers that come later, or become urgent later, are copied before those that are not queued yet.
    rig.submit({{.id = 2, .port = &rig.mapped, .pieces = {rig.piece(0, 40 << 10, 64)}, .priority = -1},
                {.id = 3, .port = &rig.mapped, .pieces = {rig.piece(0, 48 << 10, 64)}, .priority = 0},
                {.id = 4, .port = &rig.mapped, .pieces = {rig.piece(0, 56 << 10, 64)}, .priority = -1}});
    rig.queue->reprioritize(4, 1);
    rig.queue->reprioritize(999, 9);  // not pending
    rig.gate.open();
    rig.collect(6);
    CHECK(rig.place(4) < rig.place(3) && rig.place(3) < rig.place(1) && rig.place(1) < rig.place(2));
    rig.close();
}

TEST("a transfer that becomes urgent takes those with it for which it waits") {
    Measured rig(1e5, 512);
    rig.submit({{.id = 1,
                 .direction = Direction::write,
                 .port = &rig.mapped,
                 .pieces = {rig.piece(0, 0, 8 << 10)},
                 .priority = 1,
                 .last_use = 0}});
    until("copies are queued", [&] { return calls("cuMemcpyDtoHAsync_v2") >= 26; });
    rig.submit({{.id = 2,
                 .direction = Direction::write,
                 .port = &rig.mapped,
                 .pieces = {rig.piece(16 << 10, 16 << 10, 64)},
                 .priority = -3},
                {.id = 3, .direction = Direction::write, .port = &rig.mapped, .pieces = {rig.piece(0, 0, 64)}, .priority = -5},
                {.id = 4, .after = {3}, .priority = -5},
                {.id = 5, .port = &rig.mapped, .pieces = {rig.piece(0, 0, 64)}, .after = {4}, .priority = -5}});
    rig.queue->reprioritize(5, -1);
    rig.gate.open();
    rig.collect(7);
    CHECK(rig.place(1) < rig.place(3) && rig.place(3) < rig.place(2));
    rig.queue->reprioritize(5, 60);  // it has ended
    rig.close();
}

TEST("the pieces of a chunk are copied with one call, if the driver is new enough") {
    constexpr std::size_t count = 10;
    const char* const batch = "cuMemcpyBatchAsync";
    for (const int version : {12070, 12080}) {
        Rig rig({.seed = 1, .policy = any_order, .chunk = chunk, .version = version});
        Order read{.id = 1, .port = &rig.port};
        Order write{.id = 2, .direction = Direction::write, .port = &rig.port, .after = {1}};
        for (std::size_t index = 0; index < count; ++index) {
            std::memset(rig.port.at(index * 100), static_cast<int>(index + 1), 64);
            read.pieces.push_back(rig.piece(index * 100, index * 128, 64));
            write.pieces.push_back(rig.piece((4 << 10) + index * 100, index * 128, 64));
        }
        rig.submit({read, write});
        CHECK(!rig.collect(2).at(1).error && !rig.results.at(2).error);
        for (std::size_t index = 0; index < count; ++index) {
            CHECK(holds(rig.at(static_cast<std::int64_t>(index) * 128), 64, static_cast<int>(index + 1)));
            CHECK(holds(rig.port.at((4 << 10) + index * 100), 64, static_cast<int>(index + 1)));
        }
        const bool batched = version == 12080;
        CHECK_EQUAL(calls(batch), batched ? 2U : 0U);
        CHECK_EQUAL(calls(copy_in), batched ? 0 : count);
        rig.close();
    }
}

TEST("a device that supports no batches copies the pieces one by one from then on") {
    constexpr std::size_t count = 10;
    Rig rig({.seed = 1, .policy = any_order, .chunk = chunk, .version = 12080});
    fake_cuda().fail_call("cuMemcpyBatchAsync", 1, 801);
    for (std::int64_t id = 1; id <= 3; ++id) {
        Order read{.id = id, .port = &rig.port};
        for (std::size_t index = 0; index < count; ++index) {
            std::memset(rig.port.at(index * 100), static_cast<int>(10 * static_cast<std::size_t>(id) + index), 64);
            read.pieces.push_back(rig.piece(index * 100, index * 128, 64));
        }
        rig.submit({read});
        CHECK(!rig.collect(static_cast<std::size_t>(id)).at(id).error);
        for (const Piece& piece : read.pieces) {
            CHECK(std::memcmp(reinterpret_cast<const void*>(piece.address), rig.port.at(piece.offset), 64) == 0);
        }
    }
    CHECK_EQUAL(calls("cuMemcpyBatchAsync"), 1U);
    CHECK_EQUAL(calls(copy_in), 3 * count);
    fake_cuda().fail_call(copy_in, 1, 801);  // no other call may be unsupported
    rig.submit({{.id = 4, .port = &rig.port, .pieces = {rig.piece(0, 0, 64)}}});
    CHECK(rig.collect(4).at(4).error.has_value());
    rig.close();
}

TEST("an urgent copy does not wait behind others that wait for the program's work") {
    for (const Direction direction : {Direction::read, Direction::write}) {
        Rig rig({.real_time_rate = 1e12, .staging = 4 * chunk, .chunk = chunk});
        const char* const copy = direction == Direction::read ? copy_in : "cuMemcpyDtoHAsync_v2";
        std::memset(rig.at(0), 1, 4 * chunk);
        std::memset(rig.port.at(0), 2, 4 * chunk);
        std::atomic<bool> right = false;
        Gate& gate = rig.gate();
        rig.use(0, 0, [&] {
            gate.pass();
            right = holds(rig.at(0), 4 * chunk, 1);
            std::memset(rig.at(0), 3, 4 * chunk);
        });
        Order waiting{.id = 1, .direction = direction, .port = &rig.port, .pieces = {rig.piece(0, 0, 4 * chunk)}};
        waiting.last_use = 0;
        rig.submit({waiting});
        until("three copies wait for the work", [&] { return calls(copy) == 3; });  // one chunk of staging memory is kept
        const std::size_t at = 8 * chunk;
        rig.submit({{.id = 2,
                     .direction = direction,
                     .port = &rig.port,
                     .pieces = {rig.piece(at, at, 2 * chunk)},
                     .priority = farpool::urgent_priority}});
        CHECK(!rig.collect(1).at(2).error);
        // The rest of one that becomes urgent goes the same way, and waits for the same work.
        rig.queue->reprioritize(1, farpool::urgent_priority);
        until("all its copies are queued", [&] { return calls(copy) == 3 + 2 + 1; });
        linger();
        gate.open();
        CHECK(!rig.collect(2).at(1).error);
        rig.finish(rig.streams[0]);
        CHECK(right);
        CHECK(direction == Direction::read ? holds(rig.at(0), 4 * chunk, 2) : holds(rig.port.at(0), 4 * chunk, 3));
        rig.close();
    }
}

TEST("while an urgent copy waits for the program's work, others of its direction use the link, and none once it runs") {
    for (const Direction direction : {Direction::read, Direction::write}) {
        constexpr double rate = 2e4;  // bytes per second: a chunk takes 50 ms
        const char* const copy = direction == Direction::read ? copy_in : "cuMemcpyDtoHAsync_v2";
        Rig rig({.real_time_rate = rate, .capacity = 64 << 10, .page_locked = 64 << 10, .chunk = chunk});
        std::vector<farpool::device::HostPart> parts;
        until("the memory is page-locked", [&] { return rig.locks->parts(&rig.mapped, 0, rig.locked.nbytes(), parts); });
        const auto order = [&](std::int64_t id, Direction to, std::size_t at, std::size_t chunks, std::int64_t priority) {
            return Order{.id = id,
                         .direction = to,
                         .port = &rig.mapped,
                         .pieces = {rig.piece(at * chunk, at * chunk, chunks * chunk)},
                         .priority = priority};
        };
        Gate& gate = rig.gate();
        rig.use(0, 0, [&] { gate.pass(); });
        Order urgent = order(1, direction, 0, 12, farpool::urgent_priority);
        urgent.last_use = 0;
        rig.submit({urgent});
        until("it waits for the work", [&] { return calls(copy) >= 2; });
        const Direction other = direction == Direction::read ? Direction::write : Direction::read;
        rig.submit({order(2, direction, 16, 5, 1), order(3, direction, 24, 1, 0), order(5, other, 40, 1, 0)});
        CHECK(!rig.collect(3).at(2).error && !rig.results.at(3).error && !rig.results.at(5).error);
        // Now the urgent copies run, and the next one of their direction is queued behind them.
        const auto asked = calls("cuEventElapsedTime");
        gate.open();
        // Two for each copy, and at most one for the kernel.
        until("the first one has ended", [&] { return calls("cuEventElapsedTime") >= asked + 4; });
        rig.submit({order(4, direction, 32, 1, 1)});
        CHECK(!rig.collect(5).at(1).error);
        CHECK(rig.place(1) < rig.place(4));
        const double alone = static_cast<double>(12 * chunk) / rate;
        CHECK(rig.results.at(1).end - rig.results.at(1).start >= 0.8 * alone);
        CHECK(rig.results.at(4).start - rig.results.at(1).start >= 0.8 * alone);
        rig.close();
    }
}

TEST("transfers at a slow tier leave staging memory for an urgent one") {
    for (const std::size_t chunks : {2, 3, 5}) {
        SimulatedPort other(1 << 20);
        Rig rig({.policy = any_order, .staging = chunks * chunk, .chunk = chunk});
        rig.port.allowed = 0;
        rig.submit({{.id = 1, .port = &rig.port, .pieces = {rig.piece(0, 0, 8 * chunk)}, .priority = 1}});
        until("it is at the tier", [&] { return rig.port.calls() > 0; });
        rig.submit(
            {{.id = 2, .port = &other, .pieces = {rig.piece(0, 8 * chunk, 4 * chunk)}, .priority = farpool::urgent_priority}});
        CHECK(!rig.collect(1).at(2).error);
        rig.port.allowed = UINT32_MAX;
        CHECK(!rig.collect(2).at(1).error);
        rig.close();
    }
}

TEST("a transfer that waits at its tier becomes urgent there") {
    Rig rig({.policy = any_order, .staging = 8 * chunk, .chunk = chunk});
    rig.port.allowed = 0;
    std::vector<Order> orders;
    for (std::int64_t id = 0; id < 6; ++id) {
        const auto at = static_cast<std::size_t>(id) * chunk;
        orders.push_back({.id = id, .port = &rig.port, .pieces = {rig.piece(at, at, chunk)}});
    }
    rig.submit(orders);
    until("two are at the tier", [&] { return rig.port.calls() == 2; });
    until("the others wait there", others_sleep);
    rig.queue->reprioritize(5, 9);
    rig.port.allowed = 1;  // the other thread stays where it is
    until("a third one is at the tier", [&] { return rig.port.calls() == 3; });
    CHECK_EQUAL(rig.port.offsets().at(2), 5 * chunk);
    rig.port.allowed = UINT32_MAX;
    rig.collect(6);
    rig.close();
}

TEST("fetches come before write-backs that are as urgent, and transfers have times of the link") {
    Rig rig({.real_time_rate = 1e6, .staging = chunk, .chunk = chunk});
    rig.port.allowed = 0;
    rig.submit({{.id = 0, .port = &rig.port, .pieces = {rig.piece(0, 0, chunk)}}});
    until("it is at the tier", [&] { return rig.port.calls() == 1; });
    rig.submit({{.id = 1, .direction = Direction::write, .port = &rig.port, .pieces = {rig.piece(0, 0, chunk)}},
                {.id = 2, .port = &rig.port, .pieces = {rig.piece(chunk, chunk, chunk)}}});
    rig.port.allowed = UINT32_MAX;
    rig.collect(3);
    CHECK(rig.place(2) < rig.place(1));
    for (const auto& [id, result] : rig.results) {
        CHECK(result.end - result.start >= 0.9e-3 && result.end <= farpool::monotonic_seconds());
    }
    rig.close();
}

int main() { return run(); }
