#include "tests/fake_cuda/simulation.hpp"

#include <sys/prctl.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <utility>

namespace farpool::fake {

namespace {

using Kind = Operation::Kind;
using Clock = std::chrono::steady_clock;

constexpr int invalid_handle = 400, launch_failed = 719, capture_isolation = 905;

// Does the next part of an operation's work; true when all is done. A long copy is done in two parts, unless `whole`.
bool work(Operation& operation, std::size_t split_bytes) {
    if (operation.kind == Kind::copy) {
        const bool half = operation.done == 0 && operation.nbytes > split_bytes;
        const std::size_t end = half ? operation.nbytes / 2 : operation.nbytes;
        std::memcpy(operation.target + operation.done, operation.source + operation.done, end - operation.done);
        operation.done = end;
        return !half;
    }
    if (operation.kind == Kind::fill) {
        std::fill_n(reinterpret_cast<std::uint16_t*>(operation.target), operation.nbytes / 2, operation.value);
    } else if (operation.kind == Kind::kernel) {
        operation.function(operation.data);
    }
    return true;
}

bool overlap(const char* a, std::size_t a_bytes, const char* b, std::size_t b_bytes) {
    return a != nullptr && b != nullptr && a < b + b_bytes && b < a + a_bytes;
}

}  // namespace

Simulation& simulation() {
    // Never destroyed: a program may still end its streams while its static objects are destroyed.
    static auto* const one = new Simulation;
    return *one;
}

void Simulation::start(std::uint64_t seed, Policy order) {
    streams.clear();
    streams[0].blocking = true;
    events.clear();
    contexts.clear();
    ++resets;
    locked.clear();
    for (const auto& [memory, nbytes] : allocated) {
        std::free(reinterpret_cast<void*>(memory));
    }
    allocated.clear();
    calls.clear();
    violations.clear();
    planned.clear();
    device_limit = locked_limit = std::size_t{1} << 40;
    split_bytes = 4096;
    copies_until_failure = 0;
    devices = 2;
    version = 12040;
    lost = 0;
    policy = order;
    rate = 2e9;
    host_time = -1;
    host_computes = false;
    fast = 0;
    next_stream = 0;
    random_.seed(seed);
    real_time_ = stopping_ = false;
}

void Simulation::reset(std::uint64_t seed, Policy order) {
    std::vector<std::thread> workers;
    {
        const std::lock_guard lock(mutex);
        stopping_ = true;
        for (auto& [handle, stream] : streams) {
            workers.push_back(std::move(stream.worker));
            stream.wake.notify_one();
        }
        changed_.notify_all();
    }
    for (auto& worker : workers) {
        if (worker.joinable()) {
            worker.join();
        }
    }
    const std::lock_guard lock(mutex);
    start(seed, order);
}

double Simulation::now() const {
    return host_time >= 0 ? host_time : std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
}

Stream* Simulation::find_stream(void* handle, const char* call) {
    const auto found = streams.find(reinterpret_cast<std::uint64_t>(handle));
    if (found == streams.end() || found->second.closed) {
        violate(std::string(call) + ": the stream was destroyed or never made");
        return nullptr;
    }
    return &found->second;
}

void Simulation::vacate(std::uint64_t handle) {
    auto node = streams.extract(handle);
    if (node.empty()) {
        return;
    }
    node.key() = new_handle();
    for (const Operation& operation : node.mapped().queue) {
        if (operation.kind == Kind::record) {
            operation.mark->stream = node.key();
        }
    }
    streams.insert(std::move(node));
}

Event* Simulation::find_event(void* handle, const char* call) {
    const auto found = events.find(reinterpret_cast<std::uint64_t>(handle));
    if (found == events.end()) {
        violate(std::string(call) + ": the event was destroyed or never made");
        return nullptr;
    }
    return &found->second;
}

int Simulation::queue(const char* call, void* handle, std::uint64_t context, Operation operation) {
    Stream* const stream = find_stream(handle, call);
    if (stream == nullptr) {
        return invalid_handle;
    }
    if (stream->context != 0 && stream->context != context) {
        violate(std::string(call) + ": the stream belongs to another context");
        return invalid_handle;
    }
    if (stream->capturing) {
        violate(std::string(call) + ": work went into a graph instead of being done");
        stream->spoiled |= operation.kind == Kind::wait;
        return operation.kind == Kind::wait ? capture_isolation : 0;
    }
    if (operation.kind == Kind::record) {
        operation.mark->queued = true;
        operation.mark->stream = reinterpret_cast<std::uint64_t>(handle);
    }
    operation.enqueued = now();
    const bool takes_time = operation.kind != Kind::record && operation.kind != Kind::wait;
    stream->queue.push_back(std::move(operation));
    if (!real_time_ || stream->queue.size() > 1) {
        return 0;
    }
    if (!takes_time && runnable(*stream)) {
        finish(*stream);  // no thread can wait for it yet, so none is woken
        return 0;
    }
    if (!stream->worker.joinable()) {
        stream->worker = std::thread([this, stream] { serve(*stream); });
    } else if (runnable(*stream)) {
        stream->wake.notify_one();
    }
    return 0;
}

bool Simulation::runnable(const Stream& stream) {
    return !stream.queue.empty() && (stream.queue.front().kind != Kind::wait || stream.queue.front().mark->passed);
}

int Simulation::rank(const Operation& operation) const {
    const bool waits = operation.kind == Kind::record || operation.kind == Kind::wait;
    if (waits || policy == Policy::random || policy == Policy::latest_possible) {
        return 0;
    }
    return (operation.kind == Kind::kernel) == (policy == Policy::compute_first) ? 1 : 2;
}

std::uint64_t Simulation::pick() {
    std::vector<std::uint64_t> best;
    int least = 3;
    for (const auto& [handle, stream] : streams) {
        if (!runnable(stream)) {
            continue;
        }
        if (const int one = rank(stream.queue.front()); one < least) {
            best.clear();
            least = one;
        }
        if (rank(stream.queue.front()) == least) {
            best.push_back(handle);
        }
    }
    if (best.empty()) {
        std::fprintf(stderr, "fake_cuda: deadlock: each of %zu streams is empty or waits\n", streams.size());
        std::abort();
    }
    return best[dice(best.size())];
}

// Its stream, or the stream that its stream waits for. This ends because a wait follows the record that it waits for.
std::uint64_t Simulation::needed_by(const Mark& mark) {
    const Stream& stream = streams.at(mark.stream);
    return runnable(stream) ? mark.stream : needed_by(*stream.queue.front().mark);
}

bool Simulation::fails(const Operation& operation) {
    if (operation.kind == Kind::copy && operation.done == 0 && copies_until_failure > 0 && --copies_until_failure == 0) {
        lost = launch_failed;
    }
    return lost != 0;
}

double Simulation::end_of(const Stream& stream) const {
    const Operation& head = stream.queue.front();
    switch (head.kind) {
        case Kind::wait:
            return std::max(stream.end, head.mark->time);
        case Kind::record:
            return std::max(stream.end, head.enqueued);
        case Kind::kernel:
            return std::max(stream.end, head.enqueued) + head.seconds;
        default:
            return std::max(stream.end, head.enqueued) + static_cast<double>(head.nbytes) / rate;
    }
}

void Simulation::finish(Stream& stream) {
    stream.end = end_of(stream);
    if (const Operation& head = stream.queue.front(); head.kind == Kind::record) {
        head.mark->time = stream.end;
        head.mark->passed = true;
        if (real_time_) {
            wake_behind(*head.mark);
        }
    }
    stream.queue.pop_front();
}

// Wakes the threads that wait for this mark, and no others: a device has no threads that take the host's processors.
void Simulation::wake_behind(const Mark& mark) {
    if (mark.awaited) {
        changed_.notify_all();
    }
    for (auto& [handle, stream] : streams) {
        if (!stream.queue.empty() && stream.queue.front().kind == Kind::wait && stream.queue.front().mark.get() == &mark) {
            stream.wake.notify_one();
        }
    }
}

void Simulation::execute(std::uint64_t handle) {
    Stream& stream = streams.at(handle);
    if (fails(stream.queue.front()) || !work(stream.queue.front(), split_bytes)) {
        return;
    }
    finish(stream);
    if (stream.closed && stream.queue.empty()) {
        streams.erase(handle);
    }
}

int Simulation::run_until(std::shared_ptr<Mark> mark) {
    if (real_time_) {
        mark->awaited = true;
        changed_.wait(mutex, [&] { return mark->passed || lost != 0; });
    }
    while (!mark->passed && lost == 0) {
        execute(policy == Policy::latest_possible ? needed_by(*mark) : pick());
    }
    return lost;
}

std::uint64_t Simulation::advance(std::uint64_t count, const Mark* wanted) {
    for (std::uint64_t done = 0; done < count; ++done) {
        const bool all = wanted == nullptr || policy != Policy::latest_possible;
        const bool some = std::any_of(streams.begin(), streams.end(), [](auto& one) { return runnable(one.second); });
        if (real_time_ || lost != 0 || !some || (wanted != nullptr && wanted->passed)) {
            return done;
        }
        execute(all ? pick() : needed_by(*wanted));
    }
    return count;
}

void Simulation::serve(Stream& stream) {
    prctl(PR_SET_TIMERSLACK, 1);  // nanoseconds: a sleep ends when the operation does
    std::unique_lock lock(mutex);
    while (true) {
        stream.wake.wait(lock, [&] { return stopping_ || (lost == 0 && runnable(stream)); });
        if (stopping_) {
            return;
        }
        Operation& head = stream.queue.front();  // stays where it is while others append to the queue
        if (fails(head)) {
            changed_.notify_all();
        } else {
            const double end = end_of(stream);
            lock.unlock();
            work(head, head.nbytes);
            std::this_thread::sleep_until(
                Clock::time_point(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(end))));
            lock.lock();
            finish(stream);
        }
    }
}

bool Simulation::touched(const char* memory, std::size_t nbytes) const {
    return std::any_of(streams.begin(), streams.end(), [&](const auto& one) {
        return std::any_of(one.second.queue.begin(), one.second.queue.end(), [&](const Operation& operation) {
            return overlap(operation.target, operation.nbytes, memory, nbytes) ||
                   overlap(operation.source, operation.nbytes, memory, nbytes);
        });
    });
}

bool Simulation::is_locked(const void* memory, std::size_t nbytes) const {
    const auto* const first = static_cast<const char*>(memory);
    auto after = locked.upper_bound(first);
    return after != locked.begin() && first + nbytes <= (--after)->first + after->second;
}

bool Simulation::is_retained(std::uint64_t context) const {
    return std::any_of(contexts.begin(), contexts.end(),
                       [&](const auto& one) { return one.second.handle == context && one.second.retained > 0; });
}

bool Simulation::someone_captures() const {
    return std::any_of(streams.begin(), streams.end(), [](const auto& one) { return one.second.capturing; });
}

}  // namespace farpool::fake
