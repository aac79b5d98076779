// The times of a device's events on the host's monotonic clock.
//
// A device only tells the seconds between two events. The clock counts from an anchor, an event whose time is known, and takes
// a later event as the new anchor each second: the seconds have too few digits to count from one event for hours. The two
// clocks run at slightly different speeds. An event is never seen before it has passed, and the one that was seen soonest was
// seen at about the time when it passed, so at each new anchor the clock is set by the smallest delay since the last one. (A
// delay that was seen long ago counts as longer, by what the clocks may have drifted since then.) An event that is seen before
// its time sets the clock at once. So a time is wrong by no more than the clocks drift in a second or two, plus the smallest
// delay of these seconds, however long the device runs and however long it idles.
#pragma once

#include <memory>
#include <mutex>

#include "core/clock.hpp"
#include "device/event_pool.hpp"

namespace farpool::device {

class DeviceClock {
public:
    using Host = double (*)();
    // Records the first anchor on the stream, and waits for it. `host`: the host's clock.
    DeviceClock(std::shared_ptr<Device> device, EventPool& events, Stream stream, Host host = monotonic_seconds);
    DeviceClock(const DeviceClock&) = delete;
    DeviceClock& operator=(const DeviceClock&) = delete;

    // The time of an event that has passed. Takes the event, which must not be used again by the caller.
    double take_time(Event event) {
        const double time = exchange_time(event);
        events_.give(event);
        return time;
    }
    // The same, and leaves an event in its place that the caller has to give back.
    double exchange_time(Event& event);

private:
    std::shared_ptr<Device> device_;
    EventPool& events_;
    Host host_;
    std::mutex mutex_;
    Event anchor_;
    double anchored_at_;
    double least_delay_;   // of events since the anchor, and the most that the clocks may have drifted since then
    double latest_ = 0.0;  // seconds from the anchor to the latest event
};

}  // namespace farpool::device
