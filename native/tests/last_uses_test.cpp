// The last uses of arena ranges, against an array with one ordinal for each byte.
#include "pager/last_uses.hpp"

#include <algorithm>
#include <random>
#include <vector>

#include "tests/testing.hpp"

using farpool::pager::LastUses;

TEST("a part of a range can be claimed") {
    LastUses uses;
    uses.leave(0, 100, 7);
    CHECK_EQUAL(uses.claim(40, 60), 7);
    CHECK_EQUAL(uses.claim(40, 60), -1);
    CHECK_EQUAL(uses.claim(0, 10), 7);
    CHECK_EQUAL(uses.claim(0, 200), 7);
    CHECK_EQUAL(uses.claim(0, 200), -1);
}

TEST("a range without a use is not kept") {
    LastUses uses;
    uses.leave(0, 100, -1);
    CHECK_EQUAL(uses.claim(0, 100), -1);
}

TEST("a claim returns the last use of its bytes") {
    std::mt19937 random(1);
    LastUses uses;
    std::vector<std::int64_t> last(256, -1);
    for (std::int64_t ordinal = 0; ordinal < 20'000; ++ordinal) {
        const auto low = static_cast<std::int64_t>(random() % 256);
        const auto high = std::min<std::int64_t>(256, low + 1 + static_cast<std::int64_t>(random() % 40));
        const auto begin = last.begin() + low;
        const auto end = last.begin() + high;
        const std::int64_t highest = *std::max_element(begin, end);
        if (random() % 2 == 0) {
            uses.leave(low, high, ordinal);
            std::fill(begin, end, ordinal);
        } else {
            CHECK_EQUAL(uses.claim(low, high), highest);
            std::fill(begin, end, -1);
        }
    }
}

int main() { return farpool::testing::run(); }
