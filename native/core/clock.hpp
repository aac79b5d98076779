// Monotonic time for deadlines, and wall-clock time for expiries.
#pragma once

#include <time.h>

#include <cstdint>

namespace farpool {

// Seconds on the clock of Python's time.monotonic, in which deadlines are given.
inline double monotonic_seconds() noexcept {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Milliseconds since 1970, in which expiries are given.
inline std::uint64_t now_milliseconds() noexcept {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1000 + static_cast<std::uint64_t>(now.tv_nsec) / 1'000'000;
}

}  // namespace farpool
