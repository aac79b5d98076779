// Seconds on the clock of Python's time.monotonic, in which deadlines are given.
#pragma once

#include <time.h>

namespace farpool {

inline double monotonic_seconds() noexcept {
    timespec now{};
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

}  // namespace farpool
