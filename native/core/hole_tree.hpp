// A search tree of holes by offset, in which each subtree knows its largest hole, so that first fit is logarithmic.
//
// A treap whose priorities are a hash of the offset: its shape depends on the set of holes alone, not on the order of
// insertion, so that all runs are alike.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace farpool {

struct Hole {
    std::int64_t offset;
    std::int64_t nbytes;
};

class HoleTree {
public:
    // Makes room for so many holes in all.
    void make_room(std::size_t holes);
    void insert(Hole hole);
    void erase(std::int64_t offset);
    // Lowest hole of at least `nbytes`; nbytes 0 in the result if there is none.
    Hole first_fit(std::int64_t nbytes) const;
    // The nearest hole that begins at or below `offset`; nbytes 0 in the result if there is none.
    Hole at_or_below(std::int64_t offset) const;
    std::int64_t largest() const { return root_ == none ? 0 : nodes_[index(root_)].largest; }

private:
    static constexpr std::int32_t none = -1;
    struct Node {
        Hole hole;
        std::int64_t largest;
        std::uint64_t priority;
        std::int32_t left;
        std::int32_t right;
    };
    static std::size_t index(std::int32_t node) { return static_cast<std::size_t>(node); }
    std::int64_t largest_of(std::int32_t node) const { return node == none ? 0 : nodes_[index(node)].largest; }
    void update(std::int32_t node);
    void split(std::int32_t node, std::int64_t offset, std::int32_t& below, std::int32_t& rest);
    std::int32_t merge(std::int32_t left, std::int32_t right);

    std::vector<Node> nodes_;
    std::vector<std::int32_t> spare_;
    std::int32_t root_ = none;
};

}  // namespace farpool
