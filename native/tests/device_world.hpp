// A device's queue on a simulated CUDA driver, for tests: `Rig` without a driver of a pager, `World` with one.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/clock.hpp"
#include "core/extent_allocator.hpp"
#include "core/memory.hpp"
#include "core/memory_port.hpp"
#include "device/cuda.hpp"
#include "device/device_queue.hpp"
#include "pager/driver.hpp"
#include "tests/fake_cuda/control.hpp"
#include "tests/testing.hpp"

namespace farpool::testing {

constexpr double patience = 30.0;
constexpr std::size_t page = 4096;
enum Policy { copies_first, compute_first, latest_possible, any_order };

inline const fake::Fake& fake_cuda() {
    static const fake::Fake made(FAKE_CUDA_PATH);
    return made;
}

// Waits until a condition holds, and fails the test if it never does.
template <typename Condition>
void until(const char* what, Condition condition) {
    const double deadline = monotonic_seconds() + patience;
    while (!condition()) {
        if (monotonic_seconds() > deadline) {
            fail(std::string("waited in vain until ") + what, __FILE__, __LINE__);
        }
        std::this_thread::sleep_for(std::chrono::microseconds(50));
    }
}

// How often the other threads of this process have given up the processor; -1 if one of them runs or is to run.
inline long switches_of_sleepers() {
    long switches = 0;
    for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        if (task.path().filename() == std::to_string(gettid())) {
            continue;
        }
        std::ifstream status(task.path() / "status");
        for (std::string line; std::getline(status, line);) {
            if (line.starts_with("State:") && line.find('S', 6) == std::string::npos) {
                return -1;
            }
            if (const auto at = line.find("ctxt_switches:"); at != std::string::npos) {
                switches += std::stol(line.substr(at + 14));
            }
        }
    }
    return switches;
}

// True if all that can be done is done: no other thread has run between two looks. The calling thread gives them no work
// meanwhile.
inline bool others_sleep() {
    const long before = switches_of_sleepers();
    return before >= 0 && switches_of_sleepers() == before;
}

// Gives what must not happen the time to happen. A test with a fault may pass now and then, one without never fails.
inline void linger() { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }

// Holds a kernel back until the test opens it.
class Gate {
public:
    void open() { open_ = true; }
    void pass() const {
        while (!open_) {
            std::this_thread::sleep_for(std::chrono::microseconds(50));
        }
    }

private:
    std::atomic<bool> open_ = false;
};

class SimulatedSpace : public pager::Space {
public:
    explicit SimulatedSpace(std::int64_t capacity) : extents_(capacity, 64) {}
    std::int64_t reserve(std::int64_t nbytes, int) override { return extents_.alloc(nbytes); }
    void free(std::int64_t offset, std::int64_t, int) override { extents_.free(offset); }

private:
    ExtentAllocator extents_;
};

// How many calls may pass; the others sleep.
class Allowance {
public:
    void operator=(unsigned calls) {
        calls_ = calls;
        calls_.notify_all();
    }
    void wait_for(unsigned call) const {
        for (unsigned known = calls_; call > known; known = calls_) {
            calls_.wait(known);
        }
    }

private:
    std::atomic<unsigned> calls_ = UINT32_MAX;
};

// A tier behind a call, like a file. One transfer of so many fails, or a single one; calls beyond those allowed wait.
class SimulatedPort : public Port {
public:
    explicit SimulatedPort(std::size_t nbytes, unsigned one_in = 0) : bytes_(nbytes), one_in_(one_in) {}
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override {
        pass(offset);
        std::memcpy(into, bytes_.data() + offset, nbytes);
    }
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override {
        pass(offset);
        std::memcpy(bytes_.data() + offset, from, nbytes);
    }
    unsigned concurrency() const noexcept override { return 2; }

    std::byte* at(std::size_t offset) { return bytes_.data() + offset; }
    unsigned calls() const { return calls_; }
    // Of the calls so far, in their order.
    std::vector<std::uint64_t> offsets() const {
        const std::lock_guard lock(mutex_);
        return offsets_;
    }
    Allowance allowed;
    std::atomic<std::uint64_t> refused = UINT64_MAX;  // the offset at which the next call fails

private:
    void pass(std::uint64_t offset) {
        unsigned call = 0;
        {
            const std::lock_guard lock(mutex_);
            offsets_.push_back(offset);
            call = ++calls_;
        }
        allowed.wait_for(call);
        if (refused.compare_exchange_strong(offset, UINT64_MAX) || (one_in_ != 0 && call % one_in_ == 0)) {
            throw PortFailure({ErrorKind::tier, "told to fail", "simulated", 0, nullptr});
        }
    }

    std::vector<std::byte> bytes_;
    unsigned one_in_;
    mutable std::mutex mutex_;
    std::vector<std::uint64_t> offsets_;
    std::atomic<unsigned> calls_ = 0;
};

struct Setup {
    std::uint64_t seed = 0;
    Policy policy = any_order;
    double real_time_rate = 0;  // bytes per second; 0: work runs when the host asks, by the policy
    std::size_t capacity = 16 << 10;
    std::size_t page_locked = 0;      // bytes of a tier of page-locked memory, above the other one
    std::size_t locked_chunk = page;  // that is page-locked at once
    std::size_t tier = 1 << 20;
    unsigned one_in = 0;  // transfers of the lower tier of which one fails
    std::size_t staging = 8 << 10;
    std::size_t chunk = 1 << 10;
    std::size_t bounce = 256;
    std::size_t streams = 1;
    int version = 12040;                                                               // of the driver
    std::function<void(std::uintptr_t arena, device::Stream allocating)> before = {};  // the queue is made
    std::function<std::shared_ptr<device::Cuda>()> open = [] { return device::open_cuda(0, FAKE_CUDA_PATH); };
};

// What a test submits.
struct Order {
    std::int64_t id = 0;
    Direction direction = Direction::read;
    Port* port = nullptr;  // null: a barrier
    std::vector<Piece> pieces = {};
    std::vector<std::int64_t> after = {};
    std::int64_t priority = 0;
    std::int64_t last_use = -1;
};

// A device and its queue.
struct Rig {
    explicit Rig(const Setup& setup)
        : cuda((fake_cuda().reset(setup.seed, setup.policy), fake_cuda().set(fake_version, setup.version), setup.open())),
          capacity(setup.capacity),
          locked(std::max<std::size_t>(setup.page_locked, 1)),
          mapped(locked),
          port(setup.tier, setup.one_in) {
        cuda->enter();
        fake_cuda().set(fake_split_bytes, 256);
        if (setup.real_time_rate > 0) {
            fake_cuda().set(fake_real_time_rate, setup.real_time_rate);
        }
        arena = cuda->allocate(capacity);
        for (std::size_t index = 0; index < setup.streams; ++index) {
            streams.push_back(cuda->make_stream());
        }
        if (setup.before) {
            setup.before(arena, streams[0]);
        }
        device::DeviceQueue::Config config{.staging = setup.staging, .chunk = setup.chunk};
        config.allocating = handle(0);
        config.bounce = setup.bounce;
        if (setup.page_locked > 0) {
            locks = std::make_unique<device::PageLocks>(cuda, setup.locked_chunk, std::size_t{1} << 40);
            locks->add(&mapped, reinterpret_cast<std::uintptr_t>(locked.data()), locked.nbytes(), "mapped");
        }
        queue = std::make_shared<device::DeviceQueue>(cuda, config, locks.get());
        queue->begin();
    }
    ~Rig() {
        if (queue != nullptr) {  // a check has failed
            std::ranges::for_each(gates, &Gate::open);
            port.allowed = UINT32_MAX;
            queue->close(1);
        }
        for (const device::Stream stream : streams) {
            cuda->end_stream(stream);
        }
        cuda->free(arena);
    }

    // Lets all work end, and checks that the queue has made no call that CUDA would not permit.
    void close() {
        stop();
        end();
    }
    void stop() {
        for (const device::Stream stream : streams) {
            finish(stream);
        }
        while (fake_cuda().advance(1 << 20) > 0) {
        }
        CHECK(queue->close(patience));
        queue->poll();
    }
    void end() {
        queue.reset();
        CHECK(locks == nullptr || locks->close(patience));
        CHECK_EQUAL(fake_cuda().violations(), std::string{});
    }

    // Waits until a stream has done all its work.
    void finish(device::Stream stream) const {
        const device::Event event = cuda->make_event();
        cuda->record(event, stream);
        cuda->synchronize(event);
        cuda->end_event(event);
    }

    ProgramStream handle(std::size_t stream) const { return reinterpret_cast<ProgramStream>(streams.at(stream)); }
    std::byte* at(std::int64_t place) const { return reinterpret_cast<std::byte*>(arena) + place; }

    // A closed gate.
    Gate& gate() { return gates.emplace_back(); }

    // The program computes on a stream: begins an access, and ends it if `ordinal` is not negative.
    void use(std::size_t stream, std::int64_t ordinal, std::function<void()> body, std::int64_t last_use = -1) {
        queue->begin_use(handle(stream));
        queue->order_use(handle(stream), last_use);
        launch(stream, std::move(body));
        if (ordinal >= 0) {
            queue->end_use(handle(stream), ordinal);
        }
    }
    void launch(std::size_t stream, std::function<void()> body, double seconds = 0) {
        work.push_back(std::move(body));
        const auto run = [](void* data) { (*static_cast<std::function<void()>*>(data))(); };
        CHECK_EQUAL(fake_cuda().launch(streams.at(stream), run, &work.back(), seconds), 0);
    }
    Piece piece(std::uint64_t offset, std::size_t place, std::size_t nbytes) const { return {offset, arena + place, nbytes}; }

    // Submits a batch; each entry's keepalive is made of its number.
    void submit(const std::vector<Order>& orders) const {
        std::vector<Submission> batch;
        for (const Order& order : orders) {
            batch.push_back({order.id, order.port, order.direction, order.pieces, order.after, order.priority,
                             keepalive(order.id), order.last_use});
        }
        queue->submit(batch);
    }
    static Keepalive keepalive(std::int64_t id) { return reinterpret_cast<Keepalive>(16 * (id + 1)); }
    // Takes results until there are so many in all. Each is reported once, with its keepalive.
    std::map<std::int64_t, Result>& collect(std::size_t count) {
        until("so many results are there", [&] {
            for (Result& result : queue->poll()) {
                CHECK(result.keepalive == keepalive(result.id));
                ended.push_back(result.id);
                CHECK(results.emplace(result.id, std::move(result)).second);
            }
            return results.size() >= count || (queue->wait(0.01), false);
        });
        CHECK_EQUAL(results.size(), count);
        return results;
    }

    // When an entry ended among the others.
    std::ptrdiff_t place(std::int64_t id) const { return std::ranges::find(ended, id) - ended.begin(); }

    std::shared_ptr<device::Cuda> cuda;
    std::size_t capacity;
    Memory locked;
    MemoryPort mapped;
    SimulatedPort port;
    std::uintptr_t arena = 0;
    std::vector<device::Stream> streams;
    std::unique_ptr<device::PageLocks> locks;
    std::shared_ptr<device::DeviceQueue> queue;
    std::deque<Gate> gates;
    std::deque<std::function<void()>> work;
    std::map<std::int64_t, Result> results;
    std::vector<std::int64_t> ended;  // in the order of their results
};

inline std::uint64_t calls(const char* name) { return fake_cuda().calls(name); }

inline bool holds(const std::byte* at, std::size_t nbytes, int value) {
    return std::all_of(at, at + nbytes, [&](std::byte byte) { return byte == static_cast<std::byte>(value); });
}

// A device, its queue and a driver.
struct World : Rig {
    explicit World(const Setup& setup) : Rig(setup) {
        std::vector<std::shared_ptr<pager::Space>> spaces;
        if (setup.page_locked > 0) {
            spaces.push_back(std::make_shared<SimulatedSpace>(static_cast<std::int64_t>(setup.page_locked)));
        }
        spaces.push_back(std::make_shared<SimulatedSpace>(static_cast<std::int64_t>(setup.tier)));
        auto pager = std::make_shared<pager::Pager>(static_cast<std::int64_t>(capacity), spaces, 1, 64, 1 << 12, true, true);
        driver = std::make_unique<pager::Driver>(pager, queue, arena);
        if (setup.page_locked > 0) {
            driver->add_port(&mapped);
        }
        driver->add_port(&port);
    }
    void close() {
        stop();
        driver.reset();
        end();
    }

    std::unique_ptr<pager::Driver> driver;
};

}  // namespace farpool::testing
