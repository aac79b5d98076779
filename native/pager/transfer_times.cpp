#include "pager/transfer_times.hpp"

#include <cstddef>

namespace farpool::pager {

namespace {

// Without a bound, a program whose device never reports its times would fill the memory.
constexpr std::size_t unjudged_max = 1024;

}  // namespace

void TransferTimes::fetched(std::int64_t nbytes, double start, double end, bool ahead) {
    rate_.note(nbytes, start, end);
    const Fetch fetch{nbytes, start, end, ahead};
    if (!late_) {
        judge(fetch);
        return;
    }
    unjudged_.push_back(fetch);
    if (unjudged_.size() > unjudged_max) {
        judge_first();
    }
}

void TransferTimes::computed(double start, double end) {
    computing_.note(start, end);
    while (!unjudged_.empty() && unjudged_.front().end <= end) {
        judge_first();
    }
}

void TransferTimes::judge_first() {
    judge(unjudged_.front());
    unjudged_.pop_front();
}

// Reports the share of the fetch's time in which the program computed, and the share in which blocks were written back: on
// demand, the program would have waited for the fetch during that time.
void TransferTimes::judge(const Fetch& fetch) {
    const double seconds = fetch.end - fetch.start;
    if (seconds > 0) {
        gate_.note_fetch(static_cast<double>(fetch.nbytes), computing_.between(fetch.start, fetch.end) / seconds,
                         writing_.between(fetch.start, fetch.end) / seconds, fetch.ahead);
    }
}

}  // namespace farpool::pager
