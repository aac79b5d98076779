// A port that is replaced while transfers use it: no byte is lost, none is read from the old port afterwards.
#include "core/replaceable_port.hpp"

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "core/striped_port.hpp"
#include "tests/testing.hpp"

using farpool::Direction;
using farpool::Piece;
using farpool::Port;
using farpool::PortFailure;
using farpool::ReplaceablePort;
using farpool::Transfer;

namespace {

constexpr std::size_t chunk = 64;
constexpr std::size_t size = 10 * chunk + 7;
constexpr std::chrono::seconds patience{10};

// Bytes of this process. With `begins`, transfers of several pieces can be begun, and a piece is moved when it is finished.
class Bytes : public Port {
public:
    explicit Bytes(std::size_t nbytes, bool begins = false) : bytes(nbytes), begins_(begins) {}

    void read(std::uint64_t offset, void* into, std::size_t nbytes) override {
        ++reads;
        check();
        std::memcpy(into, bytes.data() + offset, nbytes);
    }
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override {
        ++writes;
        check();
        std::memcpy(bytes.data() + offset, from, nbytes);
        if (spoils) {
            bytes[offset] ^= std::byte{1};
        }
    }
    bool copies() const noexcept override { return !begins_; }
    std::unique_ptr<Transfer> begin(Direction direction) override {
        return begins_ ? std::make_unique<Late>(*this, direction) : nullptr;
    }

    std::vector<std::byte> bytes;
    std::atomic<int> reads = 0;
    std::atomic<int> writes = 0;
    std::atomic<bool> fails = false;
    bool spoils = false;  // stores other bytes than it is given

private:
    class Late final : public Transfer {
    public:
        Late(Bytes& bytes, Direction direction) : bytes_(bytes), direction_(direction) {}
        void start(const Piece&) override {}
        void finish(const Piece& piece) override { bytes_.move(direction_, piece); }
        bool may_retry() const noexcept override { return false; }
        void abandon() override {}

    private:
        Bytes& bytes_;
        const Direction direction_;
    };

    void check() const {
        if (fails) {
            farpool::fail_tier("bytes", "failed");
        }
    }

    const bool begins_;
};

std::vector<std::byte> random_bytes(std::mt19937& draw, std::size_t nbytes) {
    std::vector<std::byte> bytes(nbytes);
    for (std::byte& byte : bytes) {
        byte = static_cast<std::byte>(draw());
    }
    return bytes;
}

void move_to(ReplaceablePort& port, Port& target) {
    port.set_target(target, false);
    while (port.copy_chunks()) {
    }
    port.replace();
}

}  // namespace

TEST("all bytes are at each new port, and only that one is used afterwards") {
    std::mt19937 draw(1);
    Bytes old(size), next(size);
    ReplaceablePort port("tier", old, size, chunk);
    const auto data = random_bytes(draw, size);
    port.write(0, data.data(), size);
    move_to(port, next);
    CHECK(next.bytes == data);
    const int used = old.reads + old.writes;
    std::vector<std::byte> found(size);
    port.read(0, found.data(), size);
    CHECK(found == data);
    port.write(5, data.data(), 3);
    CHECK_EQUAL(old.reads + old.writes, used);
    Bytes given_up(size), last(size);
    port.set_target(given_up, false);
    CHECK(port.copy_chunks());
    port.drop_target();
    move_to(port, last);
    CHECK(last.bytes == next.bytes);
}

TEST("only chunks that were written are copied, the last and shorter one too") {
    Bytes old(size), next(size);
    ReplaceablePort port("tier", old, size, chunk);
    const std::byte byte{7};
    port.write(size - 1, &byte, 1);
    port.write(2 * chunk - 1, std::array{byte, byte}.data(), 2);
    port.set_target(next, false);
    int copied = 0;
    for (; port.copy_chunks(); ++copied) {
    }
    CHECK_EQUAL(copied, 3);
    port.replace();
    CHECK(next.bytes == old.bytes);
}

TEST("a chunk that is written after it was copied is copied again, also if the write failed or a transfer made it") {
    Bytes old(size, true), next(size, true);
    ReplaceablePort port("tier", old, size, chunk);
    std::array<std::byte, size> data{};
    port.write(0, data.data(), size);
    port.set_target(next, false);
    while (port.copy_chunks()) {
    }
    data[3] = std::byte{9};
    port.write(3, &data[3], 1);
    CHECK(port.copy_chunks());
    CHECK(!port.copy_chunks());
    data[300] = std::byte{8};
    {
        const auto transfer = port.begin(Direction::write);
        CHECK(transfer != nullptr);
        const Piece piece{300, reinterpret_cast<std::uintptr_t>(&data[300]), 1};
        transfer->start(piece);
        transfer->finish(piece);
    }
    old.fails = true;
    CHECK_THROWS(PortFailure, port.write(600, &data[600], 1));
    old.fails = false;
    old.bytes[600] = std::byte{5};  // what a failed write may have left there
    port.replace();
    CHECK(next.bytes == old.bytes);
}

TEST("copying comes to an end however much is written") {
    std::mt19937 draw(4);
    Bytes old(size), next(size);
    ReplaceablePort port("tier", old, size, chunk);
    auto data = random_bytes(draw, size);
    port.write(0, data.data(), size);
    port.set_target(next, false);
    std::size_t calls = 0;
    for (; calls < 100 && port.copy_chunks(); ++calls) {
        if (calls < 50) {
            data[0] ^= std::byte{1};
            port.write(0, data.data(), 3 * chunk);
        }
    }
    CHECK(calls <= 51);
    port.replace();
    CHECK(next.bytes == data);
}

TEST("a port that reaches the same memory takes over without a copy, even if the old one fails") {
    Bytes old(size), next(size);
    ReplaceablePort port("tier", old, size, chunk);
    const std::byte byte{7};
    port.write(0, &byte, 1);
    old.fails = true;
    port.set_target(next, true);
    CHECK_THROWS(PortFailure, port.write(0, &byte, 1));
    port.replace();
    CHECK_EQUAL(next.writes + next.reads, 0);
    port.write(0, &byte, 1);
    CHECK_EQUAL(next.writes.load(), 1);
}

TEST("a replacement that fails leaves the old port in use, and may be tried again") {
    std::mt19937 draw(2);
    Bytes old(size), bad(size), wrong(size), next(size);
    bad.fails = true;
    wrong.spoils = true;
    ReplaceablePort port("tier", old, size, chunk);
    CHECK_THROWS(PortFailure, port.copy_chunks());
    CHECK_THROWS(PortFailure, port.replace());
    const auto data = random_bytes(draw, size);
    port.write(0, data.data(), size);
    for (Bytes* target : {&bad, &wrong}) {
        port.set_target(*target, false);
        CHECK_THROWS(PortFailure, port.copy_chunks());
        CHECK_THROWS(PortFailure, port.replace());
        port.drop_target();
        std::vector<std::byte> found(size);
        port.read(0, found.data(), size);
        CHECK(found == data);
        port.write(0, data.data(), size);
    }
    move_to(port, next);
    CHECK(next.bytes == data);
}

TEST("a transfer that has begun ends at the port where it began, and the replacement waits for it") {
    std::mt19937 draw(3);
    Bytes old(size, true), next(size, true);
    ReplaceablePort port("tier", old, size, chunk);
    auto data = random_bytes(draw, size);
    auto transfer = port.begin(Direction::write);
    const Piece piece{0, reinterpret_cast<std::uintptr_t>(data.data()), size};
    transfer->start(piece);
    port.set_target(next, false);
    auto replaced = std::async(std::launch::async, [&] { port.replace(); });
    CHECK(replaced.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout);
    transfer->finish(piece);
    const bool waits = replaced.wait_for(std::chrono::milliseconds(20)) == std::future_status::timeout;
    transfer.reset();
    CHECK(waits);
    replaced.get();
    CHECK(next.bytes == data);
}

TEST("reads go on while a chunk is copied, and writes wait for its end") {
    Bytes old(size);
    // A target whose first write waits until the test releases it.
    struct Slow : Bytes {
        using Bytes::Bytes;
        void write(std::uint64_t offset, const void* from, std::size_t nbytes) override {
            begun.set_value();
            go_on.get_future().wait_for(patience);
            Bytes::write(offset, from, nbytes);
        }
        std::promise<void> begun, go_on;
    } next(size);
    ReplaceablePort port("tier", old, size, chunk);
    std::byte byte{7};
    port.write(0, &byte, 1);
    port.set_target(next, false);
    auto copied = std::async(std::launch::async, [&] { return port.copy_chunks(); });
    CHECK(next.begun.get_future().wait_for(patience) == std::future_status::ready);
    auto read = std::async(std::launch::async, [&] { port.read(0, &byte, 1); });
    auto written = std::async(std::launch::async, [&] { port.write(1, &byte, 1); });
    const bool reads = read.wait_for(patience) == std::future_status::ready;
    const bool writes = written.wait_for(std::chrono::milliseconds(20)) == std::future_status::ready;
    next.go_on.set_value();
    CHECK(reads);
    CHECK(!writes);
    CHECK(copied.get());
    written.get();
    CHECK_EQUAL(old.writes.load(), 2);
}

TEST("a port that only moves one piece per call stays one") {
    struct Blocking : Bytes {
        using Bytes::Bytes;
        bool copies() const noexcept override { return false; }
    } old(size);
    ReplaceablePort port("tier", old, size, chunk);
    CHECK(port.begin(Direction::read) == nullptr);
    CHECK(!port.copies());
    Bytes next(size);
    move_to(port, next);  // hangs if the begun transfer were still inside
}

// Threads write and read extents of their own while the columns of a striped port are replaced again and again. Each old port
// is spoiled afterwards, so a transfer that used it too late would read wrong bytes or lose its own.
void race(bool begins) {
    constexpr std::size_t columns = 3, workers = 4, extents = 6, extent = 5 * chunk, turns = 60;
    constexpr std::size_t share = (workers * extents * extent / columns / chunk + 1) * chunk;
    std::vector<std::unique_ptr<Bytes>> inner;
    std::vector<std::unique_ptr<ReplaceablePort>> ports;
    std::vector<Port*> all;
    for (std::size_t column = 0; column < columns; ++column) {
        inner.push_back(std::make_unique<Bytes>(share, begins));
        ports.push_back(std::make_unique<ReplaceablePort>("tier", *inner.back(), share, chunk));
        all.push_back(ports.back().get());
    }
    farpool::StripedPort striped("tier", all, chunk, share, false);
    std::atomic<bool> over = false;
    std::atomic<int> wrong = 0;
    std::array<std::atomic<std::size_t>, workers> done{};
    std::vector<std::thread> threads;
    for (std::size_t worker = 0; worker < workers; ++worker) {
        threads.emplace_back([&, worker] {
            std::mt19937 draw(static_cast<unsigned>(worker));
            std::array<std::vector<std::byte>, extents> content;
            while (!over) {
                const std::size_t number = draw() % extents;
                const std::uint64_t offset = (worker * extents + number) * extent;
                if (content[number].empty() || draw() % 2 == 0) {
                    content[number] = random_bytes(draw, extent);
                    striped.write(offset, content[number].data(), extent);
                } else {
                    std::vector<std::byte> found(extent);
                    striped.read(offset, found.data(), extent);
                    wrong += found != content[number];
                }
                ++done[worker];
            }
        });
    }
    for (std::size_t turn = 0; turn < turns; ++turn) {
        const std::size_t column = turn % columns;
        auto next = std::make_unique<Bytes>(share, begins);
        ReplaceablePort& port = *ports[column];
        port.set_target(*next, false);
        while (port.copy_chunks()) {
        }
        port.replace();
        std::memset(inner[column]->bytes.data(), 0xee, share);
        inner[column].swap(next);
        const std::size_t before = done[turn % workers];
        while (done[turn % workers] < before + 2) {  // so that transfers use each of the ports
            std::this_thread::yield();
        }
    }
    over = true;
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK_EQUAL(wrong.load(), 0);
}

TEST("ports that copy are replaced while threads use all of them") { race(false); }

TEST("ports with transfers are replaced while threads use all of them") { race(true); }

int main() { return farpool::testing::run(); }
