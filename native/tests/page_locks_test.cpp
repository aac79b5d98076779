// Page locks: the order of the chunks, the limits, refusals, and the end, at which each chunk is unlocked once.
#include "device/page_locks.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <fstream>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>

#include "core/error.hpp"
#include "core/memory.hpp"
#include "core/memory_port.hpp"
#include "tests/testing.hpp"

using farpool::Memory;
using farpool::MemoryPort;
using farpool::PortFailure;
using farpool::device::Device;
using farpool::device::Event;
using farpool::device::PageLocks;
using farpool::device::HostPart;
using farpool::device::SpaceLocks;
using farpool::device::Stream;

namespace {

constexpr std::size_t chunk = 1 << 16;
constexpr std::size_t size = 5 * chunk + chunk / 2;
constexpr std::size_t no_limit = std::size_t{1} << 40;
constexpr double patience = 60.0;

void within(const std::function<bool()>& true_at_last) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!true_at_last()) {
        CHECK(std::chrono::steady_clock::now() < deadline);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
}

// Notes locked ranges and their threads; refuses a call of `lock_pages`, and waits in one while it is held up.
class ScriptedDevice : public Device {
public:
    void enter() override {
        if (lost) {
            throw PortFailure({farpool::ErrorKind::tier, "the device is lost", "device", 0, {}});
        }
        const std::lock_guard lock(mutex_);
        entered_.insert(std::this_thread::get_id());
    }
    void lock_pages(void* memory, std::size_t nbytes) override {
        std::unique_lock lock(mutex_);
        note_thread();
        sigset_t blocked;
        pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
        signals_blocked = sigismember(&blocked, SIGINT) == 1;
        pthread_getname_np(pthread_self(), name, sizeof name);
        ++waiting_;
        freed_.wait(lock, [&] { return !held_; });
        --waiting_;
        if (++tries == refused) {
            throw PortFailure({farpool::ErrorKind::tier, "no more", "device", 12, {}});
        }
        locked_[reinterpret_cast<std::uintptr_t>(memory)] = nbytes;
        order_.push_back(reinterpret_cast<std::uintptr_t>(memory));
    }
    void unlock_pages(void* memory) noexcept override {
        const std::lock_guard lock(mutex_);
        note_thread();
        if (locked_.erase(reinterpret_cast<std::uintptr_t>(memory)) != 1) {
            unlocked_unknown = true;
        }
    }
    Stream make_stream() override { return nullptr; }
    void end_stream(Stream) noexcept override {}
    Event make_event() override { return nullptr; }
    void end_event(Event) noexcept override {}
    void record(Event, Stream) override {}
    void wait(Stream, Event) override {}
    bool passed(Event) override { return true; }
    void synchronize(Event) override {}
    double elapsed(Event, Event) override { return 0; }
    void copy_in(Stream, std::uintptr_t, const void*, std::size_t) override {}
    void copy_out(Stream, void*, std::uintptr_t, std::size_t) override {}
    void copy_within(Stream, std::uintptr_t, std::uintptr_t, std::size_t) override {}
    void fill(Stream, std::uintptr_t, std::uint16_t, std::size_t) override {}
    bool capturing(Stream) override { return false; }
    std::uintptr_t allocate(std::size_t) override { return 0; }
    void free(std::uintptr_t) noexcept override {}

    void hold(bool held) {
        const std::lock_guard lock(mutex_);
        held_ = held;
        freed_.notify_all();
    }
    bool is_locking() {
        const std::lock_guard lock(mutex_);
        return waiting_ > 0;
    }
    std::map<std::uintptr_t, std::size_t> locked() {
        const std::lock_guard lock(mutex_);
        return locked_;
    }
    std::size_t locked_bytes() {
        std::size_t sum = 0;
        for (const auto& [address, nbytes] : locked()) {
            sum += nbytes;
        }
        return sum;
    }
    std::vector<std::uintptr_t> order() {
        const std::lock_guard lock(mutex_);
        return order_;
    }

    std::atomic<bool> lost = false;
    std::atomic<bool> wrong_thread = false;
    std::atomic<bool> unlocked_unknown = false;
    std::atomic<bool> signals_blocked = false;
    std::atomic<int> tries = 0;
    std::atomic<int> refused = 0;  // number of the call that is refused, from 1; 0 refuses none
    char name[16] = {};

private:
    void note_thread() {
        if (!entered_.contains(std::this_thread::get_id())) {
            wrong_thread = true;
        }
    }

    std::mutex mutex_;
    std::condition_variable freed_;
    bool held_ = false;
    int waiting_ = 0;
    std::set<std::thread::id> entered_;
    std::map<std::uintptr_t, std::size_t> locked_;
    std::vector<std::uintptr_t> order_;
};

struct Tier {
    explicit Tier(std::size_t nbytes) : memory(nbytes), port(memory) {}
    std::uintptr_t start() const { return reinterpret_cast<std::uintptr_t>(memory.data()); }
    Memory memory;
    MemoryPort port;
};

struct World {
    explicit World(std::size_t most = no_limit) : locks(device, chunk, most) {
        locks.add(&tier.port, tier.start(), size, "dram");
    }
    ~World() { device->hold(false); }

    bool has(std::uint64_t offset, std::size_t nbytes) {
        std::vector<HostPart> parts;
        return locks.parts(&tier.port, offset, nbytes, parts);
    }
    void lock(std::size_t nbytes) {
        within([&] { return has(0, nbytes); });
    }
    SpaceLocks total() const { return locks.totals().at(0); }
    void close() {
        CHECK(locks.close(patience));
        CHECK(device->locked().empty());
        CHECK(!device->unlocked_unknown);
        CHECK(!device->wrong_thread);
        CHECK_EQUAL(total().locked, 0U);
    }

    std::shared_ptr<ScriptedDevice> device = std::make_shared<ScriptedDevice>();
    Tier tier{size};
    PageLocks locks;
};

std::string error_of(const std::function<void()>& call, farpool::ErrorKind kind = farpool::ErrorKind::value) {
    try {
        call();
    } catch (const PortFailure& failure) {
        CHECK(failure.error().kind == kind);
        return failure.what();
    }
    return "no error";
}

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

// True if the kernel keeps the range that begins at this address from forked children.
bool kept_from_children(std::uintptr_t address) {
    std::ifstream maps("/proc/self/smaps");
    bool inside = false;
    for (std::string line; std::getline(maps, line);) {
        char* end = nullptr;
        const std::uintptr_t first = std::strtoull(line.c_str(), &end, 16);
        if (end != nullptr && *end == '-' && end != line.c_str()) {
            inside = first <= address && address < std::strtoull(end + 1, nullptr, 16);
        } else if (inside && line.starts_with("VmFlags:")) {
            return contains(line, " dc");
        }
    }
    return false;
}

}  // namespace

TEST("chunks are locked in order, as far as they are wanted and never beyond the end") {
    World world;
    CHECK(!world.has(chunk, 10));
    within([&] { return world.has(chunk, 10); });
    const std::uintptr_t start = world.tier.start();
    CHECK((world.device->locked() == std::map<std::uintptr_t, std::size_t>{{start, chunk}, {start + chunk, chunk}}));
    CHECK_EQUAL(world.total().locked, 2 * chunk);
    world.lock(size);
    CHECK_EQUAL(world.device->locked_bytes(), size);
    CHECK_EQUAL(world.device->locked().at(start + 5 * chunk), chunk / 2);
    const std::vector<std::uintptr_t> order = world.device->order();
    CHECK(std::ranges::is_sorted(order));
    CHECK_EQUAL(order.size(), 6U);
    CHECK_EQUAL(world.total().locked, size);
    CHECK(world.total().refused.empty());
    CHECK_EQUAL(world.total().name, "dram");
    CHECK_EQUAL(world.total().nbytes, size);
    world.close();
}

TEST("the thread has a name, and signals are blocked in it") {
    World world;
    world.lock(1);
    CHECK(world.device->signals_blocked);
    world.close();
    CHECK_EQUAL(std::string(world.device->name), "farpool-locks");
}

TEST("parts of a range lie in one locked chunk each, and are appended") {
    World world;
    world.lock(size);
    const std::uintptr_t start = world.tier.start();
    std::vector<HostPart> parts;
    CHECK(world.locks.parts(&world.tier.port, chunk - 64, 2 * chunk, parts));
    CHECK((parts == std::vector<HostPart>{{start + chunk - 64, 64}, {start + chunk, chunk}, {start + 2 * chunk, chunk - 64}}));
    CHECK(world.locks.parts(&world.tier.port, chunk, chunk, parts));
    CHECK_EQUAL(parts.size(), 4U);
    CHECK((parts.back() == HostPart{start + chunk, chunk}));
    CHECK(world.locks.parts(&world.tier.port, size, 0, parts));
    CHECK_EQUAL(parts.size(), 4U);
    world.close();
}

TEST("random ranges: the parts are the range, without a gap, and cross no chunk") {
    World world;
    world.lock(size);
    std::mt19937_64 random(7);
    for (int turn = 0; turn < 500; ++turn) {
        const std::uint64_t offset = random() % size;
        const std::size_t nbytes = 1 + random() % (size - offset);
        std::vector<HostPart> parts;
        CHECK(world.locks.parts(&world.tier.port, offset, nbytes, parts));
        std::uintptr_t next = world.tier.start() + offset;
        for (const HostPart& part : parts) {
            CHECK_EQUAL(part.address, next);
            CHECK((next - world.tier.start()) / chunk == (next + part.nbytes - 1 - world.tier.start()) / chunk);
            next += part.nbytes;
        }
        CHECK_EQUAL(next, world.tier.start() + offset + nbytes);
    }
    world.close();
}

TEST("while the device locks, no call waits, and nothing is appended") {
    World world;
    world.device->hold(true);
    std::vector<HostPart> parts;
    CHECK(!world.locks.parts(&world.tier.port, 0, 1000, parts));
    within([&] { return world.device->is_locking(); });
    for (int turn = 0; turn < 100; ++turn) {
        CHECK(!world.locks.parts(&world.tier.port, 0, 2 * chunk, parts));
        CHECK_EQUAL(world.total().locked, 0U);
    }
    CHECK(parts.empty());
    world.device->hold(false);
    world.lock(2 * chunk);
    world.close();
}

TEST("a port that was not added is never locked") {
    World world;
    Tier other(chunk);
    std::vector<HostPart> parts;
    CHECK(!world.locks.parts(&other.port, 0, 10, parts));
    CHECK(!world.locks.parts(nullptr, 0, 10, parts));
    world.close();
    CHECK_EQUAL(world.device->tries, 0);
}

TEST("spaces are locked for themselves") {
    World world;
    Tier second(size);
    world.locks.add(&second.port, second.start(), size, "second");
    std::vector<HostPart> parts;
    within([&] { return world.locks.parts(&second.port, 0, chunk + 1, parts); });
    CHECK((parts == std::vector<HostPart>{{second.start(), chunk}, {second.start() + chunk, 1}}));
    CHECK_EQUAL(world.total().locked, 0U);
    CHECK_EQUAL(world.locks.totals().at(1).locked, 2 * chunk);
    world.lock(1);
    CHECK_EQUAL(world.device->locked_bytes(), 3 * chunk);
    world.close();
}

TEST("after a refusal of the device the space is not tried again, and its locked part stays in use") {
    for (int refused = 1; refused <= 6; ++refused) {
        World world;
        world.device->refused = refused;
        CHECK(!world.has(0, size));
        within([&] { return !world.total().refused.empty(); });
        CHECK_EQUAL(world.total().refused, "no more");
        const std::size_t locked = static_cast<std::size_t>(refused - 1) * chunk;
        CHECK_EQUAL(world.total().locked, locked);
        CHECK(refused == 1 || world.has(0, locked));
        CHECK(!world.has(0, locked + 1));
        CHECK_EQUAL(PageLocks::locked_in_process(), locked);
        Tier second(size);
        world.locks.add(&second.port, second.start(), size, "second");
        std::vector<HostPart> parts;
        within([&] { return world.locks.parts(&second.port, 0, 1, parts); });  // the thread has gone on
        CHECK_EQUAL(world.device->tries, refused + 1);
        world.close();
    }
}

TEST("all objects of the process together lock no more than the limit") {
    World first(3 * chunk + 1);
    World second(3 * chunk + 1);
    first.lock(2 * chunk);
    CHECK(!second.has(0, size));
    within([&] { return !second.total().refused.empty(); });
    CHECK(contains(second.total().refused, "at most " + std::to_string(3 * chunk + 1) + " bytes"));
    CHECK_EQUAL(second.total().locked, chunk);
    CHECK_EQUAL(second.device->tries, 1);
    CHECK_EQUAL(PageLocks::locked_in_process(), 3 * chunk);
    CHECK(!first.has(2 * chunk, 1));
    within([&] { return !first.total().refused.empty(); });
    CHECK(first.has(0, 2 * chunk));
    first.close();
    CHECK_EQUAL(PageLocks::locked_in_process(), chunk);
    second.close();
    CHECK_EQUAL(PageLocks::locked_in_process(), 0U);
}

TEST("the last chunk counts with the bytes that it has, and with a limit of 0 nothing is locked") {
    World exact(size);
    exact.lock(size);
    CHECK(exact.total().refused.empty());
    exact.close();
    World none(0);
    CHECK(!none.has(0, 1));
    within([&] { return !none.total().refused.empty(); });
    CHECK_EQUAL(none.device->tries, 0);
    none.close();
}

TEST("a device that cannot be entered refuses every space") {
    Tier tier(size);
    const auto device = std::make_shared<ScriptedDevice>();
    device->lost = true;
    PageLocks locks(device, chunk, no_limit);
    locks.add(&tier.port, tier.start(), size, "dram");
    std::vector<HostPart> parts;
    CHECK(!locks.parts(&tier.port, 0, 1, parts));
    within([&] { return !locks.totals().at(0).refused.empty(); });
    CHECK_EQUAL(locks.totals().at(0).refused, "the device is lost");
    CHECK_EQUAL(device->tries, 0);
    CHECK(locks.close(patience));
}

TEST("memory that cannot be kept from children is unlocked again and refused") {
    const auto device = std::make_shared<ScriptedDevice>();
    PageLocks locks(device, chunk, no_limit);
    Tier tier(chunk);
    const std::uintptr_t of_kernel = 0 - (std::uintptr_t{1} << 40);  // the kernel maps nothing there for a process
    locks.add(&tier.port, of_kernel, chunk, "gone");
    std::vector<HostPart> parts;
    CHECK(!locks.parts(&tier.port, 0, 1, parts));
    within([&] { return !locks.totals().at(0).refused.empty(); });
    CHECK(contains(locks.totals().at(0).refused, "cannot keep it from forked processes"));
    CHECK_EQUAL(device->tries, 1);
    CHECK(device->locked().empty());
    CHECK_EQUAL(PageLocks::locked_in_process(), 0U);
    CHECK(locks.close(patience));
}

TEST("locked memory is kept from forked children until it is unlocked") {
    World world;
    const std::uintptr_t start = world.tier.start();
    CHECK(!kept_from_children(start));
    world.lock(2 * chunk);
    CHECK(kept_from_children(start));
    CHECK(kept_from_children(start + chunk));
    CHECK(!kept_from_children(start + 2 * chunk));
    world.close();
    CHECK(!kept_from_children(start));
    CHECK(!kept_from_children(start + chunk));
}

TEST("a close while the device locks unlocks nothing, and may be repeated") {
    World world;
    world.lock(chunk);
    world.device->hold(true);
    CHECK(!world.has(0, size));
    within([&] { return world.device->is_locking(); });
    CHECK(!world.locks.close(0));
    CHECK(!world.locks.close(-1));
    CHECK_EQUAL(world.device->locked_bytes(), chunk);
    CHECK(world.has(0, chunk));
    world.device->hold(false);
    // The chunk is locked now, but nothing more, and nothing is unlocked before the next call.
    within([&] { return world.total().locked == 2 * chunk; });
    CHECK_EQUAL(world.device->locked_bytes(), 2 * chunk);
    world.close();
    CHECK_EQUAL(world.device->tries, 2);
    CHECK_EQUAL(PageLocks::locked_in_process(), 0U);
}

TEST("after a close nothing is locked, and nothing can be added") {
    World world;
    world.lock(size);
    world.close();
    CHECK(!world.has(0, 1));
    CHECK(world.locks.close(patience));
    CHECK_EQUAL(world.device->tries, 6);
    Tier second(size);
    CHECK(contains(error_of([&] { world.locks.add(&second.port, second.start(), size, "second"); }, farpool::ErrorKind::closed),
                   "second: its memory cannot be page-locked"));
}

TEST("without a close the destructor ends the thread and unlocks nothing") {
    const auto device = std::make_shared<ScriptedDevice>();
    Tier tier(size);
    {
        PageLocks locks(device, chunk, no_limit);
        locks.add(&tier.port, tier.start(), size, "dram");
        std::vector<HostPart> parts;
        within([&] { return locks.parts(&tier.port, 0, 1, parts); });
    }
    CHECK_EQUAL(device.use_count(), 1);
    CHECK_EQUAL(device->locked_bytes(), chunk);
    // The chunk still counts, for this process's other objects, too.
    CHECK_EQUAL(PageLocks::locked_in_process(), chunk);
    World other(size);
    CHECK(!other.has(0, size));
    within([&] { return !other.total().refused.empty(); });
    CHECK_EQUAL(other.total().locked, 4 * chunk);
    other.close();
}

TEST("many threads may ask at once, while spaces are added and the locks are closed") {
    const std::size_t before = PageLocks::locked_in_process();
    World world;
    std::vector<std::unique_ptr<Tier>> tiers;
    for (int number = 0; number < 4; ++number) {
        tiers.push_back(std::make_unique<Tier>(size));
    }
    std::atomic<int> found = 0;
    std::atomic<bool> ended = false;
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 6; ++seed) {
        threads.emplace_back([&, seed] {
            std::mt19937_64 random(seed);
            while (!ended) {
                farpool::Port* const port = random() % 3 == 0 ? &world.tier.port : &tiers[random() % 4]->port;
                const std::uint64_t offset = random() % size;
                std::vector<HostPart> parts;
                found += world.locks.parts(port, offset, 1 + random() % (size - offset), parts) ? 1 : 0;
                (void)world.locks.totals();
                std::this_thread::yield();
            }
        });
    }
    for (const auto& tier : tiers) {
        world.locks.add(&tier->port, tier->start(), size, "one more");
    }
    within([&] { return world.device->locked_bytes() == 5 * size && found > 100; });
    std::thread closer([&] { (void)world.locks.close(patience); });
    CHECK(world.locks.close(patience));
    closer.join();
    ended = true;
    for (std::thread& thread : threads) {
        thread.join();
    }
    world.close();
    CHECK_EQUAL(PageLocks::locked_in_process(), before);
}

TEST("in a forked child nothing is locked, and no call waits for the parent's thread") {
    World world;
    world.lock(chunk);
    world.device->hold(true);
    CHECK(!world.has(0, size));
    within([&] { return world.device->is_locking(); });
    const pid_t child = fork();
    if (child == 0) {
        alarm(60);
        const bool right = !world.has(0, 1) && world.locks.totals().empty() && world.locks.close(0);
        _exit(right ? 0 : 1);
    }
    int status = -1;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK_EQUAL(status, 0);
    world.device->hold(false);
    world.close();
}

TEST("bad arguments are refused with the value and the expectation") {
    World world;
    Tier second(size);
    const auto add = [&](farpool::Port* port, std::uintptr_t address, std::size_t nbytes) {
        return error_of([&] { world.locks.add(port, address, nbytes, "second"); });
    };
    const std::string off = add(&second.port, second.start() + 512, chunk);
    CHECK(contains(off, "second: its memory at address " + std::to_string(second.start() + 512)));
    CHECK(contains(off, "does not begin at a page boundary"));
    CHECK(contains(add(nullptr, second.start(), size), "need the port of its memory"));
    CHECK(contains(add(&second.port, second.start(), 0), "second: 0 bytes"));
    CHECK(contains(add(&second.port, second.start(), SIZE_MAX), "no range of memory"));
    CHECK(contains(add(&world.tier.port, second.start(), size), "was added to the page locks before"));
    CHECK_EQUAL(world.locks.totals().size(), 1U);
    const std::string beyond = error_of([&] { world.has(size - 1, 2); });
    CHECK(contains(beyond, "dram: 2 bytes at offset " + std::to_string(size - 1)));
    CHECK(contains(error_of([&] { world.has(UINT64_MAX, 1); }), "do not lie in its"));
    CHECK(contains(error_of([&] { world.has(1, SIZE_MAX); }), "do not lie in its"));
    CHECK_EQUAL(world.total().locked, 0U);
    CHECK(contains(error_of([&] { PageLocks(world.device, 1000, no_limit); }), "chunk is 1000 bytes"));
    CHECK(contains(error_of([&] { PageLocks(world.device, 0, no_limit); }), "chunk is 0 bytes"));
    CHECK(contains(error_of([&] { PageLocks(nullptr, chunk, no_limit); }), "there is no device"));
    world.close();
}

int main() { return farpool::testing::run(); }
