#include "device/moves.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

#include "core/clock.hpp"
#include "core/error.hpp"

namespace farpool::device {

Moves::Moves(std::shared_ptr<Device> device, std::size_t bounce)
    : device_(std::move(device)), stream_(device_), bounce_bytes_(bounce), bounce_(device_, bounce) {}

template <typename Work>
void Moves::queue(ProgramOrder& order, std::int64_t last_use, Work work) {
    const std::lock_guard lock(mutex_);
    if (closed_) {
        fail_closed("the transfer queue was closed");
    }
    const Attached attached(*device_);
    order.follow(stream(), last_use, moves_);
    work();
    order.moved(stream());
}

void Moves::move(ProgramOrder& order, std::uintptr_t target, std::uintptr_t source, std::size_t nbytes, std::int64_t last_use) {
    queue(order, last_use, [&] {
        const std::size_t distance = target < source ? source - target : target - source;
        // A copy between ranges that overlap has no defined result. Pieces no longer than the distance do not overlap; if the
        // distance is short, pieces go through memory of their own. They go in the direction in which no write overwrites bytes
        // that are still to be read.
        const bool bounced = distance < std::min(nbytes, bounce_bytes_);
        const std::size_t most = bounced ? bounce_bytes_ : std::max<std::size_t>(distance, 1);
        for (std::size_t done = 0; done < nbytes;) {
            const std::size_t size = std::min(most, nbytes - done);
            const std::size_t at = target < source ? done : nbytes - done - size;
            if (bounced) {
                device_->copy_within(stream(), bounce_.address(), source + at, size);
                device_->copy_within(stream(), target + at, bounce_.address(), size);
            } else {
                device_->copy_within(stream(), target + at, source + at, size);
            }
            done += size;
        }
    });
}

bool Moves::close(ProgramOrder& order, EventPool& events, double deadline) {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
        // Work of destroyed streams may still use the memory that is given back next, and no other place waits for it.
        order.follow_destroyed(stream());
        const Event last = events.take();
        device_->record(last, stream());
        while (!device_->passed(last)) {
            if (monotonic_seconds() >= deadline) {
                events.give(last);
                return false;
            }
            std::this_thread::sleep_for(std::chrono::microseconds(200));
        }
        events.give(last);
        closed_ = true;
        stream_.end();
        bounce_.end();
    }
    return true;
}

void Moves::fill(ProgramOrder& order, std::uintptr_t target, std::size_t count, std::uint16_t value) {
    queue(order, order.newest(), [&] { device_->fill(stream(), target, value, count); });
}

}  // namespace farpool::device
