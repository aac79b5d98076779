// Results of ended transfers until they are polled, and the threads that wait for them. Each queue of transfers has one, which
// the queue's own mutex guards.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <utility>
#include <vector>

#include "core/room.hpp"
#include "core/transfer_queue.hpp"

namespace farpool {

class Results {
public:
    // Makes room for the results of so many entries, all that are pending, so that `add` needs no memory.
    void expect(std::size_t pending) { make_room(results_, results_.size() + pending); }
    void add(Result result) noexcept;
    // True if the latest result of this entry is a failure that has not been polled yet.
    bool has_failure(std::int64_t id) const;
    // Call after each group of `add`. True if there are enough results for a thread that waits, or one is a failure: then call
    // `notify_all`, best without the queue's mutex.
    [[nodiscard]] bool settle();
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
        const Target target(targets_, total);  // waking up for each result would cost more than a small transfer
        changed_.wait_until(lock, deadline_after(seconds), ready);
    }
    // Wakes all waiting threads, so that they check again. Best called without the queue's mutex, which they lock first.
    void notify_all() { changed_.notify_all(); }

    static std::chrono::steady_clock::time_point deadline_after(double seconds);

private:
    // A count of results that a thread waits for, in a list of these while it lives.
    class Target {
    public:
        Target(Target*& first, std::uint64_t total) : first_(first), next_(first), total_(total) { first = this; }
        Target(const Target&) = delete;
        Target& operator=(const Target&) = delete;
        ~Target() {
            Target** at = &first_;
            while (*at != this) {
                at = &(*at)->next_;
            }
            *at = next_;
        }
        const Target* next() const { return next_; }
        std::uint64_t total() const { return total_; }

    private:
        Target*& first_;
        Target* next_;
        const std::uint64_t total_;
    };

    std::condition_variable changed_;
    std::vector<Result> results_;
    TransferQueue::Seen seen_{0, 0};
    Target* targets_ = nullptr;
    std::size_t failures_ = 0;  // among `results_`
    bool failed_ = false;       // since the last `settle`
};

}  // namespace farpool
