// The times within which clients of a node must make progress.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>

#include "node/loop_time.hpp"

namespace farpool {

inline Clock::duration seconds(double value) {
    return std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(std::min(value, 1e9)));
}

// The times at which a node judges its clients, about every second by the system's clock.
class Ticks {
public:
    static constexpr auto period = std::chrono::seconds(1);

    bool is_due(Clock::time_point now) const noexcept { return now >= next_; }
    // Postpones the next tick after a late round, so that clients are served before they are judged. Does so once for each
    // tick, so that a node that is often late has ticks, too.
    void postpone(Clock::time_point now) noexcept {
        next_ = postponed_ ? next_ : now + period;
        postponed_ = true;
    }
    void end(Clock::time_point now) noexcept {
        next_ = now + period;
        postponed_ = false;
    }

private:
    Clock::time_point next_ = Clock::now() + period;
    bool postponed_ = false;
};

// The clock and the limits that a node applies to all of its clients.
class Deadlines {
public:
    // `stall_s`: a client may rest so long in the middle of a frame or a reply. `grace_s`: a session's pins, leases and
    // preparations outlive its last connection so long.
    Deadlines(double stall_s, double grace_s) : stall_(seconds(stall_s)), grace_(seconds(grace_s)) {}

    bool begin_round(Clock::time_point real) noexcept { return time_.begin_round(real); }
    Clock::time_point now() const noexcept { return at(Clock::now()); }
    Clock::time_point at(Clock::time_point real) const noexcept { return time_.at(real); }
    Clock::duration stall() const noexcept { return stall_; }
    Clock::duration grace() const noexcept { return grace_; }

private:
    LoopTime time_{Clock::now()};
    Clock::duration stall_;
    Clock::duration grace_;
};

// The deadline by which one client has to make progress. Bytes that move extend it, so that a client slower than
// `bytes_per_s_min` runs out of time, even if its bytes arrive regularly.
class Patience {
public:
    static constexpr double bytes_per_s_min = 64 * 1024;

    explicit Patience(const Deadlines& deadlines) : deadlines_(deadlines) {}

    void begin() { end_ = deadlines_.now() + deadlines_.stall(); }
    void moved(std::size_t nbytes, Clock::time_point now) {
        const std::chrono::duration<double> bought(static_cast<double>(nbytes) / bytes_per_s_min);
        end_ = std::min(now + deadlines_.stall(), end_ + std::chrono::duration_cast<Clock::duration>(bought));
    }
    // Adds time for which the node kept the client from making progress.
    void excuse(Clock::duration waited) { end_ += waited; }
    bool is_over(Clock::time_point now) const noexcept { return now > end_; }
    Clock::time_point end() const noexcept { return end_; }

private:
    const Deadlines& deadlines_;
    Clock::time_point end_{};
};

}  // namespace farpool
