// The native end of a tier.
#pragma once

#include <cstddef>
#include <cstdint>

#include "error.hpp"

namespace farpool {

// Both calls block, may run on any thread, never hold the interpreter lock on entry and throw PortFailure.
class Port {
public:
    virtual ~Port() = default;
    virtual void read(std::uint64_t offset, void* into, std::size_t nbytes) = 0;
    virtual void write(std::uint64_t offset, const void* from, std::size_t nbytes) = 0;
    // How many transfers in one direction are worth having under way at once.
    virtual unsigned concurrency() const noexcept { return 1; }
    // Whether a transfer is nothing but a copy in memory, which never waits: a small one is made sooner than handed to another
    // thread, so the thread that waits for it may make it itself.
    virtual bool copies() const noexcept { return false; }
};

}  // namespace farpool
