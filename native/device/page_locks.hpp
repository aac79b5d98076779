// Page-locking of tiers' memory, so that a device copies directly from and to that memory, without staging.
//
// Locking is slow, because the operating system first gives each page physical memory. So a thread locks chunk by chunk from
// the start of a tier's space, up to the last byte that a transfer has used. Until a chunk is locked, its bytes are copied
// through staging memory, so no transfer waits for the locking. Memory that is never used is never locked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "core/port.hpp"
#include "device/device.hpp"

namespace farpool::device {

// A range of host memory inside one locked chunk: a copy must not cross from one locked range into another.
struct HostPart {
    std::uintptr_t address;
    std::size_t nbytes;
    bool operator==(const HostPart&) const = default;
};

// A tier's space, and its bytes that are locked. `refused` is the reason for which the rest will not be locked; it is empty as
// long as nothing was refused.
struct SpaceLocks {
    std::string name;
    std::size_t nbytes;
    std::size_t locked;
    std::string refused;
};

// For any thread. No call waits for the device, except `close`. In a forked child nothing is locked, whatever its parent has
// locked, and no call does anything.
class PageLocks {
public:
    // A chunk that would raise what all objects of this process have locked above `most` bytes is refused. `chunk` is a
    // multiple of the page size. A larger chunk delays other threads longer that allocate or free memory of the process.
    PageLocks(std::shared_ptr<Device> device, std::size_t chunk, std::size_t most);
    // Unlocks nothing if `close` has not succeeded: the device may still use the memory. A device cannot be told to forget it.
    ~PageLocks();
    PageLocks(const PageLocks&) = delete;
    PageLocks& operator=(const PageLocks&) = delete;

    // Declares that the offsets of a port are `nbytes` bytes of memory from this address on, a page boundary, and that the port
    // does nothing but copy them. The memory must stay mapped until `close` has succeeded.
    void add(Port* port, std::uintptr_t address, std::size_t nbytes, std::string name);
    // Appends the parts of a port's bytes. False if they are not all locked: nothing is appended, and the thread is asked to
    // lock the space up to the last of them. Also false for a port that was not added.
    bool parts(Port* port, std::uint64_t offset, std::size_t nbytes, std::vector<HostPart>& parts);
    // Stops the locking and unlocks everything; no copy may be under way. False, and nothing is unlocked, if the device still
    // locks a chunk after `seconds`; the call may be repeated.
    bool close(double seconds);
    // In the order in which the spaces were added.
    std::vector<SpaceLocks> totals() const;

    // Bytes that all objects of this process have locked.
    static std::size_t locked_in_process() noexcept;

private:
    class Worker;
    std::unique_ptr<Worker> worker_;
};

}  // namespace farpool::device
