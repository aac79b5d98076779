// Keeps a node alive when a client has cut a segment file off that the node has mapped.
//
// Who may write a file may shorten it, and a look at what is gone ends a process by SIGBUS. In a thread that has a guard, zeros take
// the place of the missing page and of what follows it in the mapping: what was there is damaged, as if it had been overwritten.
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

// A mapping of a file, while it is known to the guards.
class GuardedRange {
public:
    GuardedRange() = default;
    GuardedRange(const void* begin, std::size_t nbytes);
    GuardedRange(GuardedRange&& other) noexcept;
    GuardedRange& operator=(GuardedRange&& other) noexcept;
    ~GuardedRange();

    // Whether zeros have taken the place of some of it: the file is as it was again perhaps, and this mapping is not.
    bool was_cut() const;

private:
    std::uintptr_t begin_ = 0;
};

}  // namespace farpool
