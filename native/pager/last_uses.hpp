// The last uses of arena ranges by owners that have left them.
//
// A device runs behind the program that feeds it: when a range is given to another block, operations that used the range
// before may still be under way there, also where no bytes move (a clean block that leaves, a freed storage). So a range
// that changes hands carries the ordinal of its last use. Whoever writes into it waits for the accesses up to that one; on
// the host there is nothing to wait for.
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
    // Forgets and returns the highest ordinal of these bytes, which get a new owner; -1 where nobody has used them.
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
