// Page-locked host memory, which a device copies from and to.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/memory.hpp"
#include "device/device.hpp"

namespace farpool::device {

// Page-locks memory from a page boundary on, and excludes it from the address space of forked children. Throws PortFailure.
void lock_memory(Device& device, void* memory, std::size_t nbytes);
void unlock_memory(Device& device, void* memory, std::size_t nbytes) noexcept;

// Memory that is page-locked while this lives, or until `release`.
class LockedMemory {
public:
    LockedMemory(std::shared_ptr<Device> device, std::size_t nbytes);
    ~LockedMemory() { release(); }
    LockedMemory(const LockedMemory&) = delete;
    LockedMemory& operator=(const LockedMemory&) = delete;

    void release() noexcept;
    std::uintptr_t address() const noexcept { return reinterpret_cast<std::uintptr_t>(memory_.data()); }

private:
    std::shared_ptr<Device> device_;
    Memory memory_;
};

}  // namespace farpool::device
