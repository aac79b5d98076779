#include "extent_allocator.hpp"

#include <string>

#include "error.hpp"

namespace farpool {

ExtentAllocator::ExtentAllocator(std::int64_t capacity, std::int64_t alignment) : capacity_(capacity), alignment_(alignment) {
    if (capacity < 0) {
        fail_value("ExtentAllocator: capacity must be 0 or more, got " + std::to_string(capacity));
    }
    if (alignment < 1) {
        fail_value("ExtentAllocator: alignment must be 1 or more, got " + std::to_string(alignment));
    }
    add_hole(0, capacity);
}

std::int64_t ExtentAllocator::rounded(std::int64_t nbytes) const {
    if (nbytes < 1) {
        fail_value("ExtentAllocator: nbytes must be 1 or more, got " + std::to_string(nbytes));
    }
    if (nbytes > capacity_) {
        return -1;
    }
    const std::int64_t rest = nbytes % alignment_;
    const std::int64_t padding = rest == 0 ? 0 : alignment_ - rest;
    return padding > capacity_ - nbytes ? -1 : nbytes + padding;
}

void ExtentAllocator::add_hole(std::int64_t begin, std::int64_t end) {
    if (begin < end) {
        holes_.insert({begin, end - begin});
        by_size_.emplace(end - begin, begin);
    }
}

void ExtentAllocator::drop_hole(Hole hole) {
    holes_.erase(hole.offset);
    by_size_.erase({hole.nbytes, hole.offset});
}

void ExtentAllocator::take(Hole hole, std::int64_t offset, std::int64_t nbytes, std::int64_t tag) {
    drop_hole(hole);
    add_hole(hole.offset, offset);
    add_hole(offset + nbytes, hole.offset + hole.nbytes);
    taken_.emplace(offset, Taken{nbytes, tag});
    used_ += nbytes;
}

std::int64_t ExtentAllocator::alloc(std::int64_t nbytes, std::int64_t tag) {
    const std::int64_t size = rounded(nbytes);
    if (size < 0) {
        return -1;
    }
    const auto found = by_size_.lower_bound({size, 0});
    if (found == by_size_.end()) {
        return -1;
    }
    const Hole hole{found->second, found->first};
    take(hole, hole.offset, size, tag);
    return hole.offset;
}

std::int64_t ExtentAllocator::alloc_lowest(std::int64_t nbytes) {
    const std::int64_t size = rounded(nbytes);
    if (size < 0) {
        return -1;
    }
    const Hole hole = holes_.first_fit(size);
    if (hole.nbytes == 0) {
        return -1;
    }
    take(hole, hole.offset, size, 0);
    return hole.offset;
}

bool ExtentAllocator::alloc_at(std::int64_t offset, std::int64_t nbytes, std::int64_t tag) {
    if (offset < 0 || offset % alignment_ != 0) {
        fail_value("ExtentAllocator: offset must be 0 or more and a multiple of " + std::to_string(alignment_) + ", got " +
                   std::to_string(offset));
    }
    const std::int64_t size = rounded(nbytes);
    if (size < 0) {
        return false;
    }
    const Hole hole = holes_.at_or_below(offset);
    if (hole.nbytes == 0 || offset - hole.offset > hole.nbytes || size > hole.nbytes - (offset - hole.offset)) {
        return false;
    }
    take(hole, offset, size, tag);
    return true;
}

std::int64_t ExtentAllocator::free(std::int64_t offset) {
    const auto found = taken_.find(offset);
    if (found == taken_.end()) {
        fail_value("ExtentAllocator: no allocated range begins at offset " + std::to_string(offset));
    }
    const std::int64_t nbytes = found->second.nbytes;
    std::int64_t begin = offset;
    std::int64_t end = offset + nbytes;
    if (const Hole below = holes_.at_or_below(offset); below.nbytes > 0 && below.offset + below.nbytes == begin) {
        drop_hole(below);
        begin = below.offset;
    }
    if (const Hole above = holes_.at_or_below(end); above.nbytes > 0 && above.offset == end) {
        drop_hole(above);
        end += above.nbytes;
    }
    add_hole(begin, end);
    taken_.erase(found);
    used_ -= nbytes;
    return nbytes;
}

void ExtentAllocator::grow(std::int64_t capacity) {
    if (capacity < capacity_) {
        fail_value("ExtentAllocator: grow from " + std::to_string(capacity_) + " to " + std::to_string(capacity) +
                   " would lower the capacity; use shrink");
    }
    std::int64_t begin = capacity_;
    if (const Hole last = holes_.at_or_below(capacity_); last.nbytes > 0 && last.offset + last.nbytes == capacity_) {
        drop_hole(last);
        begin = last.offset;
    }
    add_hole(begin, capacity);
    capacity_ = capacity;
}

bool ExtentAllocator::shrink(std::int64_t capacity) {
    if (capacity < 0 || capacity > capacity_) {
        fail_value("ExtentAllocator: shrink needs a capacity from 0 to " + std::to_string(capacity_) + ", got " +
                   std::to_string(capacity));
    }
    if (!taken_.empty() && taken_.rbegin()->first + taken_.rbegin()->second.nbytes > capacity) {
        return false;
    }
    if (capacity < capacity_) {
        // Nothing is taken beyond the new capacity, so the bytes up to the old one belong to a single hole.
        const Hole last = holes_.at_or_below(capacity_);
        drop_hole(last);
        add_hole(last.offset, capacity);
        capacity_ = capacity;
    }
    return true;
}

std::vector<std::pair<std::int64_t, std::int64_t>> ExtentAllocator::ranges() const {
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    ranges.reserve(taken_.size());
    for (const auto& [offset, taken] : taken_) {
        ranges.emplace_back(offset, taken.nbytes);
    }
    return ranges;
}

std::optional<std::int64_t> ExtentAllocator::tag(std::int64_t offset) const {
    const auto found = taken_.find(offset);
    return found == taken_.end() ? std::nullopt : std::optional(found->second.tag);
}

std::vector<std::int64_t> ExtentAllocator::tags() const {
    std::vector<std::int64_t> tags;
    tags.reserve(taken_.size());
    for (const auto& [offset, taken] : taken_) {
        tags.push_back(taken.tag);
    }
    return tags;
}

}  // namespace farpool
