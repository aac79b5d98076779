// A CUDA device, through the driver's own interface.
//
// All calls use the device's primary context, which is the one that torch uses, so streams, events and addresses of torch can
// be given to them. The context is retained until the end of this object.
//
// A thread of the program has the context of the device that it used last. `attach` asks for it, and changes it if need be.
// `record`, `wait`, `capturing` and `stream_id` are on the program's hot path: they are one call of the driver each, without
// `enter`, and a capture permits them. All other calls on a thread of the program belong into the life of a Cuda::Entered.
#pragma once

#include <unistd.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>

#include "device/cuda_driver.hpp"
#include "device/device.hpp"

namespace farpool::device {

class Cuda : public Device {
public:
    // Prepares a thread of the program for all calls, and at the end gives it back the context and the capture mode that it
    // had. (The mode that `enter` sets would hide a forbidden call of the program in its own capture.)
    class Entered {
    public:
        explicit Entered(Cuda& device);
        Entered(const Entered&) = delete;
        Entered& operator=(const Entered&) = delete;
        ~Entered();

    private:
        Cuda& device_;
        std::uint64_t entered_;
        void* context_ = nullptr;
        int mode_ = 0;
    };

    // Throws PortFailure (tier) if there is no driver, the driver is too old, or it has no device of this index.
    Cuda(int index, const std::string& library);
    ~Cuda() override;

    void enter() override;
    void* attach() override;
    void detach(void* before) noexcept override;

    Stream make_stream() override;
    void end_stream(Stream stream) noexcept override;
    Event make_event() override;
    void end_event(Event event) noexcept override;

    void record(Event event, Stream stream) override;
    void wait(Stream stream, Event event) override;
    bool passed(Event event) override;
    void synchronize(Event event) override;
    double elapsed(Event from, Event to) override;

    void copy_in(Stream stream, std::uintptr_t target, const void* source, std::size_t nbytes) override;
    void copy_out(Stream stream, void* target, std::uintptr_t source, std::size_t nbytes) override;
    void copy_within(Stream stream, std::uintptr_t target, std::uintptr_t source, std::size_t nbytes) override;
    void copy_all(Stream stream, bool in, std::span<const HostCopy> copies) override;
    void fill(Stream stream, std::uintptr_t target, std::uint16_t value, std::size_t count) override;
    bool capturing(Stream stream) override;
    std::uint64_t stream_id(Stream stream) override;

    void lock_pages(void* memory, std::size_t nbytes) override;
    void unlock_pages(void* memory) noexcept override;
    std::uintptr_t allocate(std::size_t nbytes) override;
    void free(std::uintptr_t memory) noexcept override;

private:
    // Prepares the calling thread for all calls, and returns the capture mode that it had.
    int prepare();
    template <typename... Parameters, typename... Arguments>
    void run(const CudaCall<Parameters...>& call, Arguments... arguments) const {
        if (const int result = call(arguments...); result != CUDA_SUCCESS) [[unlikely]] {
            refuse(call.name, result);
        }
    }
    // Throws the error of a call; `doing` says what the call was for, if its name does not.
    [[noreturn]] void refuse(const char* call, int result, const std::string& doing = {}) const;
    std::string free_memory() const;

    // False in a child forked from the process, which must not call the driver: there nothing is given back.
    bool ours() const noexcept { return getpid() == owner_; }

    CudaDriver driver_;
    const pid_t owner_ = getpid();
    const std::uint64_t number_;  // of all Cuda objects of this process, so that a thread knows which one it has entered
    std::optional<CudaCall<void*, unsigned long long*>> stream_id_;  // drivers of CUDA 12 and later have it
    int device_ = 0;
    std::atomic<bool> batches_ = false;  // the driver queues several copies at once
    void* context_ = nullptr;
};

std::shared_ptr<Cuda> open_cuda(int index, const std::string& library = "libcuda.so.1");

}  // namespace farpool::device
