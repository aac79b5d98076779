// Objects that leave memory for the file, and come back.
#include <cstring>

#include "node/objects.hpp"

namespace farpool {

void Objects::leave(std::uint32_t slot) {
    if (!demote(slot)) {
        drop_knowledge(slot);
        ++counts_.evictions;
    }
}

std::optional<std::uint32_t> Objects::alloc_blocks(std::uint32_t blocks) {
    std::optional<std::uint32_t> first = shelf_->alloc(blocks);
    while (!first) {
        const policy::Slot victim = lower_->victim({}, in_use());
        if (victim == policy::no_slot) {
            return std::nullopt;
        }
        drop_knowledge(victim);
        ++counts_.evictions;
        first = shelf_->alloc(blocks);
    }
    return first;
}

void Objects::free_blocks(std::uint32_t block, std::uint32_t blocks) {
    if (blocks != 0) {
        shelf_->free(block, blocks);
    }
}

std::uint32_t Objects::slot_at(std::uint64_t offset, std::uint64_t generation) const {
    const std::uint32_t slot = header_at(offset).slot;  // a hint: whoever may write the data segment may have changed it
    if (!index_->is_live(slot)) {
        return Index::none;
    }
    const Index::Entry entry = index_->at(slot);
    return entry.offset == offset && entry.generation == generation ? slot : Index::none;
}

// The header and the key stay in memory, in an extent of their own; the payload goes. False where nothing was changed.
//
// A node that is killed in between must not forget the generation: the new slot is there before the old one goes, and where there is
// no room for both, the floor remembers.
bool Objects::demote(std::uint32_t slot) {
    const Index::Entry entry = index_->at(slot);
    const ObjectHeader header = header_at(entry.offset);
    const std::string key(key_at(slot));
    const bool expired = entry.expiry != 0 && entry.expiry <= now_milliseconds();
    const std::uint64_t nbytes = payload_nbytes(slot);
    if (shelf_ == nullptr || entry.blocks != 0 || is_tombstone(slot) || expired || nbytes == 0 ||
        nbytes > shelf_->capacity() || index_->hash(key) != entry.hash || !shelf_->may_write(nbytes) || !index_->reserve() ||
        !back_visited(index_->next_slot())) {
        return false;
    }
    const std::uint32_t blocks = shelf_blocks(nbytes);
    auto aside = std::make_shared<Aside>(nbytes);
    const std::optional<std::uint32_t> block = alloc_blocks(blocks);
    if (!block) {
        return false;
    }
    std::memcpy(aside->data(), at(entry.offset + payload_at(key.size())), nbytes);
    std::memset(aside->data() + nbytes, 0, aside->nbytes() - nbytes);
    const auto units = static_cast<std::uint32_t>(units_for(key.size(), 0));
    // At the bottom, so that they do not stand between large holes.
    std::int64_t first = space_->alloc_lowest(units);
    const bool both = first >= 0;
    if (!both) {
        index_->raise_floor(entry.hash, entry.generation);
        take_out(slot);
        first = space_->alloc_lowest(units);
    }
    const std::uint64_t offset = segment_header_nbytes + static_cast<std::uint64_t>(first) * unit_nbytes;
    take(units);
    if (!back_extent(offset, units)) {
        free_extent(offset, units);
        free_blocks(*block, blocks);
        counts_.evictions += both ? 0 : 1;
        return !both;
    }
    ObjectHeader kept{};
    kept.nbytes = nbytes;
    kept.payload_crc = header.payload_crc;
    Found found{};
    found.slot = enter(kept, key, {entry.generation, offset, entry.expiry, entry.hash, units, *block, blocks | unwritten});
    found.offset = offset;
    if (both) {
        take_out(slot);
    }
    hold(found);  // until it has been written, its blocks belong to the writer
    writing_.emplace(offset, Writing{entry.generation, aside});
    writes_.emplace(shelf_->write(*block, aside), offset);
    ++counts_.demotions;
    return true;
}

bool Objects::written(std::uint64_t job, bool ok) {
    const auto found = writes_.find(job);
    if (found == writes_.end()) {
        return false;
    }
    const std::uint64_t offset = found->second;
    const std::uint32_t slot = slot_at(offset, writing_.at(offset).generation);
    writes_.erase(found);
    writing_.erase(offset);
    if (slot != Index::none) {
        if (ok) {
            index_->set_written(slot);
        } else {
            drop_knowledge(slot);
        }
    }
    drop(offset);
    return true;
}

std::optional<Found> Objects::promote(std::uint64_t offset, std::uint64_t generation, const Aside& payload) {
    const std::uint32_t slot = slot_at(offset, generation);
    if (slot == Index::none || index_->at(slot).blocks == 0) {
        return std::nullopt;
    }
    const ObjectHeader header = header_at(offset);
    const std::string key(key_at(slot));
    const std::uint64_t nbytes = payload_nbytes(slot);
    if (nbytes > payload.nbytes() || index_->hash(key) != index_->at(slot).hash) {
        return std::nullopt;
    }
    const auto units = static_cast<std::uint32_t>(units_for(key.size(), nbytes));
    const std::optional<std::uint64_t> place = alloc(units);  // the caller holds the object, so it is not evicted for itself
    if (!place || !index_->reserve() || !back_visited(index_->next_slot())) {
        if (place) {
            free_extent(*place, units);
        }
        return std::nullopt;
    }
    const Index::Entry entry = index_->at(slot);
    std::memcpy(at(*place + payload_at(key.size())), payload.data(), nbytes);
    ObjectHeader kept{};
    kept.nbytes = nbytes;
    kept.payload_crc = header.payload_crc;
    Found found{};
    found.status = Status::done;
    found.generation = generation;
    found.slot = enter(kept, key, {generation, *place, entry.expiry, entry.hash, units});
    found.offset = *place;
    found.payload = *place + payload_at(key.size());
    found.nbytes = nbytes;
    found.crc = header.payload_crc;
    take_out(slot);
    ++counts_.promotions;
    return found;
}

void Objects::lose(std::uint64_t offset, std::uint64_t generation) {
    const std::uint32_t slot = slot_at(offset, generation);
    if (slot != Index::none) {
        drop_knowledge(slot);
    }
}

}  // namespace farpool
