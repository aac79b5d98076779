// The prefetch gate: prefetching has to pay for itself.
//
// A prefetch gains time during which the program computes or other blocks are written back; on demand, the program would wait
// for that time. Prefetched bytes cost room that other blocks cannot use: each turn of a loop fetches that many bytes more. A
// block that is evicted before its access costs several times its transfer: it kept the link busy, the blocks evicted for it
// have to be fetched again, and so do blocks that were evicted early because the prediction was wrong.
//
// While the balance is positive, prefetching goes on. When it is used up, the pool fetches on demand until there is evidence
// again: fetches that were predicted and that the program waited for although it had computed before them. Each time the
// evidence misleads, the gate asks for twice as much. So it discovers a program that becomes predictable, and a program that
// never does pays next to nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "pager/allocated.hpp"

namespace farpool::pager {

// The account that decides whether to prefetch, in bytes: time gained times the rate of the link.
class PrefetchGate {
public:
    // `capacity`: bytes of the arena.
    explicit PrefetchGate(std::int64_t capacity) : capacity_(capacity), refill_(capacity) {}

    void set_capacity(std::int64_t capacity) { capacity_ = refill_ = capacity; }
    // Sets the bytes that are fetched again when the arena is filled with other blocks.
    void set_refill(std::int64_t nbytes) { refill_ = nbytes; }
    // Notes bytes that a prefetch could have brought; `enough`: bytes that prefetching may risk when it is tried.
    void note_foretold(double nbytes, std::int64_t enough);
    // Notes an ended fetch, and the shares of its time in which the program computed and in which blocks were written back.
    void note_fetch(double nbytes, double computing, double writing, bool ahead);
    // Charges for arena space that prefetched bytes occupy.
    void charge_room(double nbytes);
    // Charges for prefetched bytes that were evicted before an access.
    void charge_waste(double nbytes);
    // True if prefetching pays.
    bool open() const noexcept { return open_; }
    // True if prefetching has gained so much that the arena may be filled with other blocks for its sake.
    bool ample() const noexcept { return ample_; }
    // True if the balance allows prefetching to risk `nbytes`.
    bool covers(std::int64_t nbytes) const;

private:
    void check();

    std::int64_t capacity_;
    std::int64_t refill_;
    double balance_ = 0.0;
    int patience_ = 1;
    double usual_ = 0.0;  // share of a demand fetch during which blocks are written back: prefetching does not gain that
    bool open_ = false;
    bool ample_ = false;
};

// The recent intervals in which the program or a link was busy.
class BusyTimes {
public:
    // Notes a busy interval from `start` to `end`; returns the seconds that no earlier interval covers.
    double note(double start, double end);
    // Busy seconds between two times.
    double between(double start, double end) const { return until(end) - until(start); }
    // Bytes of memory that the intervals hold.
    std::int64_t allocated_bytes() const { return allocated(times_) + allocated(totals_); }

private:
    double until(double time) const;

    // Alternately the beginnings and the ends of the intervals, and the busy seconds up to each.
    std::vector<double> times_{0.0};
    std::vector<double> totals_{0.0};
};

// Seconds per byte of a link, over the latest transfers, which may overlap.
class LinkRate {
public:
    // Notes a transfer; it counts a tenth less than the next one.
    void note(std::int64_t nbytes, double start, double end);
    // Recent rate of the link; 0 before the first transfer.
    double seconds_per_byte() const { return bytes_ != 0.0 ? seconds_ / bytes_ : 0.0; }
    // Bytes of memory that the latest transfers hold.
    std::int64_t allocated_bytes() const { return busy_.allocated_bytes(); }

private:
    BusyTimes busy_;
    double bytes_ = 0.0;
    double seconds_ = 0.0;
};

}  // namespace farpool::pager
