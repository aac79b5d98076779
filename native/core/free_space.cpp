#include "core/free_space.hpp"

#include <utility>

#include "core/room.hpp"

namespace farpool {

FreeSpace::FreeSpace(std::int64_t units) : units_(units), free_(units) {
    make_room(1);
    add(0, units);
}

void FreeSpace::make_room(std::size_t holes) {
    tree_.make_room(holes);
    farpool::make_room(spare_, holes);
    while (by_size_.size() + spare_.size() < holes) {
        Holes one{{0, 0}};
        spare_.push_back(one.extract(one.begin()));
    }
}

void FreeSpace::add(std::int64_t begin, std::int64_t end) {
    if (begin < end) {
        tree_.insert({begin, end - begin});
        spare_.back().value() = {end - begin, begin};
        by_size_.insert(std::move(spare_.back()));
        spare_.pop_back();
    }
}

void FreeSpace::drop(Hole hole) {
    tree_.erase(hole.offset);
    spare_.push_back(by_size_.extract({hole.nbytes, hole.offset}));
}

Hole FreeSpace::hole_at(std::int64_t offset) const {
    const Hole hole = tree_.at_or_below(offset);
    return hole.nbytes > 0 && offset < hole.offset + hole.nbytes ? hole : Hole{offset, 0};
}

std::int64_t FreeSpace::find(std::int64_t units) const {
    const auto found = by_size_.lower_bound({units, 0});
    return found == by_size_.end() ? -1 : found->second;
}

std::int64_t FreeSpace::alloc(std::int64_t units) {
    const std::int64_t offset = find(units);
    if (offset >= 0) {
        take(offset, units);
    }
    return offset;
}

std::int64_t FreeSpace::alloc_lowest(std::int64_t units) {
    const Hole hole = tree_.first_fit(units);
    if (hole.nbytes == 0) {
        return -1;
    }
    take(hole.offset, units);
    return hole.offset;
}

bool FreeSpace::fits(std::int64_t offset, std::int64_t units) const {
    if (offset < 0 || units < 1 || offset > units_ - units) {
        return false;
    }
    const Hole hole = hole_at(offset);
    return hole.nbytes > 0 && offset + units <= hole.offset + hole.nbytes;
}

bool FreeSpace::take(std::int64_t offset, std::int64_t units) {
    if (!fits(offset, units)) {
        return false;
    }
    const Hole hole = hole_at(offset);
    make_room(by_size_.size() + 1);
    drop(hole);
    add(hole.offset, offset);
    add(offset + units, hole.offset + hole.nbytes);
    free_ -= units;
    return true;
}

void FreeSpace::free(std::int64_t offset, std::int64_t units) {
    std::int64_t begin = offset;
    std::int64_t end = offset + units;
    const Hole below = tree_.at_or_below(offset);
    const Hole above = hole_at(end);
    const bool joins_below = below.nbytes > 0 && below.offset + below.nbytes == offset;
    if (!joins_below && above.nbytes == 0) {
        make_room(by_size_.size() + 1);
    }
    if (above.nbytes > 0) {
        drop(above);
        end = above.offset + above.nbytes;
    }
    if (joins_below) {
        drop(below);
        begin = below.offset;
    }
    add(begin, end);
    free_ += units;
}

void FreeSpace::grow(std::int64_t units) {
    const std::int64_t more = units - units_;
    if (more > 0) {
        free(units_, more);
        units_ = units;
    }
}

bool FreeSpace::shrink(std::int64_t units) {
    if (units < units_) {
        const std::int64_t less = units_ - units;
        if (!take(units, less)) {
            return false;
        }
        units_ = units;
    }
    return true;
}

}  // namespace farpool
