// The last uses of arena ranges by owners that no longer have them.
//
// A device runs behind the program that feeds it. When a range is given to another block, operations that used the range before
// may still be running there, also if no bytes move (a clean block that is evicted, a freed storage). So a range that is given
// to a new owner carries the ordinal of its last use, and a writer waits for the accesses up to that one. On the host there is
// nothing to wait for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <map>

namespace farpool::pager {

class LastUses {
public:
    // Notes that the bytes from `low` to `high` have lost their owner; no access after `ordinal` has used them.
    void leave(std::int64_t low, std::int64_t high, std::int64_t ordinal) {
        ordinal = std::max(ordinal, claim(low, high));
        if (ordinal >= 0) {
            ranges_.insert_or_assign(low, Range{high, ordinal});
        }
    }
    // Forgets and returns the highest ordinal of these bytes, which get a new owner; -1 if no access has used them.
    std::int64_t claim(std::int64_t low, std::int64_t high) {
        std::int64_t ordinal = -1;
        auto at = ranges_.lower_bound(low);
        if (at != ranges_.begin() && std::prev(at)->second.high > low) {
            --at;
        }
        while (at != ranges_.end() && at->first < high) {
            const auto [start, range] = *at;
            ordinal = std::max(ordinal, range.ordinal);
            at = ranges_.erase(at);
            if (start < low) {
                ranges_.emplace(start, Range{low, range.ordinal});
            }
            if (range.high > high) {
                at = ranges_.emplace(high, Range{range.high, range.ordinal}).first;
            }
        }
        return ordinal;
    }

private:
    struct Range {
        std::int64_t high;
        std::int64_t ordinal;
    };

    std::map<std::int64_t, Range> ranges_;  // by the lowest byte; they do not overlap
};

}  // namespace farpool::pager
