// The prefetch gate: fetching ahead has to pay for itself.
//
// A fetch gains the time in which, meanwhile, the program computes or other blocks are written back; fetched on demand it
// would be waited for. Against that stands the room that lies ready, which others have to do without: in each turn of a loop
// as many bytes more are fetched. And a block that leaves without having been accessed costs several times its transfer: the
// link was busy with it, and what it pushed out, and what left early because the future looked otherwise, comes back.
//
// While the balance is positive, fetching ahead goes on. When it is used up, the pool fetches on demand until there is
// evidence: fetches that were foretold, and waited for although the program had computed before them. Each time that the
// evidence was misleading, twice as much is asked for. So a program that becomes predictable is found out, and one that never
// does pays next to nothing.
#pragma once

#include <cstdint>
#include <vector>

#include "pager/held.hpp"

namespace farpool::pager {

// The account that decides whether to fetch ahead, in bytes: time gained times the link's rate.
class PrefetchGate {
public:
    // `capacity`: bytes of the arena.
    explicit PrefetchGate(std::int64_t capacity) : capacity_(capacity), refill_(capacity) {}

    void set_capacity(std::int64_t capacity) { capacity_ = refill_ = capacity; }
    // Sets the bytes that are fetched once more when the arena is filled anew.
    void set_refill(std::int64_t nbytes) { refill_ = nbytes; }
    // Notes bytes that could have been fetched ahead; `enough`: bytes that may be at stake when it is tried.
    void note_foretold(double nbytes, std::int64_t enough);
    // Notes an ended fetch, and the shares of its time in which the program computed and in which others were written back.
    void note_fetch(double nbytes, double computing, double writing, bool ahead);
    // Charge for arena space taken by prefetched bytes.
    void charge_room(double nbytes);
    // Charge for bytes that were fetched ahead in vain.
    void charge_waste(double nbytes);
    // True if fetching ahead is worth it.
    bool open() const noexcept { return open_; }
    // True if fetching ahead has gained so much that the arena may be filled anew for its sake.
    bool ample() const noexcept { return ample_; }
    // True if the balance allows `nbytes` to be at stake.
    bool covers(std::int64_t nbytes) const;

private:
    void check();

    std::int64_t capacity_;
    std::int64_t refill_;
    double balance_ = 0.0;
    int patience_ = 1;
    double usual_ = 0.0;  // share of a fetch on demand beside which others are written back: what fetching ahead does not gain
    bool open_ = false;
    bool ample_ = false;
};

// The recent intervals in which something was busy.
class BusyTimes {
public:
    // Notes a busy interval from `start` to `end`; returns the seconds of it that had not been noted before.
    double note(double start, double end);
    // Busy seconds between two times.
    double between(double start, double end) const { return until(end) - until(start); }
    // Bytes of memory that the intervals hold.
    std::int64_t held_bytes() const { return held(times_) + held(totals_); }

private:
    double until(double time) const;

    // Beginnings and ends of the intervals in turn, and the busy seconds up to each.
    std::vector<double> times_{0.0};
    std::vector<double> totals_{0.0};
};

// Seconds per byte of a link, over the latest transfers, which may overlap.
class LinkRate {
public:
    // Notes a transfer; each counts a tenth less than the one after it.
    void note(std::int64_t nbytes, double start, double end);
    // Recent rate of the link; 0 before anything was moved.
    double seconds_per_byte() const { return bytes_ != 0.0 ? seconds_ / bytes_ : 0.0; }
    // Bytes of memory that the latest transfers hold.
    std::int64_t held_bytes() const { return busy_.held_bytes(); }

private:
    BusyTimes busy_;
    double bytes_ = 0.0;
    double seconds_ = 0.0;
};

}  // namespace farpool::pager
