// Page-locked host memory through which a device copies from and to tiers whose own memory is not page-locked.
//
// The last bytes are kept for an urgent chunk, as less urgent transfers at a slow tier may hold all others for long. Memory for
// only one chunk is for all.
#pragma once

#include <memory>

#include "core/extent_allocator.hpp"
#include "device/jobs.hpp"
#include "device/locked_memory.hpp"

namespace farpool::device {

class Staging {
public:
    // `chunk`: bytes of the largest chunk.
    Staging(std::shared_ptr<Device> device, std::size_t nbytes, std::size_t chunk);
    // Gives a chunk memory, and its parts their addresses there; false if there is none now.
    bool take(Chunk& chunk);
    // Takes a chunk's memory back, if it has any.
    void give_back(Chunk& chunk) noexcept;
    // Unlocks and unmaps the memory; no chunk may have any.
    void release() noexcept { memory_.release(); }

private:
    LockedMemory memory_;
    ExtentAllocator extents_;
    std::int64_t kept_;  // offset of the memory for an urgent chunk; -1 if there is none or a chunk has it
    const std::int64_t kept_at_;
};

}  // namespace farpool::device
