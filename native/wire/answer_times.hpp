// How long a node takes to answer small requests, and whether it has been late for many answers in a row.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

namespace farpool {

// Seconds above which an answer can be late. Over local networks a node answers in a tenth of it; below it another node would
// gain a program little.
constexpr double late_answer_seconds = 2e-3;
// Late answers after which the node counts as late, if no prompt ones between them brought the smoothed time down. They are
// enough to tell a slow node from one that paused once.
constexpr std::uint32_t late_answers = 16;
// Seconds that they last at least. Many threads may wait for a node that pauses, and then all their answers are late at once.
constexpr double late_seconds = 0.5;
// Bytes of requests and replies up to which an exchange is measured. More bytes take time of their own.
constexpr std::size_t measured_nbytes = std::size_t{64} << 10;

// Thread-safe. Of answers that several threads add at the same time one may be forgotten, because exactness would cost more
// than it is worth.
class AnswerTimes {
public:
    // Adds the time of an answer that came at `now`, by the monotonic clock.
    void add(double seconds, double now) noexcept {
        last_.store(seconds, relaxed);
        const double before = seconds_.load(relaxed);
        // A single answer counts for little, however late it is. None takes no time, because 0 means that there was none yet.
        const double counted = std::clamp(seconds, 1e-6, most_growth * std::max(before, late_answer_seconds));
        const double after = before == 0 ? counted : before + (counted - before) * weight_of_last;
        seconds_.store(after, relaxed);
        if (after <= late_answer_seconds) {
            run_.store(0, relaxed);
            return;
        }
        if (seconds <= late_answer_seconds) {
            return;  // a prompt answer, which ends the run when there are enough of them
        }
        const std::uint32_t run = run_.load(relaxed) + 1;
        run_.store(run, relaxed);
        if (run == 1) {
            since_.store(now, relaxed);
        }
        least_.store(run == 1 ? after : std::min(after, least_.load(relaxed)), relaxed);
        if (run >= late_answers && now - since_.load(relaxed) >= late_seconds) {
            late_.store(true, relaxed);
        }
    }

    // Smoothed seconds of an answer, 0 before the first.
    double seconds() const noexcept { return seconds_.load(relaxed); }
    // Seconds of the last answer.
    double last() const noexcept { return last_.load(relaxed); }
    bool late() const noexcept { return late_.load(relaxed); }

    // If the node was late for so many answers, returns the smallest smoothed time during them and begins to count again;
    // otherwise returns 0.
    double take_late() noexcept {
        if (!late_.exchange(false, relaxed)) {
            return 0;
        }
        run_.store(0, relaxed);
        return least_.load(relaxed);
    }

private:
    static constexpr auto relaxed = std::memory_order_relaxed;
    static constexpr double weight_of_last = 1.0 / 8;
    static constexpr double most_growth = 8;

    std::atomic<double> seconds_{0};
    std::atomic<double> last_{0};
    std::atomic<double> least_{0};
    std::atomic<double> since_{0};
    std::atomic<std::uint32_t> run_{0};
    std::atomic<bool> late_{false};
};

}  // namespace farpool
