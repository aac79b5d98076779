#include "core/throttled_port.hpp"

#include <algorithm>
#include <cmath>

namespace farpool {

namespace {

constexpr std::chrono::hours year{365 * 24};  // stands for "no limit": later times could overflow the clock

std::chrono::nanoseconds nanoseconds(double seconds) {
    const double longest = std::chrono::duration<double>(year).count();
    return std::chrono::nanoseconds(static_cast<std::int64_t>(std::ceil(std::min(seconds, longest) * 1e9)));
}

}  // namespace

void ThrottledPort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    const Slot slot = take_slot(read_link_, read_rate_, nbytes);
    inner_.read(offset, into, nbytes);
    delay(read_link_, slot);
}

void ThrottledPort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    Link& link = shared_ ? read_link_ : write_link_;
    const Slot slot = take_slot(link, write_rate_, nbytes);
    inner_.write(offset, from, nbytes);
    delay(link, slot);
}

void ThrottledPort::lift() {
    const std::lock_guard lock(mutex_);
    lifted_ = true;
    lifting_.notify_all();
}

// Reserves a transfer's time on the link, whether it will succeed or fail.
ThrottledPort::Slot ThrottledPort::take_slot(Link& link, double rate, std::size_t nbytes) {
    const std::lock_guard lock(mutex_);
    const Clock::time_point now = Clock::now();
    // A thread wakes up a little late. A transfer that follows at once is dated back by that much, or many small transfers
    // would be slower than the rate; a transfer after a pause is not.
    const Clock::duration credit = now - link.ended <= link.late ? link.late : Clock::duration::zero();
    link.late = Clock::duration::zero();
    const Clock::time_point start = std::max(link.free, now - credit);
    link.free = std::min(start + nanoseconds(static_cast<double>(nbytes) / rate), now + year);
    return {link.free + nanoseconds(latency_), credit};
}

void ThrottledPort::delay(Link& link, const Slot& slot) {
    std::unique_lock lock(mutex_);
    // Until a point in time, not for a duration, because the copy itself took a part of the time.
    const bool delayed = Clock::now() < slot.end && !lifted_;
    if (delayed) {
        lifting_.wait_until(lock, slot.end, [&] { return lifted_; });
    }
    link.ended = Clock::now();
    const Clock::duration late = std::max(Clock::duration::zero(), link.ended - slot.end);
    // Without a wait, only the rest of an earlier delay is made up, not a slow copy.
    link.late = delayed ? late : std::min(late, slot.credit);
}

}  // namespace farpool
