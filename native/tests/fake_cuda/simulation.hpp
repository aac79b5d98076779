// A simulated device, whose memory is host memory. Work is queued and runs only when a host thread forces progress, in the
// worst order that CUDA permits. In real-time mode, one thread per stream runs the work instead, and takes the time it needs.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

namespace farpool::fake {

enum class Policy : int { copies_first, compute_first, latest_possible, random };

// One record of an event. Waits keep it, so a later record of the same event does not change them.
struct Mark {
    std::uint64_t stream = 0;
    bool queued = false;  // false if its record went into a graph
    bool passed = false;
    bool awaited = false;  // by a thread of the host, in real time
    double time = 0;
};

struct Operation {
    enum class Kind { copy, fill, kernel, record, wait };
    Kind kind;
    char* target = nullptr;
    const char* source = nullptr;
    std::size_t nbytes = 0;
    std::uint16_t value = 0;            // fill
    void (*function)(void*) = nullptr;  // kernel
    void* data = nullptr;               // kernel
    double seconds = 0;                 // kernel
    std::shared_ptr<Mark> mark = {};    // record, wait
    double enqueued = 0;
    std::size_t done = 0;  // bytes that were copied
};

struct Stream {
    std::uint64_t context = 0;  // 0 for the default stream, which every context has
    bool blocking = false;
    bool closed = false;
    bool capturing = false;
    bool spoiled = false;  // a forbidden call was made during its capture
    double end = 0;        // time at which its last operation ended
    std::deque<Operation> queue = {};
    std::thread worker = {};
    std::condition_variable_any wake = {};  // of the worker
    std::uint64_t id = 0;                   // of all streams, also of destroyed ones
};

struct Event {
    std::uint64_t context = 0;
    bool blocking = false;
    bool timed = true;
    std::shared_ptr<Mark> last = {};  // null until it is recorded
};

// The primary context of a device has the same handle each time that it is retained.
struct Context {
    std::uint64_t handle = 0;
    int retained = 0;
};

// Each member may be used only with `mutex` locked.
class Simulation {
public:
    std::mutex mutex;
    std::map<std::uint64_t, Stream> streams;
    std::map<std::uint64_t, Event> events;
    std::map<int, Context> contexts;                       // by device
    std::map<const char*, std::size_t> locked;             // page-locked ranges
    std::map<std::uint64_t, std::size_t> allocated;        // of device memory
    std::unordered_map<const char*, std::uint64_t> calls;  // by the text of the name: a call must not cost much
    std::vector<std::string> violations;
    std::map<std::string, std::pair<std::uint64_t, int>> planned;  // by function: calls until it fails, and its result
    std::size_t device_limit, locked_limit, split_bytes;
    std::uint64_t copies_until_failure;  // 0: no copy fails
    int devices, version;
    bool initialized = false;
    std::uint64_t resets = 0;
    int lost;
    Policy policy;
    double rate;
    double host_time;  // negative: real time
    bool host_computes;
    double fast;                // seconds that the device's clock gains each second
    std::uint64_t next_stream;  // handle of the next stream that is made; 0: a new one

    Simulation() { start(0, Policy::random); }
    // Ends all work, and begins with a new device. The mutex must not be locked.
    void reset(std::uint64_t seed, Policy order);

    std::uint64_t new_handle() { return handle_ += 16; }
    double now() const;
    void violate(const std::string& what) { violations.push_back(what); }
    // The stream or event of a handle; null, and a violation, if it does not exist or was destroyed.
    Stream* find_stream(void* handle, const char* call);
    // Gives a destroyed stream, whose work may still be queued, another handle, so that a new stream can have its own.
    void vacate(std::uint64_t handle);
    Event* find_event(void* handle, const char* call);
    // Queues an operation on a stream of the context, and returns a result of the driver.
    int queue(const char* call, void* stream, std::uint64_t context, Operation operation);
    // Runs operations in an order of the policy until the mark has passed; returns the error of a lost device.
    int run_until(std::shared_ptr<Mark> mark);
    // Runs up to so many operations that a mark needs, or any if there is none; returns how many there were.
    std::uint64_t advance(std::uint64_t count, const Mark* wanted);
    std::uint64_t dice(std::uint64_t sides) { return random_() % sides; }
    bool touched(const char* memory, std::size_t nbytes) const;
    bool is_locked(const void* memory, std::size_t nbytes) const;
    bool is_retained(std::uint64_t context) const;
    bool someone_captures() const;
    void serve_in_real_time() { real_time_ = true; }

private:
    void start(std::uint64_t seed, Policy order);
    static bool runnable(const Stream& stream);
    std::uint64_t pick();
    std::uint64_t needed_by(const Mark& mark);
    int rank(const Operation& operation) const;
    bool fails(const Operation& operation);
    void execute(std::uint64_t stream);
    void finish(Stream& stream);
    void wake_behind(const Mark& mark);
    double end_of(const Stream& stream) const;
    void serve(Stream& stream);

    std::condition_variable_any changed_;  // an awaited mark has passed, or the device was lost
    std::mt19937_64 random_;
    std::uint64_t handle_ = 0x1000;
    bool real_time_ = false;
    bool stopping_ = false;
};

Simulation& simulation();

}  // namespace farpool::fake
