// Keeps a node alive when a client truncates a segment file that the node has mapped.
//
// A program that may write a file may truncate it, and an access to a missing page ends a process by SIGBUS. In a thread that
// has a guard, zeros replace the missing page and all pages after it in the mapping: their content is damaged, as if a program
// had overwritten it.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farpool {

class BusGuard {
public:
    BusGuard() noexcept;
    ~BusGuard();
    BusGuard(const BusGuard&) = delete;
    BusGuard& operator=(const BusGuard&) = delete;
};

// Registers a mapping of a file with the guards, as long as this object exists.
class GuardedRange {
public:
    GuardedRange() = default;
    GuardedRange(const void* begin, std::size_t nbytes);
    GuardedRange(GuardedRange&& other) noexcept;
    GuardedRange& operator=(GuardedRange&& other) noexcept;
    ~GuardedRange();

    // True if zeros have replaced a part of the mapping. That is permanent, even if the file has its old length again.
    bool was_cut() const;

private:
    std::uintptr_t begin_ = 0;
};

}  // namespace farpool
