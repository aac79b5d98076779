// What the server's files share: its lock, and durations.
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

// The state is this thread's alone, and no client can end the process by shortening a file.
class Hold {
public:
    explicit Hold(std::mutex& mutex) : lock_(mutex) {}

private:
    const std::lock_guard<std::mutex> lock_;
    const BusGuard guard_;
};

}  // namespace farpool
