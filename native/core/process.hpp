// Tells a process from the one that it was forked from, without a call to the system: each access to a pool asks.
#pragma once

#include <cstdint>

namespace farpool {

// Counts the forks between this process and the one that loaded this library. `fork` counts; a bare `clone` does not.
std::uint32_t forks() noexcept;

}  // namespace farpool
