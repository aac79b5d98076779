// When transfers and computing ran: the speed of the link, and the share of each fetch that was hidden.
#pragma once

#include <cstdint>
#include <deque>

#include "pager/allocated.hpp"
#include "pager/prefetch_gate.hpp"

namespace farpool::pager {

// Reports each fetch to the prefetch gate once it is known what else ran at the same time.
class TransferTimes {
public:
    // `late`: `computed` reports the program's times after the fetches that ran at the same time have ended.
    TransferTimes(PrefetchGate& gate, bool late) : gate_(gate), late_(late) {}

    // Notes an ended fetch of `nbytes` bytes; `ahead`: no access had asked for it.
    void fetched(std::int64_t nbytes, double start, double end, bool ahead);
    // Notes an ended write-back.
    void wrote(double start, double end) { writing_.note(start, end); }
    // Notes that the program computed from `start` to `end`.
    void computed(double start, double end);
    // Recent speed of fetches; 0 before the first one.
    double seconds_per_byte() const { return rate_.seconds_per_byte(); }
    // Bytes of memory that the times hold.
    std::int64_t allocated_bytes() const {
        return rate_.allocated_bytes() + writing_.allocated_bytes() + computing_.allocated_bytes() + allocated(unjudged_);
    }

private:
    struct Fetch {
        std::int64_t nbytes;
        double start;
        double end;
        bool ahead;
    };

    void judge(const Fetch& fetch);
    void judge_first();

    PrefetchGate& gate_;
    bool late_;
    LinkRate rate_;  // of fetches
    BusyTimes writing_;
    BusyTimes computing_;
    std::deque<Fetch> unjudged_;  // the program's times up to their ends are not known yet
};

}  // namespace farpool::pager
