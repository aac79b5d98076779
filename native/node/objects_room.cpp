// Room for objects: which extents are free, which of them the system has backed with memory, and who has to go.
#include <algorithm>

#include "node/objects.hpp"

namespace farpool {

namespace {

constexpr std::uint64_t backing_slots = 65536;

}  // namespace

void Objects::free_extent(std::uint64_t offset, std::uint32_t units) {
    space_->free(static_cast<std::int64_t>((offset - segment_header_nbytes) / unit_nbytes), units);
    budget_.used -= std::uint64_t{units} * unit_nbytes;
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
    budget_.used += nbytes;
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
    if (const auto victim = sieve_->victim(in_use())) {
        leave(*victim);
        return true;
    }
    if (const auto victim = lower_->victim(in_use())) {  // what stays in memory of an object in the file
        drop_knowledge(*victim);
        ++counts_.evictions;
        return true;
    }
    return false;
}

// Evicts one and then its neighbours above, until they leave a hole of so many units or one of them is in use. Without this a
// large object would wait until chance had emptied one place.
void Objects::evict_around(std::uint32_t units) {
    auto victim = sieve_->victim(in_use());
    if (!victim) {
        victim = lower_->victim(in_use());
    }
    if (!victim) {
        return;
    }
    for (std::uint32_t slot = *victim;;) {
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
        const std::uint64_t nbytes = static_cast<std::uint64_t>(units) * unit_nbytes;
        discard(data_, offset, nbytes);
        for (std::uint64_t chunk = offset / chunk_nbytes; chunk <= (offset + nbytes - 1) / chunk_nbytes; ++chunk) {
            backed_[chunk] = false;
        }
    }
}

bool Objects::back_extent(std::uint64_t offset, std::uint32_t units) {
    const std::uint64_t end = offset + std::uint64_t{units} * unit_nbytes;
    for (std::uint64_t chunk = offset / chunk_nbytes; chunk <= (end - 1) / chunk_nbytes; ++chunk) {
        if (!backed_[chunk]) {
            const std::uint64_t begin = chunk * chunk_nbytes;
            const std::uint64_t nbytes = std::min<std::uint64_t>(chunk_nbytes, data_.memory.nbytes() - begin);
            if (!back(data_, begin, nbytes)) {
                return false;
            }
            backed_[chunk] = true;
        }
    }
    return true;
}

std::uint64_t Objects::backed() const noexcept {
    return static_cast<std::uint64_t>(std::count(backed_.begin(), backed_.end(), true)) * chunk_nbytes;
}

}  // namespace farpool
