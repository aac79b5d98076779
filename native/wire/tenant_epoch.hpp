// The latest epoch of a tenant that a program knows: the count of rotations, each of which made all older objects unreadable.
#pragma once

#include <atomic>
#include <cstdint>

namespace farpool {

// The highest epoch that any node has reported. Shared by a program's connections and readers of mapped memory; thread-safe.
class TenantEpoch {
public:
    std::uint32_t get() const noexcept { return value_.load(std::memory_order_relaxed); }
    void meet(std::uint32_t other) noexcept {
        std::uint32_t known = get();
        while (other > known && !value_.compare_exchange_weak(known, other, std::memory_order_relaxed)) {
        }
    }

private:
    std::atomic<std::uint32_t> value_{0};
};

}  // namespace farpool
