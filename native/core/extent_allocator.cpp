#include "core/extent_allocator.hpp"

#include <string>

#include "core/error.hpp"

namespace farpool {

ExtentAllocator::ExtentAllocator(std::int64_t capacity, std::int64_t alignment)
    : capacity_(capacity), alignment_(alignment), space_(capacity) {
    if (capacity < 0) {
        fail_value("ExtentAllocator: capacity must be 0 or more, got " + std::to_string(capacity));
    }
    if (alignment < 1) {
        fail_value("ExtentAllocator: alignment must be 1 or more, got " + std::to_string(alignment));
    }
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

std::int64_t ExtentAllocator::note(std::int64_t offset, std::int64_t nbytes, std::int64_t tag) {
    if (offset >= 0) {
        try {
            taken_.insert({offset, nbytes, tag});
        } catch (...) {
            space_.free(offset, nbytes);  // needs no memory: the hole has left a node
            throw;
        }
        used_ += nbytes;
    }
    return offset;
}

std::int64_t ExtentAllocator::alloc(std::int64_t nbytes, std::int64_t tag) {
    const std::int64_t size = rounded(nbytes);
    return size < 0 ? -1 : note(space_.alloc(size), size, tag);
}

std::int64_t ExtentAllocator::alloc_lowest(std::int64_t nbytes) {
    const std::int64_t size = rounded(nbytes);
    return size < 0 ? -1 : note(space_.alloc_lowest(size), size, 0);
}

std::int64_t ExtentAllocator::find(std::int64_t nbytes) const {
    const std::int64_t size = rounded(nbytes);
    return size < 0 ? -1 : space_.find(size);
}

bool ExtentAllocator::fits(std::int64_t offset, std::int64_t nbytes) const {
    const std::int64_t size = rounded(nbytes);
    return size >= 0 && space_.fits(offset, size);
}

bool ExtentAllocator::alloc_at(std::int64_t offset, std::int64_t nbytes, std::int64_t tag) {
    if (offset < 0 || offset % alignment_ != 0) {
        fail_value("ExtentAllocator: offset must be 0 or more and a multiple of " + std::to_string(alignment_) + ", got " +
                   std::to_string(offset));
    }
    const std::int64_t size = rounded(nbytes);
    if (size < 0 || !space_.take(offset, size)) {
        return false;
    }
    note(offset, size, tag);
    return true;
}

std::int64_t ExtentAllocator::free(std::int64_t offset) {
    const TakenRange* found = taken_.find(offset);
    if (found == nullptr) {
        fail_value("ExtentAllocator: no allocated range begins at offset " + std::to_string(offset));
    }
    const std::int64_t nbytes = found->nbytes;
    space_.free(offset, nbytes);
    taken_.erase(offset);
    used_ -= nbytes;
    return nbytes;
}

void ExtentAllocator::grow(std::int64_t capacity) {
    if (capacity < capacity_) {
        fail_value("ExtentAllocator: grow from " + std::to_string(capacity_) + " to " + std::to_string(capacity) +
                   " would lower the capacity; use shrink");
    }
    space_.grow(capacity);
    capacity_ = capacity;
}

bool ExtentAllocator::shrink(std::int64_t capacity) {
    if (capacity < 0 || capacity > capacity_) {
        fail_value("ExtentAllocator: shrink needs a capacity from 0 to " + std::to_string(capacity_) + ", got " +
                   std::to_string(capacity));
    }
    if (!space_.shrink(capacity)) {
        return false;
    }
    capacity_ = capacity;
    return true;
}

std::vector<std::pair<std::int64_t, std::int64_t>> ExtentAllocator::ranges() const {
    std::vector<std::pair<std::int64_t, std::int64_t>> ranges;
    ranges.reserve(taken_.size());
    taken_.each([&](const TakenRange& range) {
        ranges.emplace_back(range.offset, range.nbytes);
        return true;
    });
    return ranges;
}

std::optional<std::int64_t> ExtentAllocator::tag(std::int64_t offset) const {
    const TakenRange* found = taken_.find(offset);
    return found == nullptr ? std::nullopt : std::optional(found->tag);
}

std::vector<std::int64_t> ExtentAllocator::tags() const {
    std::vector<std::int64_t> tags;
    tags.reserve(taken_.size());
    taken_.each([&](const TakenRange& range) {
        tags.push_back(range.tag);
        return true;
    });
    return tags;
}

}  // namespace farpool
