// A tenant's part of a node's bandwidth, and the bucket by which a rate is kept.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "node/loop_time.hpp"

namespace farpool {

// Rates are in metered bytes a second (see Work), and 0 stands for none.
struct Bandwidth {
    double share = 1.0;           // weight of the tenant next to the others that have work
    std::uint64_t guarantee = 0;  // below it, the tenant is served before all tenants that are not below theirs
    std::uint64_t cap = 0;        // above it, the tenant has no turn

    bool operator==(const Bandwidth&) const = default;
};

// A token bucket. It fills with its rate; what is taken may leave it below zero.
class Bucket {
public:
    // A full bucket holds what the rate gives in this time, but at least `least`.
    static constexpr std::chrono::milliseconds filled_in{20};
    static constexpr double least = 64 * 1024;

    // `rate`: bytes a second; 0 for a bucket that is not used. A bucket that comes into use is full.
    void set(double rate, Clock::time_point now) noexcept {
        refill(now);
        const double depth = std::max(rate * std::chrono::duration<double>(filled_in).count(), least);
        level_ = rate_ > 0 ? std::min(level_, depth) : depth;
        rate_ = rate;
        depth_ = depth;
        at_ = now;
    }
    bool is_used() const noexcept { return rate_ > 0; }
    void refill(Clock::time_point now) noexcept {
        if (is_used() && now > at_) {
            level_ = std::min(depth_, level_ + rate_ * std::chrono::duration<double>(now - at_).count());
            at_ = now;
        }
    }
    double level() const noexcept { return level_; }
    // The time for which the rate would have to pause for the bucket to be as full as it is.
    double seconds() const noexcept { return level_ / rate_; }
    void take(double nbytes, Clock::time_point now) noexcept {
        refill(now);
        level_ -= nbytes;
    }
    // Takes bytes, but leaves no larger debt than `debt`, unless it is larger already.
    void drain(double nbytes, double debt, Clock::time_point now) noexcept {
        refill(now);
        level_ = std::max(level_ - nbytes, std::min(level_, -debt));
    }
    double depth() const noexcept { return depth_; }
    // Bytes that the rate gives in this time.
    double given_in(std::chrono::duration<double> time) const noexcept { return rate_ * time.count(); }
    // True if the bucket has to refill. Half a byte covers the rounding of filled_at().
    bool is_empty() const noexcept { return level_ < -0.5; }
    // The time at which an empty bucket is not empty any more.
    Clock::time_point filled_at() const noexcept {
        const double ns = std::min(std::ceil(-level_ / rate_ * 1e9), 1e18);
        return at_ + std::chrono::nanoseconds(static_cast<std::int64_t>(std::max(ns, 0.0)));
    }

private:
    double rate_ = 0, depth_ = 0, level_ = 0;
    Clock::time_point at_{};
};

}  // namespace farpool
