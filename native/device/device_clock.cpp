#include "device/device_clock.hpp"

#include <algorithm>
#include <limits>

#include "core/clock.hpp"

namespace farpool::device {

namespace {

constexpr double anchor_seconds = 1.0;

}  // namespace

DeviceClock::DeviceClock(std::shared_ptr<Device> device, EventPool& events, Stream stream)
    : device_(std::move(device)), events_(events), anchor_(events.take()) {
    device_->record(anchor_, stream);
    device_->synchronize(anchor_);
    anchored_at_ = monotonic_seconds();
    least_delay_ = std::numeric_limits<double>::infinity();
}

double DeviceClock::take_time(Event event) {
    const std::lock_guard lock(mutex_);
    const double seconds = device_->elapsed(anchor_, event);
    const double now = monotonic_seconds();
    anchored_at_ = std::min(anchored_at_, now - seconds);  // no event is seen before it has passed
    const double time = anchored_at_ + seconds;
    least_delay_ = std::min(least_delay_, now - time);
    if (seconds >= anchor_seconds) {
        events_.give(std::exchange(anchor_, event));
        anchored_at_ = time + std::exchange(least_delay_, std::numeric_limits<double>::infinity());
    } else {
        events_.give(event);
    }
    return time;
}

}  // namespace farpool::device
