// Page-locked host memory through which a device copies from and to tiers whose own memory is not page-locked.
#pragma once

#include <memory>

#include "core/extent_allocator.hpp"
#include "device/jobs.hpp"
#include "device/locked_memory.hpp"

namespace farpool::device {

class Staging {
public:
    Staging(std::shared_ptr<Device> device, std::size_t nbytes);
    // Gives a chunk memory, and its parts their addresses there; false if there is none now.
    bool take(Chunk& chunk);
    // Takes a chunk's memory back, if it has any.
    void give_back(Chunk& chunk);
    // Unlocks and unmaps the memory; no chunk may have any.
    void release() noexcept { memory_.release(); }

private:
    LockedMemory memory_;
    ExtentAllocator extents_;
};

}  // namespace farpool::device
