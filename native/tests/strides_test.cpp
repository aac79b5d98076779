// Strides: the step that most of the latest accesses took.
#include "pager/strides.hpp"

#include "tests/testing.hpp"

using farpool::pager::Strides;

namespace {

std::vector<std::int64_t> coming_after(const std::vector<std::int64_t>& steps) {
    Strides strides;
    std::int64_t name = 100;
    strides.record(name, 1);
    for (const std::int64_t step : steps) {
        strides.record(name += step, 1);
    }
    std::vector<std::int64_t> ahead = strides.coming(3);
    for (std::int64_t& next : ahead) {
        next -= name;
    }
    return ahead;
}

std::vector<std::int64_t> walk(std::int64_t stride) { return {stride, 2 * stride, 3 * stride}; }

}  // namespace

TEST("the majority of the latest steps is the stride") {
    CHECK_EQUAL(coming_after({1, 1, 1, 1}), walk(1));
    CHECK_EQUAL(coming_after({3, 3, 3, 3, 3}), walk(3));
    CHECK_EQUAL(coming_after({-2, -2, -2, -2}), walk(-2));
    CHECK_EQUAL(coming_after({1, 9, 1, 1, 1, -4, 1, 1}), walk(1));
    CHECK_EQUAL(coming_after({1, 1, 1, 1, 1, 1, 1, 1, 7, 7, 7, 7}), walk(7));
}

TEST("without a majority no access is predicted") {
    CHECK(coming_after({1, 2, 3, 4, 5, 6}).empty());
    CHECK(coming_after({5, 5}).empty());
    CHECK(coming_after({4, 1, 4, 1, 4, 1, 4, 1}).empty());
}

TEST("runs of several blocks are walked block by block") {
    Strides strides;
    for (std::int64_t first = 0; first < 20; first += 4) {
        strides.record(first, 4);
    }
    CHECK_EQUAL(strides.coming(2), (std::vector<std::int64_t>{20, 21}));
}

int main() { return farpool::testing::run(); }
