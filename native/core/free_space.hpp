// The free units of a space, as a set of holes. Only the holder of a taken extent knows its length.
#pragma once

#include <cstddef>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "core/hole_tree.hpp"

namespace farpool {

class FreeSpace {
public:
    using Holes = std::set<std::pair<std::int64_t, std::int64_t>>;

    explicit FreeSpace(std::int64_t units);
    FreeSpace(FreeSpace&&) = default;
    FreeSpace& operator=(FreeSpace&&) = default;

    // Makes room for so many holes in all: no call needs memory until there are more. No call that fails for lack of memory
    // has changed anything.
    void make_room(std::size_t holes);
    // Takes units by best fit, the lowest hole among equals; returns their offset, -1 if no hole is large enough.
    std::int64_t alloc(std::int64_t units);
    // Offset that `alloc` would return; takes nothing.
    std::int64_t find(std::int64_t units) const;
    // Takes units by first fit, from the lowest hole that is large enough.
    std::int64_t alloc_lowest(std::int64_t units);
    // Takes exactly this range; false, and takes nothing, if a unit of it is taken or outside the space.
    bool take(std::int64_t offset, std::int64_t units);
    // True if `take` would succeed.
    bool fits(std::int64_t offset, std::int64_t units) const;
    void free(std::int64_t offset, std::int64_t units);
    void grow(std::int64_t units);
    // Reduces the space to `units`; false, and changes nothing, if a unit beyond is taken.
    bool shrink(std::int64_t units);
    // The hole that contains `offset`; of 0 units if it is taken.
    Hole hole_at(std::int64_t offset) const;
    std::int64_t largest_hole() const { return tree_.largest(); }
    std::int64_t free_units() const noexcept { return free_; }
    // Holes by size, smallest first: (units, offset).
    const Holes& holes() const noexcept { return by_size_; }

private:
    void add(std::int64_t begin, std::int64_t end);  // after `make_room`
    void drop(Hole hole);

    std::int64_t units_;
    std::int64_t free_;
    HoleTree tree_;
    Holes by_size_;
    std::vector<Holes::node_type> spare_;  // has room for the nodes of all holes
};

}  // namespace farpool
