// Unit tests of ports over several copies of the same bytes.
#include "core/copies_port.hpp"

#include <atomic>
#include <cstring>
#include <functional>
#include <utility>
#include <vector>

#include "core/replaceable_port.hpp"
#include "tests/testing.hpp"

using farpool::CopiesPort;
using farpool::ErrorKind;
using farpool::Port;
using farpool::PortFailure;
using farpool::ReplaceablePort;

namespace {

constexpr std::size_t chunk = 64;
constexpr std::size_t size = std::size_t{4} << 20;

class Bytes : public Port {
public:
    explicit Bytes(bool is_near = false) : bytes(size), is_near_(is_near) {}
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override {
        check();
        ++reads;
        std::memcpy(into, bytes.data() + offset, nbytes);
    }
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override {
        if (const auto interruption = std::exchange(while_writing, nullptr)) {
            interruption();
        }
        check();
        std::memcpy(bytes.data() + offset, from, nbytes);
    }
    unsigned concurrency() const noexcept override { return 3; }
    bool copies() const noexcept override { return is_near_; }

    std::vector<unsigned char> bytes;
    std::atomic<bool> fails = false;
    ErrorKind kind = ErrorKind::node;
    int reads = 0;
    std::function<void()> while_writing;

private:
    void check() const {
        if (fails) {
            farpool::fail_node(kind, "node", "it is away");
        }
    }

    const bool is_near_;
};

void put(Port& port, std::uint64_t offset, unsigned char value) { port.write(offset, &value, 1); }

unsigned char get(Port& port, std::uint64_t offset) {
    unsigned char value = 0;
    port.read(offset, &value, 1);
    return value;
}

using Faults = std::vector<std::string>;

Faults faults(const CopiesPort& port) {
    Faults found;
    for (const auto& fault : port.faults()) {
        found.push_back(fault ? fault->message : "");
    }
    return found;
}

}  // namespace

TEST("a write goes to all copies, and reads take turns among them") {
    Bytes one, two;
    CopiesPort port("tier", {&one, &two});
    for (std::uint64_t offset = 0; offset < size; offset += size / 4) {
        put(port, offset, 7);
        CHECK_EQUAL(get(port, offset), 7);
    }
    CHECK(one.bytes == two.bytes);
    CHECK_EQUAL(one.reads, 2);
    CHECK_EQUAL(two.reads, 2);
    CHECK_EQUAL(port.concurrency(), 3U);
    CHECK(!port.copies());
}

TEST("a copy in this host's memory is read first") {
    Bytes far, near(true);
    CopiesPort port("tier", {&far, &near});
    get(port, 0);
    get(port, size / 4);
    CHECK_EQUAL(near.reads, 2);
    CHECK(!port.copies());
    CHECK(CopiesPort("tier", {&near, &near}).copies());
}

TEST("a copy that misses a write is never read again") {
    Bytes one, two;
    CopiesPort port("tier", {&one, &two});
    put(port, 0, 1);
    one.fails = true;
    put(port, 0, 2);
    CHECK_EQUAL(faults(port).size(), 2U);
    CHECK(!faults(port)[0].empty());
    CHECK(faults(port)[1].empty());
    one.fails = false;
    put(port, size / 2, 3);
    CHECK_EQUAL(get(port, 0), 2);
    CHECK_EQUAL(get(port, size / 2), 3);
    CHECK_EQUAL(one.reads, 0);
    CHECK_EQUAL(static_cast<int>(one.bytes[size / 2]), 0);
    two.fails = true;  // the last one stays in use
    CHECK_THROWS(PortFailure, get(port, 0));
    CHECK_THROWS(PortFailure, put(port, 0, 4));
    two.fails = false;
    CHECK_EQUAL(get(port, 0), 2);
}

TEST("a read that one copy fails is served by another one") {
    Bytes one, two;
    CopiesPort port("tier", {&one, &two});
    put(port, 0, 1);
    one.fails = true;
    CHECK_EQUAL(get(port, 0), 1);
    CHECK(!faults(port)[0].empty());
}

TEST("copies that fail together stay in use") {
    Bytes one, two;
    CopiesPort port("tier", {&one, &two});
    put(port, 0, 1);
    one.fails = two.fails = true;
    CHECK_THROWS(PortFailure, put(port, 0, 2));
    CHECK_THROWS(PortFailure, get(port, 0));
    CHECK(faults(port) == Faults(2));
    one.fails = two.fails = false;
    CHECK_EQUAL(get(port, 0), 1);
}

TEST("a mistake of the caller takes no copy out of use") {
    Bytes one, two;
    CopiesPort port("tier", {&one, &two});
    one.fails = true;
    one.kind = ErrorKind::value;
    CHECK_THROWS(PortFailure, put(port, 0, 2));
    CHECK_THROWS(PortFailure, get(port, 0));
    CHECK(faults(port) == Faults(2));
}

TEST("of two writes that different copies fail, one write fails") {
    Bytes one, two;
    CopiesPort port("tier", {&one, &two});
    // The first write has reached the first copy and is at the second one. Then a second write fails at the first copy, which
    // is now out of use, and so the first write may not take the second copy out of use as well.
    two.while_writing = [&] {
        one.fails = true;
        put(port, 1, 9);
        two.fails = true;
    };
    CHECK_THROWS(PortFailure, put(port, 0, 8));
    CHECK(!faults(port)[0].empty());
    CHECK(faults(port)[1].empty());
    two.fails = false;
    CHECK_EQUAL(get(port, 1), 9);
}

TEST("a copy is taken out of use unless it is the last one") {
    Bytes one, two;
    CopiesPort port("tier", {&one, &two});
    CHECK(port.take_out(1, "it was started again"));
    CHECK(!port.take_out(0, "it was started again"));
    CHECK((faults(port) == Faults{"", "it was started again"}));
}

TEST("a lost copy is made again while transfers go on, at the same port or another one") {
    Bytes one, two, three;
    CopiesPort first("tier", {&one, &two});
    ReplaceablePort port("tier", first, size, chunk);
    put(port, 0, 1);
    one.fails = true;
    put(port, size / 2, 2);
    one.fails = false;

    CopiesPort second("tier", {&one, &two}, first, 0);
    port.set_target(one, false);
    while (port.copy_chunks()) {
    }
    put(port, 5, 6);
    CHECK_EQUAL(static_cast<int>(one.bytes[5]), 0);
    port.replace(&second);
    CHECK(one.bytes == two.bytes);
    CHECK(faults(second) == Faults(2));

    two.fails = true;
    CHECK_EQUAL(get(port, size / 4), 0);  // the second copy's turn
    CHECK(!faults(second)[1].empty());
    CopiesPort third("tier", {&one, &three}, second, 1);
    port.set_target(three, false);
    one.fails = true;  // the last copy of the bytes
    CHECK_THROWS(PortFailure, port.copy_chunks());
    one.fails = false;
    port.replace(&third);
    one.fails = true;
    CHECK_EQUAL(get(port, 5), 6);
    CHECK_EQUAL(get(port, size / 2), 2);
    CHECK(!faults(third)[0].empty());
    CHECK(faults(third)[1].empty());
}

TEST("a copy that goes out of use while another one is made again stays out") {
    Bytes one, two, three, four;
    CopiesPort first("tier", {&one, &two, &three});
    ReplaceablePort port("tier", first, size, chunk);
    put(port, 0, 1);
    one.fails = true;
    put(port, 0, 2);
    CopiesPort second("tier", {&four, &two, &three}, first, 0);
    port.set_target(four, false);
    two.fails = true;
    put(port, 0, 3);
    two.fails = false;
    port.replace(&second);
    CHECK_EQUAL(get(port, 0), 3);
    CHECK(faults(second)[0].empty());
    CHECK(!faults(second)[1].empty());
    for (std::uint64_t offset = 0; offset < size; offset += size / 4) {
        get(port, offset);
    }
    CHECK_EQUAL(two.reads, 0);
}

TEST("a port needs a copy, and as many as the one before") {
    Bytes one, two;
    CopiesPort port("tier", {&one, &two});
    CHECK_THROWS(PortFailure, CopiesPort("tier", {}));
    CHECK_THROWS(PortFailure, CopiesPort("tier", {&one}, port, 0));
    CHECK_THROWS(PortFailure, CopiesPort("tier", {&one, &two}, port, 2));
}

int main() { return farpool::testing::run(); }
