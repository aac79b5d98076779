// The functions of the CUDA driver, over a simulated device, with the errors that CUDA documents for them. Each may be called
// from several threads at once. Handles are numbers that are used once, unless a test reuses one, so a destroyed one is
// recognized.
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/relax.hpp"
#include "tests/fake_cuda/control.hpp"
#include "tests/fake_cuda/simulation.hpp"

namespace {

using namespace farpool::fake;
using Kind = Operation::Kind;
using Handle = std::uint64_t;

constexpr int invalid_value = 1, out_of_memory = 2, not_initialized = 3, invalid_device = 101, invalid_context = 201;
constexpr int invalid_handle = 400, not_ready = 600, already_locked = 712, not_locked = 713;
constexpr int capture_unsupported = 900, capture_implicit = 906;
constexpr int global_mode = 0;
constexpr unsigned looks_before_sleep = 100;

// What must be true for a call: nothing; cuInit was called; this thread has a context; and no capture forbids it.
enum class Needs { nothing, driver, context, no_capture };

thread_local Handle current = 0;
thread_local int mode = global_mode;
thread_local std::uint64_t resets = 0;  // that this thread knows of: each is like a new process

int refused(Simulation& device, const char* name, Needs needs) {
    ++device.calls[name];
    if (resets != device.resets) {
        resets = device.resets;
        current = 0;
        mode = global_mode;
    }
    if (!device.planned.empty()) {
        if (const auto plan = device.planned.find(name); plan != device.planned.end() && --plan->second.first == 0) {
            const int result = plan->second.second;
            device.planned.erase(plan);
            return result;
        }
    }
    if (needs >= Needs::driver && !device.initialized) {
        return not_initialized;
    }
    if (needs >= Needs::driver && device.lost != 0) {
        return device.lost;
    }
    if (needs >= Needs::context && !device.is_retained(current)) {
        return invalid_context;
    }
    if (needs == Needs::no_capture && mode == global_mode && device.someone_captures()) {
        device.violate(std::string(name) + ": forbidden while a graph is captured, and breaks that capture");
        for (auto& [handle, stream] : device.streams) {
            stream.spoiled |= stream.capturing;
        }
        return capture_unsupported;
    }
    return 0;
}

template <typename Body>
int call(const char* name, Needs needs, Body body) {
    Simulation& device = simulation();
    // Calls are short, so a thread that meets another one looks again before it sleeps, as in a real driver.
    std::unique_lock lock(device.mutex, std::try_to_lock);
    for (unsigned attempt = 1; !lock.owns_lock() && attempt < looks_before_sleep; ++attempt) {
        farpool::relax(attempt);
        lock.try_lock();
    }
    if (!lock.owns_lock()) {
        lock.lock();
    }
    const int result = refused(device, name, needs);
    return result != 0 ? result : body(device);
}

// A call with an event or a stream, which must exist.
template <typename Body>
int call_event(const char* name, Needs needs, void* handle, Body body) {
    return call(name, needs, [&](Simulation& device) {
        Event* const event = device.find_event(handle, name);
        return event == nullptr ? invalid_handle : body(device, *event);
    });
}

template <typename Body>
int call_stream(const char* name, void* handle, Body body) {
    return call(name, Needs::context, [&](Simulation& device) {
        Stream* const stream = device.find_stream(handle, name);
        return stream == nullptr ? invalid_handle : body(device, *stream);
    });
}

Handle number(void* handle) { return reinterpret_cast<Handle>(handle); }

void check_locked(Simulation& device, const char* name, const void* memory, std::size_t nbytes) {
    if (!device.is_locked(memory, nbytes)) {
        device.violate(std::string(name) + ": host memory that is not page-locked");
    }
}

// The page-locked or allocated bytes of a map.
template <typename Ranges>
std::size_t total(const Ranges& ranges) {
    std::size_t sum = 0;
    for (const auto& [memory, nbytes] : ranges) {
        sum += nbytes;
    }
    return sum;
}

int queue_copy(Simulation& device, const char* name, void* stream, void* target, const void* source, std::size_t nbytes) {
    return device.queue(name, stream, current,
                        {.kind = Kind::copy,
                         .target = static_cast<char*>(target),
                         .source = static_cast<const char*>(source),
                         .nbytes = nbytes});
}

}  // namespace

extern "C" {

int cuDriverGetVersion(int* version) {
    return call("cuDriverGetVersion", Needs::nothing, [&](Simulation& device) { return *version = device.version, 0; });
}

int cuInit(unsigned) {
    return call("cuInit", Needs::nothing, [](Simulation& device) { return device.initialized = true, 0; });
}

int cuGetErrorName(int error, const char** name) {
    static const std::map<int, const char*> names = {{0, "CUDA_SUCCESS"},
                                                     {invalid_value, "CUDA_ERROR_INVALID_VALUE"},
                                                     {out_of_memory, "CUDA_ERROR_OUT_OF_MEMORY"},
                                                     {not_initialized, "CUDA_ERROR_NOT_INITIALIZED"},
                                                     {100, "CUDA_ERROR_NO_DEVICE"},
                                                     {invalid_device, "CUDA_ERROR_INVALID_DEVICE"},
                                                     {invalid_context, "CUDA_ERROR_INVALID_CONTEXT"},
                                                     {214, "CUDA_ERROR_ECC_UNCORRECTABLE"},
                                                     {invalid_handle, "CUDA_ERROR_INVALID_HANDLE"},
                                                     {not_ready, "CUDA_ERROR_NOT_READY"},
                                                     {700, "CUDA_ERROR_ILLEGAL_ADDRESS"},
                                                     {already_locked, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"},
                                                     {not_locked, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED"},
                                                     {719, "CUDA_ERROR_LAUNCH_FAILED"},
                                                     {capture_unsupported, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED"},
                                                     {905, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION"},
                                                     {capture_implicit, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT"}};
    const auto found = names.find(error);
    *name = found == names.end() ? nullptr : found->second;
    return found == names.end() ? invalid_value : 0;
}

int cuGetErrorString(int error, const char** text) {
    const int result = cuGetErrorName(error, text);
    *text = result == 0 ? "text of the fake" : nullptr;
    return result;
}

int cuDeviceGetCount(int* count) {
    return call("cuDeviceGetCount", Needs::driver, [&](Simulation& device) { return *count = device.devices, 0; });
}

int cuDeviceGet(int* found, int index) {
    return call("cuDeviceGet", Needs::driver, [&](Simulation& device) {
        *found = index;
        return index < 0 || index >= device.devices ? invalid_device : 0;
    });
}

int cuDevicePrimaryCtxRetain(void** context, int index) {
    return call("cuDevicePrimaryCtxRetain", Needs::driver, [&](Simulation& device) {
        Context& primary = device.contexts[index];
        if (primary.handle == 0) {
            primary.handle = device.new_handle();
        }
        ++primary.retained;
        *context = reinterpret_cast<void*>(primary.handle);
        return 0;
    });
}

int cuDevicePrimaryCtxRelease_v2(int index) {
    return call("cuDevicePrimaryCtxRelease_v2", Needs::driver, [&](Simulation& device) {
        if (device.contexts[index].retained == 0) {
            device.violate("cuDevicePrimaryCtxRelease_v2: released more often than retained");
            return invalid_context;
        }
        --device.contexts[index].retained;
        return 0;
    });
}

int cuCtxSetCurrent(void* context) {
    return call("cuCtxSetCurrent", Needs::driver, [&](Simulation& device) {
        if (context != nullptr && !device.is_retained(number(context))) {
            return invalid_context;
        }
        current = number(context);
        return 0;
    });
}

int cuCtxGetCurrent(void** context) {
    return call("cuCtxGetCurrent", Needs::driver, [&](Simulation&) { return *context = reinterpret_cast<void*>(current), 0; });
}

int cuThreadExchangeStreamCaptureMode(int* exchanged) {
    return call("cuThreadExchangeStreamCaptureMode", Needs::driver,
                [&](Simulation&) { return std::swap(*exchanged, mode), 0; });
}

int cuStreamCreate(void** stream, unsigned flags) {
    return call("cuStreamCreate", Needs::context, [&](Simulation& device) {
        if (flags > 1) {
            return invalid_value;
        }
        Handle made = std::exchange(device.next_stream, 0);
        if (made == 0) {
            made = device.new_handle();
        } else if (const auto found = device.streams.find(made); found != device.streams.end() && !found->second.closed) {
            device.violate("cuStreamCreate: a stream that exists has the handle that it is to return");
            return invalid_value;
        }
        device.vacate(made);
        device.streams.try_emplace(made);
        device.streams[made].context = current;
        device.streams[made].blocking = flags == 0;
        device.streams[made].id = device.new_handle();
        *stream = reinterpret_cast<void*>(made);
        return 0;
    });
}

int cuStreamDestroy_v2(void* handle) {
    return call_stream("cuStreamDestroy_v2", handle, [&](Simulation& device, Stream& stream) {
        if (handle == nullptr) {
            return invalid_handle;
        }
        stream.closed = true;  // its work is done all the same
        if (stream.queue.empty() && !stream.worker.joinable()) {
            device.streams.erase(number(handle));
        }
        return 0;
    });
}

int cuStreamWaitEvent(void* handle, void* event_handle, unsigned) {
    return call_event("cuStreamWaitEvent", Needs::context, event_handle, [&](Simulation& device, Event& event) {
        Stream* const stream = device.find_stream(handle, "cuStreamWaitEvent");
        if (stream == nullptr || event.last == nullptr) {
            return stream == nullptr ? invalid_handle : 0;
        }
        // Any context will do, because the event and the stream may belong to different devices.
        const int result = device.queue("cuStreamWaitEvent", handle, stream->context, {.kind = Kind::wait, .mark = event.last});
        return result == 0 && handle == nullptr && device.host_computes ? device.run_until(event.last) : result;
    });
}

int cuStreamIsCapturing(void* handle, int* status) {
    return call_stream("cuStreamIsCapturing", handle, [&](Simulation& device, Stream& stream) {
        for (const auto& [other, one] : device.streams) {
            if (handle == nullptr && other != 0 && one.capturing && one.blocking) {
                return capture_implicit;
            }
        }
        *status = stream.capturing ? (stream.spoiled ? 2 : 1) : 0;
        return 0;
    });
}

int cuStreamGetId(void* handle, unsigned long long* id) {
    return call_stream("cuStreamGetId", handle, [&](Simulation&, Stream& stream) { return *id = stream.id, 0; });
}

int cuStreamSynchronize(void* stream) {
    return call("cuStreamSynchronize", Needs::no_capture, [&](Simulation& device) {
        const auto mark = std::make_shared<Mark>();
        const int result = device.queue("cuStreamSynchronize", stream, current, {.kind = Kind::record, .mark = mark});
        return result != 0 ? result : device.run_until(mark);
    });
}

int cuEventCreate(void** event, unsigned flags) {
    return call("cuEventCreate", Needs::context, [&](Simulation& device) {
        const Handle made = device.new_handle();
        device.events[made] = {.context = current, .blocking = (flags & 1) != 0, .timed = (flags & 2) == 0};
        *event = reinterpret_cast<void*>(made);
        return 0;
    });
}

int cuEventDestroy_v2(void* handle) {
    return call_event("cuEventDestroy_v2", Needs::context, handle, [&](Simulation& device, Event&) {
        device.events.erase(number(handle));
        return 0;
    });
}

int cuEventRecord(void* handle, void* stream) {
    return call_event("cuEventRecord", Needs::context, handle, [&](Simulation& device, Event& event) {
        auto mark = std::make_shared<Mark>();
        const int result = device.queue("cuEventRecord", stream, event.context, {.kind = Kind::record, .mark = mark});
        if (mark->queued) {
            event.last = std::move(mark);
        }
        return result;
    });
}

int cuEventQuery(void* handle) {
    return call_event("cuEventQuery", Needs::no_capture, handle, [&](Simulation& device, Event& event) {
        if (event.last == nullptr) {
            return 0;
        }
        device.advance(device.dice(3), event.last.get());
        return device.lost != 0 ? device.lost : event.last->passed ? 0 : not_ready;
    });
}

int cuEventSynchronize(void* handle) {
    return call_event("cuEventSynchronize", Needs::no_capture, handle, [&](Simulation& device, Event& event) {
        if (!event.blocking) {
            device.violate("cuEventSynchronize: spins, because the event was made without blocking synchronization");
        }
        return event.last == nullptr ? 0 : device.run_until(event.last);
    });
}

int cuEventElapsedTime(float* milliseconds, void* from, void* to) {
    return call("cuEventElapsedTime", Needs::context, [&](Simulation& device) {
        const Event* const first = device.find_event(from, "cuEventElapsedTime");
        const Event* const last = device.find_event(to, "cuEventElapsedTime");
        if (first == nullptr || last == nullptr || !first->timed || !last->timed || !first->last || !last->last) {
            return invalid_handle;
        }
        if (!first->last->passed || !last->last->passed) {
            return not_ready;
        }
        *milliseconds = static_cast<float>((last->last->time - first->last->time) * (1 + device.fast) * 1e3);
        return 0;
    });
}

int cuMemcpyHtoDAsync_v2(std::uint64_t target, const void* source, std::size_t nbytes, void* stream) {
    return call("cuMemcpyHtoDAsync_v2", Needs::context, [&](Simulation& device) {
        check_locked(device, "cuMemcpyHtoDAsync_v2", source, nbytes);
        return queue_copy(device, "cuMemcpyHtoDAsync_v2", stream, reinterpret_cast<void*>(target), source, nbytes);
    });
}

int cuMemcpyBatchAsync(std::uint64_t* targets, std::uint64_t* sources, std::size_t* sizes, std::size_t count,
                       const int* attributes, const std::size_t* firsts, std::size_t attribute_count, std::size_t*,
                       void* stream) {
    return call("cuMemcpyBatchAsync", Needs::context, [&](Simulation& device) {
        const bool in_stream_order = attribute_count == 1 && firsts[0] == 0 && attributes[0] == 1;
        if (count == 0 || stream == nullptr || !in_stream_order) {
            return invalid_value;
        }
        for (std::size_t index = count; index-- > 0;) {  // the order among them is not defined
            auto* const target = reinterpret_cast<void*>(targets[index]);
            const auto* const source = reinterpret_cast<const void*>(sources[index]);
            check_locked(device, "cuMemcpyBatchAsync", device.is_locked(target, sizes[index]) ? target : source, sizes[index]);
            if (const int result = queue_copy(device, "cuMemcpyBatchAsync", stream, target, source, sizes[index])) {
                return result;
            }
        }
        return 0;
    });
}

int cuMemcpyDtoHAsync_v2(void* target, std::uint64_t source, std::size_t nbytes, void* stream) {
    return call("cuMemcpyDtoHAsync_v2", Needs::context, [&](Simulation& device) {
        check_locked(device, "cuMemcpyDtoHAsync_v2", target, nbytes);
        return queue_copy(device, "cuMemcpyDtoHAsync_v2", stream, target, reinterpret_cast<void*>(source), nbytes);
    });
}

int cuMemcpyDtoDAsync_v2(std::uint64_t target, std::uint64_t source, std::size_t nbytes, void* stream) {
    return call("cuMemcpyDtoDAsync_v2", Needs::context, [&](Simulation& device) {
        if (source < target + nbytes && target < source + nbytes) {
            device.violate("cuMemcpyDtoDAsync_v2: the ranges overlap");
            return invalid_value;
        }
        return queue_copy(device, "cuMemcpyDtoDAsync_v2", stream, reinterpret_cast<void*>(target),
                          reinterpret_cast<void*>(source), nbytes);
    });
}

int cuMemsetD16Async(std::uint64_t target, unsigned short value, std::size_t count, void* stream) {
    return call("cuMemsetD16Async", Needs::context, [&](Simulation& device) {
        if (target % 2 != 0) {
            return invalid_value;
        }
        return device.queue(
            "cuMemsetD16Async", stream, current,
            {.kind = Kind::fill, .target = reinterpret_cast<char*>(target), .nbytes = 2 * count, .value = value});
    });
}

int cuMemHostRegister_v2(void* memory, std::size_t nbytes, unsigned) {
    return call("cuMemHostRegister_v2", Needs::no_capture, [&](Simulation& device) {
        const auto* const first = static_cast<const char*>(memory);
        if (nbytes == 0 || number(memory) % 4096 != 0) {
            return invalid_value;
        }
        for (const auto& [other, size] : device.locked) {
            if (other < first + nbytes && first < other + size) {
                return already_locked;
            }
        }
        if (total(device.locked) + nbytes > device.locked_limit) {
            return out_of_memory;
        }
        device.locked[first] = nbytes;
        return 0;
    });
}

int cuMemHostUnregister(void* memory) {
    return call("cuMemHostUnregister", Needs::no_capture, [&](Simulation& device) {
        const auto found = device.locked.find(static_cast<const char*>(memory));
        if (found == device.locked.end()) {
            device.violate("cuMemHostUnregister: memory that is not page-locked");
            return not_locked;
        }
        if (device.touched(found->first, found->second)) {
            device.violate("cuMemHostUnregister: copies of this memory are queued");
        }
        device.locked.erase(found);
        return 0;
    });
}

int cuMemAlloc_v2(std::uint64_t* memory, std::size_t nbytes) {
    return call("cuMemAlloc_v2", Needs::no_capture, [&](Simulation& device) {
        if (nbytes == 0 || total(device.allocated) + nbytes > device.device_limit) {
            return nbytes == 0 ? invalid_value : out_of_memory;
        }
        *memory = number(std::aligned_alloc(512, (nbytes + 511) / 512 * 512));
        device.allocated[*memory] = nbytes;
        return 0;
    });
}

int cuMemFree_v2(std::uint64_t memory) {
    return call("cuMemFree_v2", Needs::no_capture, [&](Simulation& device) {
        const auto found = device.allocated.find(memory);
        if (found == device.allocated.end()) {
            device.violate("cuMemFree_v2: memory that is not allocated");
            return invalid_value;
        }
        if (device.touched(reinterpret_cast<const char*>(memory), found->second)) {
            // CUDA would block the caller; here the work fails later, which the sanitizers see.
            device.violate("cuMemFree_v2: work with this memory is queued");
        }
        std::free(reinterpret_cast<void*>(memory));
        device.allocated.erase(found);
        return 0;
    });
}

int cuMemGetInfo_v2(std::size_t* free, std::size_t* all) {
    return call("cuMemGetInfo_v2", Needs::context, [&](Simulation& device) {
        *all = device.device_limit;
        *free = device.device_limit - total(device.allocated);
        return 0;
    });
}

void fakeReset(std::uint64_t seed, int policy) { simulation().reset(seed, static_cast<Policy>(policy)); }

int fakeLaunch(void* stream, void (*kernel)(void*), void* data, double seconds) {
    return call("fakeLaunch", Needs::context, [&](Simulation& device) {
        return device.queue("fakeLaunch", stream, current,
                            {.kind = Kind::kernel, .function = kernel, .data = data, .seconds = seconds});
    });
}

std::uint64_t fakeAdvance(std::uint64_t count) {
    const std::lock_guard lock(simulation().mutex);
    return simulation().advance(count, nullptr);
}

void fakeFailCall(const char* name, std::uint64_t nth, int result) {
    const std::lock_guard lock(simulation().mutex);
    simulation().planned[name] = {nth, result};
}

void fakeSet(int setting, double value) {
    Simulation& device = simulation();
    const std::lock_guard lock(device.mutex);
    switch (setting) {
        case fake_device_limit:
            device.device_limit = static_cast<std::size_t>(value);
            break;
        case fake_locked_limit:
            device.locked_limit = static_cast<std::size_t>(value);
            break;
        case fake_split_bytes:
            device.split_bytes = static_cast<std::size_t>(value);
            break;
        case fake_copies_until_failure:
            device.copies_until_failure = static_cast<std::uint64_t>(value);
            break;
        case fake_devices:
            device.devices = static_cast<int>(value);
            break;
        case fake_version:
            device.version = static_cast<int>(value);
            break;
        case fake_rate:
            device.rate = value;
            break;
        case fake_host_time:
            device.host_time = value;
            break;
        case fake_host_computes:
            device.host_computes = value != 0;
            break;
        case fake_fast_clock:
            device.fast = value;
            break;
        case fake_next_stream:
            device.next_stream = static_cast<std::uint64_t>(value);
            break;
        case fake_real_time_rate:
            device.rate = value, device.serve_in_real_time();
            break;
        default:
            std::abort();
    }
}

int fakeCapture(void* handle, int begin) {
    const std::lock_guard lock(simulation().mutex);
    Stream* const stream = simulation().find_stream(handle, "fakeCapture");
    if (stream == nullptr || stream->capturing == (begin != 0)) {
        return invalid_handle;
    }
    stream->capturing = begin != 0;
    return std::exchange(stream->spoiled, false) ? 901 : 0;
}

std::uint64_t fakeCalls(const char* name) {
    const std::lock_guard lock(simulation().mutex);
    std::uint64_t sum = 0;
    for (const auto& [called, count] : simulation().calls) {
        sum += std::strcmp(called, name) == 0 ? count : 0;
    }
    return sum;
}

std::uint64_t fakeViolations(char* text, std::size_t size) {
    const std::lock_guard lock(simulation().mutex);
    std::string all;
    for (const auto& one : simulation().violations) {
        all += one + "\n";
    }
    if (size > 0) {
        std::strncpy(text, all.c_str(), size - 1)[size - 1] = '\0';
    }
    return simulation().violations.size();
}
}
