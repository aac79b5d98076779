#include "core/results.hpp"

#include <algorithm>
#include <chrono>

namespace farpool {

std::chrono::steady_clock::time_point Results::deadline_after(double seconds) {
    // A century stands for "no limit": larger values would overflow the clock.
    const double bounded = std::clamp(seconds, 0.0, 100.0 * 365 * 86400);
    return std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(bounded));
}

void Results::add(Result result) {
    if (result.cancelled || result.error.has_value()) {
        failures_.insert(result.id);
        failed_ = true;
    }
    ++seen_.results;
    results_.push_back(std::move(result));
}

bool Results::settle() {
    const bool failed = std::exchange(failed_, false);
    seen_.nudges += failed ? 1 : 0;  // a thread that waits for more results must check again
    return failed || (!targets_.empty() && seen_.results >= *targets_.begin());
}

std::vector<Result> Results::poll() {
    failures_.clear();
    return std::exchange(results_, {});
}

}  // namespace farpool
