// The time by which the node's loop measures its clients.
#pragma once

#include <algorithm>
#include <chrono>

namespace farpool {

// The system's clock, or the time that a simulation has set in the calling thread.
class Clock {
public:
    using System = std::chrono::steady_clock;
    using rep = System::rep;
    using period = System::period;
    using duration = System::duration;
    using time_point = System::time_point;
    static constexpr bool is_steady = true;

    static time_point now() noexcept { return simulated_ == time_point{} ? System::now() : simulated_; }
    // Sets the time in the calling thread. The epoch of the clock ends the simulation there.
    static void simulate(time_point now) noexcept { simulated_ = now; }

private:
    static constinit inline thread_local time_point simulated_{};
};

// The time by a clock that people set.
inline std::chrono::milliseconds since_1970() {
    return std::chrono::duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch());
}

// A clock that does not run while the loop stands still: while its process is stopped, its machine is paused, or other
// processes take all processors. A client cannot make progress in that time, so no deadline may count it.
class LoopTime {
public:
    // A round of the loop counts for this long at most. The loop begins one at least every second, also if there is no event.
    static constexpr Clock::duration longest_round = std::chrono::milliseconds(1500);

    explicit LoopTime(Clock::time_point started) noexcept : begun_(started) {}

    // Begins a round; true if it comes late. Then the loop handles the events that waited for it before it judges a deadline.
    bool begin_round(Clock::time_point real) noexcept {
        const Clock::duration late = real - (begun_ + longest_round);
        begun_ = real;
        lost_ += std::max(late, Clock::duration::zero());
        return late > Clock::duration::zero();
    }
    // The time of this clock at a time of the system's clock that is not before the round.
    Clock::time_point at(Clock::time_point real) const noexcept { return std::min(real, begun_ + longest_round) - lost_; }

private:
    Clock::time_point begun_;
    Clock::duration lost_{};
};

}  // namespace farpool
