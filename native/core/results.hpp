// Results of ended transfers until they are polled, and the threads that wait for them. Each queue of transfers has one, which
// the queue's own mutex guards.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <set>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/transfer_queue.hpp"

namespace farpool {

class Results {
public:
    void add(Result result);
    // True if the result of this entry is a failure that has not been polled yet.
    bool has_failure(std::int64_t id) const { return failures_.contains(id); }
    void forget_failure(std::int64_t id) { failures_.erase(id); }
    // Call after each group of `add`. True if there are enough results for a thread that waits, or one is a failure: then call
    // `notify_all`.
    [[nodiscard]] bool settle();
    void wake() {
        if (settle()) {
            notify_all();
        }
    }
    std::vector<Result> poll();
    bool empty() const { return results_.empty(); }
    // The results left behind, without their memory being given back; see `~QueueCore`.
    std::vector<Result> leave() { return std::move(results_); }

    TransferQueue::Seen seen() const { return seen_; }
    bool past(const TransferQueue::Seen& seen, std::uint64_t results) const {
        return seen_.results >= seen.results + results || seen_.nudges != seen.nudges;
    }
    void count_nudge() { ++seen_.nudges; }
    void nudge() {
        count_nudge();
        notify_all();
    }
    // Waits at most `seconds` until `ready`, which is checked when there have been `total` results in all and at each nudge.
    template <typename Ready>
    void wait(std::unique_lock<std::mutex>& lock, std::uint64_t total, double seconds, Ready ready) {
        const auto target = targets_.insert(total);  // waking up for each result would cost more than a small transfer
        changed_.wait_until(lock, deadline_after(seconds), ready);
        targets_.erase(target);
    }
    // Wakes all waiting threads, so that they check again. Best called without the queue's mutex, which they lock first.
    void notify_all() { changed_.notify_all(); }

    static std::chrono::steady_clock::time_point deadline_after(double seconds);

private:
    std::condition_variable changed_;
    std::vector<Result> results_;
    TransferQueue::Seen seen_{0, 0};
    std::multiset<std::uint64_t> targets_;       // counts of results that threads wait for
    std::unordered_set<std::int64_t> failures_;  // failed entries whose results have not been polled yet
    bool failed_ = false;                        // since the last `wake`
};

}  // namespace farpool
