// The times of a device, against an array with one entry for each second.
#include "pager/device_times.hpp"

#include <algorithm>
#include <array>
#include <random>

#include "tests/testing.hpp"

using farpool::pager::Covered;
using farpool::pager::DeviceTimes;

namespace {

constexpr int horizon = 4096;
using Seconds = std::array<bool, horizon>;

void mark(Seconds& seconds, int start, int end) { std::fill(seconds.begin() + start, seconds.begin() + end, true); }

int count(const Seconds& seconds) { return static_cast<int>(std::ranges::count(seconds, true)); }

}  // namespace

TEST("intervals that overlap count once, in any order") {
    std::mt19937 random(1);
    Covered covered;
    Seconds seconds{};
    for (int step = 0; step < 1000; ++step) {
        // In the order of their ends, except for some.
        const int end = std::min(horizon, 4 * step + 1 + static_cast<int>(random() % 60));
        const int start = std::max(0, end - static_cast<int>(random() % 8));
        covered.add(start, end);
        mark(seconds, start, end);
        CHECK_EQUAL(covered.seconds(), count(seconds));
        const int from = static_cast<int>(random() % horizon);
        const int to = from + static_cast<int>(random() % static_cast<unsigned>(horizon - from));
        CHECK_EQUAL(covered.between(from, to), std::count(seconds.begin() + from, seconds.begin() + to, true));
    }
    CHECK(count(seconds) < horizon - 100);
}

TEST("only the latest intervals are remembered, and the sum stays") {
    Covered covered;
    for (int step = 0; step < 100'000; ++step) {
        covered.add(2 * step, 2 * step + 1);
    }
    CHECK_EQUAL(covered.seconds(), 100'000);
    CHECK_EQUAL(covered.between(199'000, 200'000), 500);
    CHECK_EQUAL(covered.between(0, 1000), 0);
    covered.add(0, 10);  // may have been counted
    CHECK_EQUAL(covered.seconds(), 100'000);
    covered.add(5, 5);
    covered.add(6, 5);
    CHECK_EQUAL(covered.seconds(), 100'000);
}

TEST("a device waits while an operation waits and it does not compute, whichever is reported first") {
    std::mt19937 random(2);
    for (int round = 0; round < 50; ++round) {
        DeviceTimes times;
        Seconds computing{}, waiting{}, fetching{}, writing{};
        int last = 0;
        int first = horizon;
        for (int step = 0; step < 200; ++step) {
            const int start = step * 20 + static_cast<int>(random() % 40);
            const int end = std::min(horizon, start + 1 + static_cast<int>(random() % 30));
            if (start >= end) {
                continue;
            }
            first = std::min(first, start);
            last = std::max(last, end);
            switch (random() % 4) {
                case 0:
                    times.computed(start, end), mark(computing, start, end);
                    break;
                case 1:
                    times.waited(start, end), mark(waiting, start, end);
                    break;
                case 2:
                    times.transferred(true, start, end), mark(fetching, start, end);
                    break;
                default:
                    times.transferred(false, start, end), mark(writing, start, end);
            }
        }
        int alone = 0;
        for (std::size_t second = 0; second < horizon; ++second) {
            alone += waiting[second] && !computing[second] ? 1 : 0;
        }
        CHECK_EQUAL(times.seconds(), last - first);
        CHECK_EQUAL(times.computing(), count(computing));
        CHECK_EQUAL(times.waiting(), alone);
        CHECK_EQUAL(times.fetching(), count(fetching));
        CHECK_EQUAL(times.writing(), count(writing));
    }
}

int main() { return farpool::testing::run(); }
