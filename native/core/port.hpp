// The interface through which native threads read from and write to a tier.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/error.hpp"

namespace farpool {

// Reads and writes bytes of one tier. Both calls block, may run on any thread, are entered without the interpreter lock and
// throw PortFailure.
class Port {
public:
    virtual ~Port() = default;
    virtual void read(std::uint64_t offset, void* into, std::size_t nbytes) = 0;
    virtual void write(std::uint64_t offset, const void* from, std::size_t nbytes) = 0;
    // Number of transfers in one direction that are worth running at the same time.
    virtual unsigned concurrency() const noexcept { return 1; }
    // True if a transfer is only a copy in memory, which never waits. A small copy takes less time than handing it to another
    // thread, so the thread that waits for it may make it itself.
    virtual bool copies() const noexcept { return false; }
};

}  // namespace farpool
