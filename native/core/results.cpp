#include "core/results.hpp"

#include <algorithm>
#include <chrono>
#include <iterator>

namespace farpool {

std::chrono::steady_clock::time_point Results::deadline_after(double seconds) {
    // A century stands for "no limit": larger values would overflow the clock.
    const double bounded = std::clamp(seconds, 0.0, 100.0 * 365 * 86400);
    return std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(bounded));
}

namespace {

bool is_failure(const Result& result) { return result.cancelled || result.error.has_value(); }

}  // namespace

void Results::add(Result result) noexcept {
    if (is_failure(result)) {
        ++failures_;
        failed_ = true;
    }
    ++seen_.results;
    results_.push_back(std::move(result));
}

bool Results::has_failure(std::int64_t id) const {
    if (failures_ == 0) {
        return false;
    }
    const auto latest = std::find_if(results_.rbegin(), results_.rend(), [&](const Result& one) { return one.id == id; });
    return latest != results_.rend() && is_failure(*latest);
}

bool Results::settle() {
    const bool failed = std::exchange(failed_, false);
    seen_.nudges += failed ? 1 : 0;  // a thread that waits for more results must check again
    for (const Target* target = targets_; target != nullptr; target = target->next()) {
        if (seen_.results >= target->total()) {
            return true;
        }
    }
    return failed;
}

std::vector<Result> Results::poll() {
    std::vector<Result> polled;
    polled.reserve(results_.size());
    std::ranges::move(results_, std::back_inserter(polled));
    results_.clear();  // and keeps its room
    failures_ = 0;
    return polled;
}

}  // namespace farpool
