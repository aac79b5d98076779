#include "device/device_clock.hpp"

#include <algorithm>
#include <limits>

namespace farpool::device {

namespace {

constexpr double anchor_seconds = 1.0;
constexpr double drift = 1e-4;  // seconds that the clocks may differ after a second

}  // namespace

DeviceClock::DeviceClock(std::shared_ptr<Device> device, EventPool& events, Stream stream, Host host)
    : device_(std::move(device)), events_(events), host_(host), anchor_(events.take()) {
    device_->record(anchor_, stream);
    device_->synchronize(anchor_);
    anchored_at_ = host_();
    least_delay_ = std::numeric_limits<double>::infinity();
}

double DeviceClock::exchange_time(Event& event) {
    const std::lock_guard lock(mutex_);
    const double seconds = device_->elapsed(anchor_, event);
    const double now = host_();
    anchored_at_ = std::min(anchored_at_, now - seconds);  // no event is seen before it has passed
    const double time = anchored_at_ + seconds;
    least_delay_ = std::min(least_delay_ + drift * std::max(0.0, seconds - latest_), now - time);
    latest_ = std::max(latest_, seconds);
    if (seconds < anchor_seconds) {
        return time;
    }
    std::swap(anchor_, event);
    latest_ = 0.0;
    // If all were seen late, the clocks have still not drifted more than this.
    anchored_at_ = time + std::min(least_delay_, drift * seconds);
    least_delay_ = std::numeric_limits<double>::infinity();
    return anchored_at_;
}

}  // namespace farpool::device
