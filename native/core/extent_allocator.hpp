// An allocator of offsets in [0, capacity): best fit, first fit or a place of the caller's choice; deterministic, logarithmic.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/extent_table.hpp"
#include "core/free_space.hpp"

namespace farpool {

class ExtentAllocator {
public:
    ExtentAllocator(std::int64_t capacity, std::int64_t alignment);

    // Makes room for one more range, so that `free` needs no memory for it, nor for those before it.
    void make_room() { space_.make_room(taken_.size() + 2); }
    // Takes a range by best fit and returns its offset, -1 if none fits. `tag`: a number of the caller, kept with the range.
    std::int64_t alloc(std::int64_t nbytes, std::int64_t tag = 0);
    std::int64_t alloc_lowest(std::int64_t nbytes);
    bool alloc_at(std::int64_t offset, std::int64_t nbytes, std::int64_t tag = 0);
    // Offset that `alloc` would return, -1 if it would fail; takes nothing.
    std::int64_t find(std::int64_t nbytes) const;
    // True if `alloc_at` would succeed.
    bool fits(std::int64_t offset, std::int64_t nbytes) const;
    std::int64_t free(std::int64_t offset);
    void grow(std::int64_t capacity);
    bool shrink(std::int64_t capacity);

    std::int64_t capacity() const noexcept { return capacity_; }
    std::int64_t used() const noexcept { return used_; }
    std::int64_t largest_hole() const { return space_.largest_hole() / alignment_ * alignment_; }
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges() const;
    // Tag of the range that begins at `offset`; empty if none begins there.
    std::optional<std::int64_t> tag(std::int64_t offset) const;
    std::vector<std::int64_t> tags() const;
    // Calls `visit(offset, nbytes, tag)` for each range in order of offset, until it returns false.
    template <typename Visit>
    void each(Visit visit) const {
        taken_.each([&](const TakenRange& range) { return visit(range.offset, range.nbytes, range.tag); });
    }

private:
    std::int64_t rounded(std::int64_t nbytes) const;  // -1 if it cannot fit at all
    std::int64_t note(std::int64_t offset, std::int64_t nbytes, std::int64_t tag);

    std::int64_t capacity_;
    std::int64_t alignment_;
    std::int64_t used_ = 0;
    FreeSpace space_;
    ExtentTable taken_;  // with rounded sizes
};

}  // namespace farpool
