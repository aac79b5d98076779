// Room for objects: which extents are free, which of them the system has backed with memory, and who has to go.
#include <algorithm>

#include "node/objects.hpp"

namespace farpool {

namespace {

constexpr std::uint64_t backing_slots = 65536;
constexpr std::uint64_t page_nbytes = 4096;

constexpr std::uint64_t down(std::uint64_t value, std::uint64_t step) { return value / step * step; }
constexpr std::uint64_t up(std::uint64_t value, std::uint64_t step) { return down(value + step - 1, step); }

}  // namespace

void Objects::free_extent(std::uint64_t offset, std::uint32_t units) {
    space_->free(static_cast<std::int64_t>((offset - segment_header_nbytes) / unit_nbytes), units);
    give(units);
}

void Objects::take(std::uint32_t units) {
    budget_.used += std::uint64_t{units} * unit_nbytes;
    budget_.objects += std::uint64_t{units} * unit_nbytes;
}

void Objects::give(std::uint32_t units) {
    budget_.used -= std::uint64_t{units} * unit_nbytes;
    budget_.objects -= std::uint64_t{units} * unit_nbytes;
}

std::optional<std::uint64_t> Objects::alloc(std::uint32_t units) {
    const std::uint64_t nbytes = std::uint64_t{units} * unit_nbytes;
    // Nothing is evicted for what would not fit in the end.
    if (!index_->reserve() || budget_.left() + reclaimable() < nbytes) {
        return std::nullopt;
    }
    while (budget_.left() < nbytes) {
        if (!evict_one()) {
            return std::nullopt;
        }
    }
    std::int64_t first = space_->alloc(units);
    while (first < 0) {  // room enough, but in pieces
        const std::uint64_t before = counts_.evictions + counts_.demotions;
        evict_around(units);
        if (counts_.evictions + counts_.demotions == before) {
            return std::nullopt;
        }
        first = space_->alloc(units);
    }
    const std::uint64_t offset = segment_header_nbytes + static_cast<std::uint64_t>(first) * unit_nbytes;
    take(units);
    if (!back_extent(offset, units)) {
        free_extent(offset, units);
        return std::nullopt;
    }
    return offset;
}

bool Objects::back_visited(std::uint64_t slot) {
    if (slot >= visited_backed_) {
        const std::uint64_t room = visited_.memory.nbytes() - segment_header_nbytes;
        const std::uint64_t slots = std::min(slot + backing_slots, room);
        if (!back(visited_, segment_header_nbytes + visited_backed_, slots - visited_backed_)) {
            return false;
        }
        visited_backed_ = slots;
    }
    return true;
}

bool Objects::evict_one() {
    if (const policy::Slot victim = sieve_->victim({}, in_use()); victim != policy::no_slot) {
        leave(victim);
        return true;
    }
    // What stays in memory of an object in the file.
    if (const policy::Slot victim = lower_->victim({}, in_use()); victim != policy::no_slot) {
        drop_knowledge(victim);
        ++counts_.evictions;
        return true;
    }
    return false;
}

// Evicts one and then its neighbours above, until they leave a hole of so many units or one of them is in use. Without this a
// large object would wait until chance had emptied one place.
void Objects::evict_around(std::uint32_t units) {
    policy::Slot slot = sieve_->victim({}, in_use());
    if (slot == policy::no_slot) {
        slot = lower_->victim({}, in_use());
    }
    if (slot == policy::no_slot) {
        return;
    }
    for (;;) {
        const Index::Entry entry = index_->at(slot);
        const std::uint64_t end = entry.offset + std::uint64_t{entry.units} * unit_nbytes;
        leave(slot);
        // By the last unit: what stays in memory of an object in the file may lie before it.
        const Hole hole = space_->hole_at(static_cast<std::int64_t>((end - segment_header_nbytes) / unit_nbytes) - 1);
        const std::uint64_t next = segment_header_nbytes + static_cast<std::uint64_t>(hole.offset + hole.nbytes) * unit_nbytes;
        if (hole.nbytes == 0 || hole.nbytes >= units || next >= segment_header_nbytes + capacity()) {
            return;
        }
        slot = header_at(next).slot;  // a hint: whoever may write the data segment may have changed it
        if (!index_->is_live(slot) || index_->at(slot).offset != next || held_.contains(next) ||
            (index_->at(slot).blocks != 0 && sieve_->size() > 0)) {
            return;
        }
    }
}

bool Objects::make_room(std::uint64_t nbytes) {
    while (budget_.left() < nbytes) {
        if (!evict_one()) {
            return false;
        }
    }
    return true;
}

void Objects::sweep(std::size_t slots) {
    const std::uint32_t used = index_->slots_used();
    const std::uint64_t now = now_milliseconds();
    for (std::size_t step = 0; step < std::min<std::size_t>(slots, used); ++step) {
        sweep_at_ = sweep_at_ + 1 < used ? sweep_at_ + 1 : 0;
        if (index_->is_live(sweep_at_)) {
            const std::uint64_t expiry = index_->at(sweep_at_).expiry;
            if (expiry != 0 && expiry <= now) {
                drop_knowledge(sweep_at_);
                ++counts_.expired;
            }
        }
    }
}

void Objects::trim() {
    for (const auto& [units, first] : space_->holes()) {
        const std::uint64_t offset = segment_header_nbytes + static_cast<std::uint64_t>(first) * unit_nbytes;
        const std::uint64_t begin = up(offset, page_nbytes);
        const std::uint64_t hole_end = offset + static_cast<std::uint64_t>(units) * unit_nbytes;
        const bool is_last = hole_end == data_.memory.nbytes();  // nothing shares its last page, which may be a part of one
        const std::uint64_t end = is_last ? up(hole_end, page_nbytes) : down(hole_end, page_nbytes);
        if (begin < end && mark_pages(begin, end, false) > 0) {
            discard(data_, begin, end - begin);
        }
    }
    trimmed_ = budget_.backed;
}

// Whole chunks, so that few calls of the system are needed; where that would be more than the node may take, what is free goes
// back, and only the pages of the extent are backed.
bool Objects::back_extent(std::uint64_t offset, std::uint32_t units) {
    const std::uint64_t begin = down(offset, page_nbytes);
    const std::uint64_t end = up(offset + std::uint64_t{units} * unit_nbytes, page_nbytes);
    const auto first = backed_.begin() + static_cast<std::ptrdiff_t>(begin / page_nbytes);
    const auto last = backed_.begin() + static_cast<std::ptrdiff_t>(end / page_nbytes);
    if (std::find(first, last, false) == last) {
        return true;
    }
    const std::uint64_t chunks_begin = down(begin, chunk_nbytes);
    const std::uint64_t chunks_end = std::min<std::uint64_t>(up(end, chunk_nbytes), backed_.size() * page_nbytes);
    if (budget_.taken() + (chunks_end - chunks_begin) <= budget_.limit && back_pages(chunks_begin, chunks_end)) {
        return true;
    }
    // A walk over all holes: not again before it is worth it.
    if (budget_.taken() > budget_.limit && budget_.backed > trimmed_ + budget_.limit / 64) {
        trim();
    }
    if (back_pages(begin, end)) {
        return true;
    }
    trim();
    return back_pages(begin, end);
}

bool Objects::back_pages(std::uint64_t begin, std::uint64_t end) {
    end = std::min<std::uint64_t>(end, data_.memory.nbytes());
    if (!back(data_, begin, end - begin)) {
        return false;
    }
    mark_pages(begin, end, true);
    return true;
}

std::uint64_t Objects::mark_pages(std::uint64_t begin, std::uint64_t end, bool backed) {
    std::uint64_t changed = 0;
    for (std::uint64_t page = begin / page_nbytes; page < up(end, page_nbytes) / page_nbytes; ++page) {
        changed += backed_[page] != backed ? page_nbytes : 0;
        backed_[page] = backed;
    }
    backed_nbytes_ += backed ? changed : 0 - changed;
    budget_.backed += backed ? changed : 0 - changed;
    return changed;
}

// For a data segment of which nothing is known: all of it may be backed, or nothing is.
void Objects::forget_backing(bool backed) {
    const std::uint64_t pages = up(data_.memory.nbytes(), page_nbytes) / page_nbytes;
    budget_.backed -= backed_nbytes_;
    backed_.assign(pages, backed);
    backed_nbytes_ = backed ? pages * page_nbytes : 0;
    budget_.backed += backed_nbytes_;
}

}  // namespace farpool
