#include "device/cuda.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <vector>

#include "core/error.hpp"

namespace farpool::device {

namespace {

constexpr int oldest_version = 11040;
constexpr int batches_since = 12080;
constexpr int stream_id_version = 12000;
constexpr const char* update = "update the NVIDIA driver, or use device='cpu'";

// Number of the Cuda object that this thread has last entered.
thread_local std::uint64_t entered = 0;

std::string version_text(int version) {
    return "CUDA " + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

std::string too_old(int version, const std::string& why) {
    return "the driver is too old (" + version_text(version) + why + "): farpool needs " + version_text(oldest_version) +
           " or newer; " + update;
}

// Errors after which the driver refuses every call of this process.
bool is_lost(int result) {
    static constexpr int results[] = {
        46, 214, 220, 226, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, CUDA_ERROR_CONTEXT_IS_DESTROYED};
    return std::find(std::begin(results), std::end(results), result) != std::end(results);
}

// What a user can do, with a separator before it; empty if we know nothing.
std::string remedy(int result) {
    if (is_lost(result)) {
        return "; the device is lost to this process: restart the process";
    }
    switch (result) {
        case CUDA_ERROR_NOT_INITIALIZED:
            return "; a forked process cannot use CUDA: start it with multiprocessing's method 'spawn'";
        case CUDA_ERROR_DEINITIALIZED:
            return "; the process is ending: close the pool before";
        case CUDA_ERROR_NO_DEVICE:
            return "; check nvidia-smi and CUDA_VISIBLE_DEVICES, or use device='cpu'";
        case CUDA_ERROR_SYSTEM_DRIVER_MISMATCH:
            return "; restart the machine, because its driver was updated while it ran";
        default:
            break;
    }
    if (result >= CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED && result <= CUDA_ERROR_CAPTURED_EVENT + 1) {
        return "; a CUDA graph is being captured: capture with capture_error_mode='thread_local'";
    }
    return {};
}

std::uint64_t next_number() {
    static std::atomic<std::uint64_t> last = 0;
    return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

CudaLibrary::CudaLibrary(const std::string& path) : path_(path), handle_(dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) {
    if (handle_ == nullptr) {
        const char* why = dlerror();
        fail_tier("cuda", "no CUDA driver (" + std::string(why == nullptr ? path : why) +
                              "): install the NVIDIA driver, or use device='cpu'");
    }
}

void* CudaLibrary::find_if_there(const char* name) const { return dlsym(handle_, name); }

void* CudaLibrary::find(const char* name) const {
    if (void* found = find_if_there(name)) {
        return found;
    }
    int version = 0;
    auto* const ask = reinterpret_cast<int (*)(int*)>(dlsym(handle_, "cuDriverGetVersion"));
    if (ask == nullptr || ask(&version) != CUDA_SUCCESS) {
        fail_tier("cuda", path_ + " is no CUDA driver: it has no " + name + "; " + update);
    }
    fail_tier("cuda", too_old(version, std::string(", without ") + name));
}

Cuda::Cuda(int index, const std::string& library) : driver_(library), number_(next_number()) {
    int version = 0;
    run(driver_.driver_version, &version);
    if (version < oldest_version) {
        fail_tier("cuda", too_old(version, ""));
    }
    batches_ = version >= batches_since && driver_.copy_batch.function != nullptr;
    if (version >= stream_id_version) {
        stream_id_.emplace(driver_.library, "cuStreamGetId");
    }
    run(driver_.init, 0U);
    int count = 0;
    run(driver_.device_count, &count);
    if (index < 0 || index >= count) {
        fail_tier("cuda", "there is no device " + std::to_string(index) + ": this process sees " + std::to_string(count) +
                              (count == 1 ? " device" : " devices") + ", counted from 0; check CUDA_VISIBLE_DEVICES");
    }
    run(driver_.device_get, &device_, index);
    run(driver_.context_retain, &context_, device_);
}

Cuda::~Cuda() {
    if (ours()) {
        driver_.context_release(device_);
    }
}

void Cuda::enter() {
    if (entered == number_) {
        return;
    }
    prepare();
}

int Cuda::prepare() {
    int mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    run(driver_.context_set, context_);
    run(driver_.exchange_capture_mode, &mode);
    entered = number_;
    return mode;
}

void* Cuda::attach() {
    void* current = nullptr;
    run(driver_.context_get, &current);
    if (current == context_) {
        return nullptr;
    }
    run(driver_.context_set, context_);
    return current;  // null if there was none: then this one stays, as if the program had used the device before
}

void Cuda::detach(void* before) noexcept {
    if (before != nullptr) {
        driver_.context_set(before);
    }
}

Cuda::Entered::Entered(Cuda& device) : device_(device), entered_(entered) {
    device.run(device.driver_.context_get, &context_);
    try {
        mode_ = device.prepare();
    } catch (...) {
        device.driver_.context_set(context_);
        throw;
    }
}

Cuda::Entered::~Entered() {
    // If the device was lost since then, it refuses these calls; the program learns of that at its next call.
    device_.driver_.exchange_capture_mode(&mode_);
    device_.driver_.context_set(context_);
    entered = entered_;
}

Stream Cuda::make_stream() {
    Stream stream = nullptr;
    // Blocking streams would wait for all work of the program on the default stream, and the program's for theirs.
    run(driver_.stream_create, &stream, CU_STREAM_NON_BLOCKING);
    return stream;
}

void Cuda::end_stream(Stream stream) noexcept {
    if (ours()) {
        driver_.stream_destroy(stream);
    }
}

Event Cuda::make_event() {
    Event event = nullptr;
    run(driver_.event_create, &event, CU_EVENT_BLOCKING_SYNC);
    return event;
}

void Cuda::end_event(Event event) noexcept {
    if (ours()) {
        driver_.event_destroy(event);
    }
}

void Cuda::record(Event event, Stream stream) { run(driver_.event_record, event, stream); }

void Cuda::wait(Stream stream, Event event) { run(driver_.stream_wait, stream, event, 0U); }

bool Cuda::passed(Event event) {
    const int result = driver_.event_query(event);
    if (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY) {
        refuse(driver_.event_query.name, result);
    }
    return result == CUDA_SUCCESS;
}

void Cuda::synchronize(Event event) { run(driver_.event_synchronize, event); }

double Cuda::elapsed(Event from, Event to) {
    float milliseconds = 0;
    run(driver_.event_elapsed, &milliseconds, from, to);
    return static_cast<double>(milliseconds) * 1e-3;
}

void Cuda::copy_in(Stream stream, std::uintptr_t target, const void* source, std::size_t nbytes) {
    run(driver_.copy_in, target, source, nbytes, stream);
}

void Cuda::copy_out(Stream stream, void* target, std::uintptr_t source, std::size_t nbytes) {
    run(driver_.copy_out, target, source, nbytes, stream);
}

void Cuda::copy_within(Stream stream, std::uintptr_t target, std::uintptr_t source, std::size_t nbytes) {
    run(driver_.copy_within, target, source, nbytes, stream);
}

void Cuda::copy_all(Stream stream, bool in, std::span<const HostCopy> copies) {
    if (!batches_ || copies.size() < 2) {
        Device::copy_all(stream, in, copies);
        return;
    }
    std::vector<std::uint64_t> targets;
    std::vector<std::uint64_t> sources;
    std::vector<std::size_t> sizes;
    for (const HostCopy& copy : copies) {
        targets.push_back(in ? copy.place : copy.host);
        sources.push_back(in ? copy.host : copy.place);
        sizes.push_back(copy.nbytes);
    }
    CUmemcpyAttributes attributes;
    std::size_t first = 0;  // of the copies that have these attributes: all
    std::size_t refused = 0;
    const int result = driver_.copy_batch(targets.data(), sources.data(), sizes.data(), sizes.size(), &attributes, &first,
                                          std::size_t{1}, &refused, stream);
    if (result == CUDA_ERROR_NOT_SUPPORTED) {  // a GPU may have no batches although its driver has, such as a virtual one
        batches_ = false;
        Device::copy_all(stream, in, copies);
    } else if (result != CUDA_SUCCESS) {
        refuse(driver_.copy_batch.name, result);
    }
}

void Cuda::fill(Stream stream, std::uintptr_t target, std::uint16_t value, std::size_t count) {
    run(driver_.fill, target, value, count, stream);
}

bool Cuda::capturing(Stream stream) {
    int status = CU_STREAM_CAPTURE_STATUS_NONE;
    const int result = driver_.stream_capturing(stream, &status);
    if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) {
        return true;  // the default stream, while a stream that waits for it is being captured
    }
    if (result != CUDA_SUCCESS) [[unlikely]] {
        refuse(driver_.stream_capturing.name, result);
    }
    return status != CU_STREAM_CAPTURE_STATUS_NONE;
}

std::uint64_t Cuda::stream_id(Stream stream) {
    unsigned long long id = 0;
    if (stream_id_) {
        run(*stream_id_, stream, &id);
    }
    return id;
}

void Cuda::lock_pages(void* memory, std::size_t nbytes) {
    const int result = driver_.host_register(memory, nbytes, CU_MEMHOSTREGISTER_PORTABLE);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        refuse(driver_.host_register.name, result,
               "the system page-locks no further " + std::to_string(nbytes) +
                   " bytes: use less host memory, or raise the memory limit of the container or `ulimit -l`");
    }
    if (result != CUDA_SUCCESS) {
        refuse(driver_.host_register.name, result, "page-locking " + std::to_string(nbytes) + " bytes of host memory");
    }
}

void Cuda::unlock_pages(void* memory) noexcept {
    if (ours()) {
        driver_.host_unregister(memory);
    }
}

std::uintptr_t Cuda::allocate(std::size_t nbytes) {
    std::uint64_t memory = 0;
    const int result = driver_.allocate(&memory, nbytes);
    if (result == CUDA_ERROR_OUT_OF_MEMORY) {
        refuse(driver_.allocate.name, result,
               "the device has no room for " + std::to_string(nbytes) + " bytes" + free_memory() +
                   ": lower the budget, or end other programs on this device");
    }
    if (result != CUDA_SUCCESS) {
        refuse(driver_.allocate.name, result, "allocating " + std::to_string(nbytes) + " bytes on the device");
    }
    return memory;
}

void Cuda::free(std::uintptr_t memory) noexcept {
    if (ours()) {
        driver_.free(memory);
    }
}

std::string Cuda::free_memory() const {
    std::size_t free = 0;
    std::size_t total = 0;
    if (driver_.memory_info(&free, &total) != CUDA_SUCCESS) {
        return {};
    }
    return " (" + std::to_string(free) + " of its " + std::to_string(total) + " are free)";
}

void Cuda::refuse(const char* call, int result, const std::string& doing) const {
    const char* name = nullptr;
    const char* text = nullptr;
    std::string what = std::string(call) + ": error " + std::to_string(result);
    if (driver_.error_name(result, &name) == CUDA_SUCCESS && name != nullptr) {
        what += std::string(" ") + name;
    }
    if (driver_.error_text(result, &text) == CUDA_SUCCESS && text != nullptr) {
        what += std::string(" (") + text + ")";
    }
    fail_tier("cuda", what + (doing.empty() ? "" : ", " + doing) + remedy(result));
}

std::shared_ptr<Cuda> open_cuda(int index, const std::string& library) { return std::make_shared<Cuda>(index, library); }

}  // namespace farpool::device
