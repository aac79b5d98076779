// The table of ranges against a tree of nodes.
#include "core/extent_table.hpp"

#include <map>
#include <random>
#include <vector>

#include "tests/testing.hpp"

using farpool::ExtentTable;
using farpool::TakenRange;

namespace {

void check_same(const ExtentTable& table, const std::map<std::int64_t, std::int64_t>& expected) {
    auto next = expected.begin();
    table.each([&](const TakenRange& range) {
        CHECK(next != expected.end());
        CHECK_EQUAL(range.offset, next->first);
        CHECK_EQUAL(range.tag, next->second);
        ++next;
        return true;
    });
    CHECK(next == expected.end());
    CHECK_EQUAL(table.size(), expected.size());
}

}  // namespace

TEST("ranges are found at their offsets after insertions and removals in any order") {
    for (unsigned seed = 0; seed < 20; ++seed) {
        std::mt19937 random(seed);
        ExtentTable table;
        std::map<std::int64_t, std::int64_t> expected;
        for (int step = 0; step < 4000; ++step) {
            // Growing, then shrinking: leaves are split and joined.
            const bool grows = random() % 8 < (step / 1000 % 2 == 0 ? 6u : 2u);
            const std::int64_t offset = static_cast<std::int64_t>(random() % 3000) * 64;
            if (const bool there = expected.contains(offset); there && !grows) {
                table.erase(offset);
                expected.erase(offset);
            } else if (!there && grows) {
                table.insert({offset, 64, step});
                expected.emplace(offset, step);
            }
            const std::int64_t other = static_cast<std::int64_t>(random() % 3000) * 64;
            const TakenRange* found = table.find(other);
            CHECK_EQUAL(found != nullptr, expected.contains(other));
            CHECK(found == nullptr || found->tag == expected.at(other));
        }
        check_same(table, expected);
        while (!expected.empty()) {  // from the start, the end and the middle
            auto at = expected.begin();
            std::advance(at, static_cast<std::ptrdiff_t>(random() % expected.size()));
            table.erase(at->first);
            expected.erase(at);
        }
        check_same(table, expected);
        table.insert({0, 64, 1});
        CHECK(table.find(0) != nullptr);
    }
}

TEST("a visit stops when its callback returns false") {
    ExtentTable table;
    for (std::int64_t offset = 0; offset < 1000; ++offset) {
        table.insert({offset, 1, offset});
    }
    int visited = 0;
    table.each([&](const TakenRange&) { return ++visited < 100; });
    CHECK_EQUAL(visited, 100);
}

int main() { return farpool::testing::run(); }
