// The functions of the CUDA driver that farpool uses, from a library that is opened at run time: a build needs no CUDA.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace farpool::device {

// Results, flags and modes of the driver, by the names that CUDA's documentation has for them.
enum CudaResult : int {
    CUDA_SUCCESS = 0,
    CUDA_ERROR_OUT_OF_MEMORY = 2,
    CUDA_ERROR_NOT_INITIALIZED = 3,
    CUDA_ERROR_DEINITIALIZED = 4,
    CUDA_ERROR_NO_DEVICE = 100,
    CUDA_ERROR_NOT_READY = 600,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_NOT_SUPPORTED = 801,
    CUDA_ERROR_SYSTEM_DRIVER_MISMATCH = 803,
    CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED = 900,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
};
constexpr unsigned CU_STREAM_NON_BLOCKING = 1;
constexpr unsigned CU_EVENT_BLOCKING_SYNC = 1;
constexpr unsigned CU_MEMHOSTREGISTER_PORTABLE = 1;
constexpr int CU_STREAM_CAPTURE_MODE_RELAXED = 2;
constexpr int CU_STREAM_CAPTURE_STATUS_NONE = 0;
constexpr int CU_MEMCPY_SRC_ACCESS_ORDER_STREAM = 1;

// What copies of a batch have in common.
struct CUmemcpyAttributes {
    int source_order = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    int source_place[2] = {};  // places are hints, for other memory than ours
    int target_place[2] = {};
    unsigned flags = 0;
};

// The driver's library. It stays open until the process ends, because the driver has threads of its own.
class CudaLibrary {
public:
    // Throws PortFailure (tier) if the library cannot be opened.
    explicit CudaLibrary(const std::string& path);
    // Throws PortFailure (tier) if the library has no such function: the driver is too old.
    void* find(const char* name) const;
    // Null if the library has no such function.
    void* find_if_there(const char* name) const;

private:
    std::string path_;
    void* handle_;
};

// One function of the driver, which returns a CudaResult.
template <typename... Parameters>
struct CudaCall {
    CudaCall(const CudaLibrary& library, const char* name)
        : name(name), function(reinterpret_cast<int (*)(Parameters...)>(library.find(name))) {}
    // A function that an older driver does not have.
    CudaCall(const CudaLibrary& library, const char* name, std::nullptr_t)
        : name(name), function(reinterpret_cast<int (*)(Parameters...)>(library.find_if_there(name))) {}
    int operator()(Parameters... arguments) const { return function(arguments...); }

    const char* name;
    int (*function)(Parameters...);
};

// Streams, events and contexts are pointers, devices are numbers, and device memory is an address of 64 bits.
struct CudaDriver {
    explicit CudaDriver(const std::string& path) : library(path) {}

    CudaLibrary library;
    CudaCall<int*> driver_version{library, "cuDriverGetVersion"};
    CudaCall<unsigned> init{library, "cuInit"};
    CudaCall<int, const char**> error_name{library, "cuGetErrorName"};
    CudaCall<int, const char**> error_text{library, "cuGetErrorString"};
    CudaCall<int*> device_count{library, "cuDeviceGetCount"};
    CudaCall<int*, int> device_get{library, "cuDeviceGet"};
    CudaCall<void**, int> context_retain{library, "cuDevicePrimaryCtxRetain"};
    CudaCall<int> context_release{library, "cuDevicePrimaryCtxRelease_v2"};
    CudaCall<void*> context_set{library, "cuCtxSetCurrent"};
    CudaCall<void**> context_get{library, "cuCtxGetCurrent"};
    CudaCall<int*> exchange_capture_mode{library, "cuThreadExchangeStreamCaptureMode"};
    CudaCall<void**, unsigned> stream_create{library, "cuStreamCreate"};
    CudaCall<void*> stream_destroy{library, "cuStreamDestroy_v2"};
    CudaCall<void*, void*, unsigned> stream_wait{library, "cuStreamWaitEvent"};
    CudaCall<void*, int*> stream_capturing{library, "cuStreamIsCapturing"};
    CudaCall<void**, unsigned> event_create{library, "cuEventCreate"};
    CudaCall<void*> event_destroy{library, "cuEventDestroy_v2"};
    CudaCall<void*, void*> event_record{library, "cuEventRecord"};
    CudaCall<void*> event_query{library, "cuEventQuery"};
    CudaCall<void*> event_synchronize{library, "cuEventSynchronize"};
    CudaCall<float*, void*, void*> event_elapsed{library, "cuEventElapsedTime"};
    CudaCall<std::uint64_t, const void*, std::size_t, void*> copy_in{library, "cuMemcpyHtoDAsync_v2"};
    CudaCall<void*, std::uint64_t, std::size_t, void*> copy_out{library, "cuMemcpyDtoHAsync_v2"};
    CudaCall<std::uint64_t, std::uint64_t, std::size_t, void*> copy_within{library, "cuMemcpyDtoDAsync_v2"};
    // Since CUDA 12.8, under this name with the index of a copy that was refused, which `cuMemcpyBatchAsync_v2` has no more.
    CudaCall<std::uint64_t*, std::uint64_t*, std::size_t*, std::size_t, CUmemcpyAttributes*, std::size_t*, std::size_t,
             std::size_t*, void*>
        copy_batch{library, "cuMemcpyBatchAsync", nullptr};
    CudaCall<std::uint64_t, unsigned short, std::size_t, void*> fill{library, "cuMemsetD16Async"};
    CudaCall<void*, std::size_t, unsigned> host_register{library, "cuMemHostRegister_v2"};
    CudaCall<void*> host_unregister{library, "cuMemHostUnregister"};
    CudaCall<std::uint64_t*, std::size_t> allocate{library, "cuMemAlloc_v2"};
    CudaCall<std::uint64_t> free{library, "cuMemFree_v2"};
    CudaCall<std::size_t*, std::size_t*> memory_info{library, "cuMemGetInfo_v2"};
};

}  // namespace farpool::device
