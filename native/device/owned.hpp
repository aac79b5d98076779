// A stream and memory of a device, which end with their owner or before.
#pragma once

#include <memory>
#include <utility>

#include "device/device.hpp"

namespace farpool::device {

class OwnedStream {
public:
    explicit OwnedStream(std::shared_ptr<Device> device) : device_(std::move(device)), stream_(device_->make_stream()) {}
    OwnedStream(const OwnedStream&) = delete;
    OwnedStream& operator=(const OwnedStream&) = delete;
    ~OwnedStream() { end(); }
    Stream get() const noexcept { return stream_; }
    // The work that is queued on it goes on.
    void end() noexcept {
        if (stream_ != nullptr) {
            device_->end_stream(std::exchange(stream_, nullptr));
        }
    }

private:
    std::shared_ptr<Device> device_;
    Stream stream_;
};

class OwnedMemory {
public:
    OwnedMemory(std::shared_ptr<Device> device, std::size_t nbytes)
        : device_(std::move(device)), address_(device_->allocate(nbytes)) {}
    OwnedMemory(const OwnedMemory&) = delete;
    OwnedMemory& operator=(const OwnedMemory&) = delete;
    ~OwnedMemory() { end(); }
    std::uintptr_t address() const noexcept { return address_; }
    void end() noexcept {
        if (address_ != 0) {
            device_->free(std::exchange(address_, 0));
        }
    }

private:
    std::shared_ptr<Device> device_;
    std::uintptr_t address_;
};

}  // namespace farpool::device
