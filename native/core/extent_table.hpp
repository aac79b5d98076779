// A sorted table of ranges by offset, in leaves of up to 64 ranges: 24 bytes a range instead of the 64 of a tree of nodes, and
// fewer cache misses on the way to it. Ranges that are inserted in order of offset fill their leaves.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>
#include <utility>

namespace farpool {

struct TakenRange {
    std::int64_t offset;
    std::int64_t nbytes;
    std::int64_t tag;
};

class ExtentTable {
public:
    // Inserts a range; no other range may begin at its offset.
    void insert(const TakenRange& range) {
        auto at = leaf_of(range.offset);
        if (at == leaves_.end()) {
            at = leaves_.try_emplace(range.offset).first;
        } else if (range.offset < at->first) {  // below all others
            auto lowest = leaves_.extract(at);
            lowest.key() = range.offset;
            at = leaves_.insert(leaves_.begin(), std::move(lowest));
        }
        if (at->second.count == leaf_ranges) {
            at = split(at, range.offset);
        }
        Leaf& leaf = at->second;
        TakenRange* place = leaf.lower_bound(range.offset);
        std::move_backward(place, leaf.end(), leaf.end() + 1);
        *place = range;
        ++leaf.count;
        ++count_;
    }
    // The range that begins at `offset`; null if none does.
    const TakenRange* find(std::int64_t offset) const {
        const auto at = leaf_of(offset);
        if (at == leaves_.end()) {
            return nullptr;
        }
        const TakenRange* place = at->second.lower_bound(offset);
        return place != at->second.end() && place->offset == offset ? place : nullptr;
    }
    // Removes the range that begins at `offset`, which must be there.
    void erase(std::int64_t offset) {
        const auto at = leaf_of(offset);
        Leaf& leaf = at->second;
        TakenRange* place = leaf.lower_bound(offset);
        std::move(place + 1, leaf.end(), place);
        --leaf.count;
        --count_;
        if (leaf.count <= leaf_ranges / 4) {
            join(at);
        }
    }
    std::size_t size() const noexcept { return count_; }
    // Calls `visit` for each range in order of offset, until it returns false.
    template <typename Visit>
    void each(Visit visit) const {
        for (const auto& [low, leaf] : leaves_) {
            for (const TakenRange& range : leaf) {
                if (!visit(range)) {
                    return;
                }
            }
        }
    }

private:
    static constexpr std::size_t leaf_ranges = 64;

    struct Leaf {
        TakenRange* begin() { return ranges.data(); }
        TakenRange* end() { return ranges.data() + count; }
        const TakenRange* begin() const { return ranges.data(); }
        const TakenRange* end() const { return ranges.data() + count; }
        TakenRange* lower_bound(std::int64_t offset) {
            return std::ranges::lower_bound(begin(), end(), offset, {}, &TakenRange::offset);
        }
        const TakenRange* lower_bound(std::int64_t offset) const { return const_cast<Leaf*>(this)->lower_bound(offset); }

        std::size_t count = 0;
        std::array<TakenRange, leaf_ranges> ranges;
    };
    // Leaves by their lowest offset: each holds the ranges from its key up to the next key.
    using Leaves = std::map<std::int64_t, Leaf>;

    // The leaf to which a range at `offset` belongs; the first leaf if `offset` is below all of them.
    template <typename Table>
    static auto leaf_of(Table& leaves, std::int64_t offset) {
        const auto above = leaves.upper_bound(offset);
        return above == leaves.begin() ? above : std::prev(above);
    }
    Leaves::iterator leaf_of(std::int64_t offset) { return leaf_of(leaves_, offset); }
    Leaves::const_iterator leaf_of(std::int64_t offset) const { return leaf_of(leaves_, offset); }

    // Makes room in a full leaf for a range at `offset`; returns the leaf to which it belongs.
    Leaves::iterator split(Leaves::iterator full, std::int64_t offset) {
        Leaf& lower = full->second;
        if (offset > std::prev(lower.end())->offset) {  // ranges in order of offset fill one leaf after the other
            return leaves_.try_emplace(std::next(full), offset);
        }
        TakenRange* half = lower.begin() + leaf_ranges / 2;
        const std::int64_t middle = half->offset;
        const auto upper = leaves_.try_emplace(std::next(full), middle);
        std::copy(half, lower.end(), upper->second.begin());
        upper->second.count = lower.count - leaf_ranges / 2;
        lower.count = leaf_ranges / 2;
        return offset < middle ? full : upper;
    }

    // Merges a leaf that has become small into the one below it if both fit into half a leaf.
    void join(Leaves::iterator small) {
        if (small->second.count == 0) {
            leaves_.erase(small);
            return;
        }
        if (small == leaves_.begin()) {
            return;
        }
        Leaf& lower = std::prev(small)->second;
        if (lower.count + small->second.count <= leaf_ranges / 2) {
            std::copy(small->second.begin(), small->second.end(), lower.end());
            lower.count += small->second.count;
            leaves_.erase(small);
        }
    }

    Leaves leaves_;
    std::size_t count_ = 0;
};

}  // namespace farpool
