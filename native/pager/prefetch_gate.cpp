#include "pager/prefetch_gate.hpp"

#include <algorithm>

namespace farpool::pager {

namespace {

constexpr double evidence = 4;  // divides the predicted bytes: only this part counts as gained
constexpr int stake = 2;        // the balance must cover the prefetched bytes this many times
// Cost of a block that was prefetched and not accessed, in transfers of it. With less, programs that branch lose more than
// they gain.
constexpr double loss = 8;
constexpr int most_patience = 64;
constexpr std::size_t remembered = 4096;  // ends of busy times

}  // namespace

void PrefetchGate::note_foretold(double nbytes, std::int64_t enough) {
    if (!open_) {
        balance_ += nbytes / evidence;
        open_ = balance_ >= static_cast<double>(stake * enough * patience_);
    }
}

void PrefetchGate::note_fetch(double nbytes, double computing, double writing, bool ahead) {
    if (!ahead) {
        usual_ += 0.05 * (writing - usual_);
    }
    if (!ahead || !open_) {
        return;
    }
    const double gain = std::min(1.0, computing + std::max(0.0, writing - usual_));
    balance_ = std::min(static_cast<double>(stake * capacity_), balance_ + gain * nbytes);
    if (balance_ >= static_cast<double>(refill_)) {
        ample_ = true;
        patience_ = 1;
    }
    check();
}

void PrefetchGate::charge_room(double nbytes) {
    if (open_) {
        balance_ -= nbytes;
        check();
    }
}

void PrefetchGate::charge_waste(double nbytes) {
    if (open_) {
        balance_ -= loss * nbytes;
        check();
    }
}

void PrefetchGate::check() {
    if (balance_ < 0.0) {
        open_ = ample_ = false;
        balance_ = 0.0;
        patience_ = std::min(most_patience, 2 * patience_);
    }
}

bool PrefetchGate::covers(std::int64_t nbytes) const { return open_ && static_cast<double>(stake * nbytes) <= balance_; }

double BusyTimes::note(double start, double end) {
    start = std::max(start, times_.back());
    if (end <= start) {
        return 0.0;
    }
    const double total = totals_.back();
    times_.insert(times_.end(), {start, end});
    totals_.insert(totals_.end(), {total, total + end - start});
    if (times_.size() > 2 * remembered) {
        times_.erase(times_.begin(), times_.begin() + remembered);
        totals_.erase(totals_.begin(), totals_.begin() + remembered);
    }
    return end - start;
}

double BusyTimes::until(double time) const {
    const auto above = std::ranges::upper_bound(times_, time) - times_.begin();
    if (above == 0) {
        return totals_.front();
    }
    const auto at = static_cast<std::size_t>(above) - 1;
    if (at + 1 == times_.size() || totals_[at + 1] == totals_[at]) {
        return totals_[at];
    }
    return totals_[at] + time - times_[at];
}

void LinkRate::note(std::int64_t nbytes, double start, double end) {
    bytes_ = 0.9 * bytes_ + static_cast<double>(nbytes);
    seconds_ = 0.9 * seconds_ + busy_.note(start, end);
}

}  // namespace farpool::pager
