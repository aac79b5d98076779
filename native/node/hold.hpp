// Shared by the source files of Server: its lock, and durations.
#pragma once

#include <algorithm>
#include <chrono>
#include <mutex>

#include "node/bus_guard.hpp"
#include "node/peer.hpp"

namespace farpool {

inline Clock::duration seconds(double value) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(value, 1e9)));
}

// The server's mutex and a bus guard, held together: exclusive state, and no client can end the process by truncating a file.
class Hold {
public:
    explicit Hold(std::mutex& mutex) : lock_(mutex) {}

private:
    const std::lock_guard<std::mutex> lock_;
    const BusGuard guard_;
};

}  // namespace farpool
