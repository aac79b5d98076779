// The clocks.
#pragma once

#include <time.h>

#include <cstdint>

namespace farpool {

// On the clock of Python's time.monotonic, in which deadlines are given.
inline double monotonic_seconds() noexcept {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

// Since 1970, as expiries are given.
inline std::uint64_t now_milliseconds() noexcept {
    timespec now{};
    clock_gettime(CLOCK_REALTIME, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1000 + static_cast<std::uint64_t>(now.tv_nsec) / 1'000'000;
}

}  // namespace farpool
