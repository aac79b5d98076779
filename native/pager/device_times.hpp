// What a device and its link did over time: how long it computed, how long it stood still because an operation waited for
// bytes, and how long each direction of the link was busy. All times are on the host's monotonic clock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <limits>
#include <vector>

namespace farpool::pager {

// The union of intervals that are reported roughly in the order of their ends.
class Covered {
public:
    struct Span {
        double start;
        double end;
    };

    // Adds an interval. Calls `fresh` for each part of it that no earlier interval covers.
    template <typename Fresh>
    void add(double start, double end, Fresh fresh) {
        start = std::max(start, floor_);
        if (end <= start) {
            return;
        }
        const auto first = std::ranges::lower_bound(spans_, start, {}, &Span::end);
        Span whole{start, end};
        double at = start;
        auto after = first;
        for (; after != spans_.end() && after->start <= end; ++after) {
            count(at, after->start, fresh);
            at = after->end;
            whole = {std::min(whole.start, after->start), std::max(whole.end, after->end)};
        }
        count(at, end, fresh);
        spans_.insert(spans_.erase(first, after), whole);
        if (spans_.size() > kept) {
            floor_ = spans_[kept / 2 - 1].end;
            spans_.erase(spans_.begin(), spans_.begin() + kept / 2);
        }
    }
    void add(double start, double end) {
        add(start, end, [](double, double) {});
    }

    // Seconds of the intervals' union.
    double seconds() const { return seconds_; }
    // Seconds of [start, end] that the intervals cover, as far as they are remembered.
    double between(double start, double end) const {
        double sum = 0.0;
        for (auto span = std::ranges::lower_bound(spans_, start, {}, &Span::end); span != spans_.end() && span->start < end;
             ++span) {
            sum += std::min(end, span->end) - std::max(start, span->start);
        }
        return sum;
    }

private:
    static constexpr std::size_t kept = 2048;  // more than the accesses whose times a device still owes

    template <typename Fresh>
    void count(double start, double end, Fresh fresh) {
        if (end > start) {
            seconds_ += end - start;
            fresh(start, end);
        }
    }

    std::vector<Span> spans_;                                  // disjoint, in order
    double floor_ = -std::numeric_limits<double>::infinity();  // earlier intervals are forgotten
    double seconds_ = 0.0;
};

class DeviceTimes {
public:
    void computed(double start, double end) {
        note(start, end);
        computing_.add(start, end, [&](double from, double to) { both_ += waits_.between(from, to); });
    }
    // An operation waited on the host for its bytes. The device may have computed for earlier operations meanwhile.
    void waited(double start, double end) {
        note(start, end);
        waits_.add(start, end, [&](double from, double to) { both_ += computing_.between(from, to); });
    }
    void transferred(bool fetch, double start, double end) {
        note(start, end);
        (fetch ? fetching_ : writing_).add(start, end);
    }

    // From the first beginning of all to the last end.
    double seconds() const { return std::max(0.0, last_ - first_); }
    double computing() const { return computing_.seconds(); }
    // While an operation waited for bytes and the device did not compute.
    double waiting() const { return std::max(0.0, waits_.seconds() - both_); }
    double fetching() const { return fetching_.seconds(); }
    double writing() const { return writing_.seconds(); }

private:
    void note(double start, double end) {
        first_ = std::min(first_, start);
        last_ = std::max(last_, end);
    }

    Covered computing_;
    Covered waits_;
    Covered fetching_;
    Covered writing_;
    double both_ = 0.0;  // an operation waited, and the device computed
    double first_ = std::numeric_limits<double>::infinity();
    double last_ = -std::numeric_limits<double>::infinity();
};

}  // namespace farpool::pager
