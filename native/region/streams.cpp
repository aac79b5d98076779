#include "region/streams.hpp"

#include <algorithm>

namespace farpool::region {

namespace {

constexpr std::size_t most_threads = 64;
constexpr Page judged_after = 256;  // pages whose use or waste is known
constexpr Page missed_before_trial = 64;
constexpr Page trial = 8;
constexpr int steps_ahead = 4;  // single pages, of a thread that takes steps

}  // namespace

Streams::Thread& Streams::of(std::uint32_t thread) {
    if (threads_.size() >= most_threads && !threads_.contains(thread)) {
        threads_.erase(std::ranges::min_element(threads_, {}, [](const auto& one) { return one.second.noted; }));
    }
    return threads_[thread];
}

std::vector<Run> Streams::note(std::uint32_t number, Page first, Page count, bool eager, bool loaded) {
    Thread& thread = of(number);
    thread.noted = ++notes_;
    const auto distance = [&](const Trail& trail) { return trail.length > 0 ? first - trail.next : ~Page{0}; };
    const auto found = std::ranges::min_element(thread.trails, {}, distance);
    if (found->length == 0 || distance(*found) > (loaded ? 2 * found->length : 0)) {
        Trail& oldest = *std::ranges::min_element(thread.trails, {}, &Trail::noted);
        oldest = {first + count, 1, notes_};
        thread.strides.record(first, 1);
        std::vector<Run> runs;
        if (eager && limit_ > 1) {
            runs.push_back({oldest.next, oldest.length = std::max<Page>(limit_ / 4, 1)});
        } else if (limit_ > 1) {
            for (const std::int64_t page : thread.strides.coming(steps_ahead)) {
                if (page >= 0) {
                    runs.push_back({static_cast<Page>(page), 1});
                }
            }
        }
        return runs;
    }
    found->noted = notes_;
    found->next = first + count;
    if (limit_ <= 1) {
        if (++missed_ >= missed_before_trial) {
            limit_ = std::min(trial, longest_);
            missed_ = 0;
        }
        return {};
    }
    found->length = std::min(2 * found->length, limit_);
    std::vector<Run> runs{{found->next, found->length}};
    if (found->length == limit_) {
        // A second one, so that a tier has its next run to read while another thread puts the bytes of this one in place.
        runs.push_back({found->next + found->length, found->length});
    }
    return runs;
}

Page Streams::expected(std::uint32_t number, Page first) const {
    const auto thread = threads_.find(number);
    if (thread == threads_.end()) {
        return 1;
    }
    for (const Trail& trail : thread->second.trails) {
        if (trail.length > 0 && trail.next == first) {
            return trail.length;
        }
    }
    return 1;
}

Page Streams::note_write(std::uint32_t number, Page page) {
    Thread& thread = of(number);
    thread.noted = ++notes_;
    thread.write_length =
        thread.write_length > 0 && thread.write_next == page ? std::min(2 * thread.write_length, longest_) : 1;
    thread.write_next = page + thread.write_length;
    return thread.write_length;
}

void Streams::judge(Page used, Page wasted) {
    used_ += used;
    wasted_ += wasted;
    if (used_ + wasted_ < judged_after) {
        return;
    }
    if (wasted_ > used_ / 2) {
        limit_ = std::max<Page>(limit_ / 2, 1);
    } else if (wasted_ < used_ / 8) {
        limit_ = std::min(2 * limit_, longest_);
    }
    used_ /= 2;
    wasted_ /= 2;
}

}  // namespace farpool::region
