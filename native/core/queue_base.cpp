#include "core/queue_base.hpp"

#include "core/error.hpp"
#include "core/process.hpp"

namespace farpool {

QueueBase::QueueBase() : owner_(forks()) {}

bool QueueBase::ours() const noexcept { return forks() == owner_; }

void QueueBase::require_open() const {
    if (closing_) {
        fail_closed("the transfer queue was closed");
    }
}

std::vector<Result> QueueBase::poll() {
    const std::lock_guard lock(mutex_);
    return results_.poll();
}

bool QueueBase::wait(double seconds) {
    std::unique_lock lock(mutex_);
    results_.wait(lock, results_.seen().results + 1, seconds, [&] { return !results_.empty() || closing_; });
    return !results_.empty();
}

TransferQueue::Seen QueueBase::seen() const {
    const std::lock_guard lock(mutex_);
    return results_.seen();
}

void QueueBase::wait_past(const Seen& seen, std::uint64_t results, double seconds) {
    std::unique_lock lock(mutex_);
    results_.wait(lock, seen.results + results, seconds, [&] { return results_.past(seen, results) || closing_; });
}

void QueueBase::nudge() {
    if (!ours()) {
        return;  // a thread of the parent may have held the lock
    }
    {
        const std::lock_guard lock(mutex_);
        results_.count_nudge();
    }
    results_.notify_all();
}

}  // namespace farpool
