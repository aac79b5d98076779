// Objects that leave memory for the file, and come back.
//
// An object on its way stays where it is, and is found there; its bytes count as leaving, no longer as used. Only when the
// file has the payload does the index say so, and only then is the memory free. So a node that is killed at any moment has
// it in one place or in the other.
#include <cstring>

#include "node/objects.hpp"

namespace farpool {

void Objects::evict(std::uint32_t slot) {
    take_out(slot);
    ++counts_.evictions;
}

std::optional<std::uint32_t> Objects::alloc_blocks(std::uint32_t blocks) {
    std::optional<std::uint32_t> first = shelf_->alloc(blocks);
    while (!first) {
        const policy::Slot victim = lower_->victim({}, in_use());
        if (victim == policy::no_slot) {
            return std::nullopt;
        }
        evict(victim);
        ++counts_.from_file;
        first = shelf_->alloc(blocks);
    }
    return first;
}

void Objects::free_blocks(std::uint32_t block, std::uint32_t blocks) {
    if (blocks != 0) {
        shelf_->free(block, blocks);
    }
}

bool Objects::demote(std::uint32_t slot) {
    const Index::Entry entry = index_->at(slot);
    const std::uint64_t nbytes = payload_nbytes(slot);
    if (shelf_ == nullptr || entry.blocks != 0 || nbytes == 0 || nbytes > shelf_->capacity() || !is_intact(slot) ||
        has_expired(entry.expiry) || budget_.leaving >= Budget::most_leaving) {
        return false;
    }
    const std::uint32_t blocks = shelf_blocks(nbytes);
    const std::optional<std::uint32_t> block = alloc_blocks(blocks);
    if (!block) {
        return false;
    }
    // At the bottom, so that they do not stand between large holes.
    const auto units = static_cast<std::uint32_t>(units_for(key_nbytes(slot), 0));
    const std::int64_t first = space_->alloc_lowest(units);
    if (first < 0) {
        free_blocks(*block, blocks);
        return false;
    }
    const std::uint64_t offset = segment_header_nbytes + static_cast<std::uint64_t>(first) * unit_nbytes;
    take(units);
    if (!back_extent(offset, units)) {
        free_extent(offset, units);
        free_blocks(*block, blocks);
        return false;
    }
    Found found{};
    found.slot = slot;
    found.offset = entry.offset;
    hold(found);
    unqueue(slot, entry, policy::Leaving::evicted);
    leaving_.emplace(entry.offset, Leaving{offset, units, *block, blocks});
    give(entry.units);
    budget_.leaving += std::uint64_t{entry.units} * unit_nbytes;
    const std::uint64_t payload = entry.offset + payload_at(key_nbytes(slot));
    writes_.emplace(shelf_->write(*block, data_.file.fd(), payload, nbytes), entry.offset);
    ++counts_.demotions;
    return true;
}

Status Objects::demote(const Found& found) {
    const Index::Entry entry = index_->at(found.slot);
    if (shelf_ == nullptr) {
        return Status::unknown;
    }
    if (found.shelved || found.nbytes == 0 || leaving_.contains(entry.offset)) {
        return Status::done;
    }
    if (is_fixed(entry)) {
        return Status::busy;
    }
    if (found.nbytes > shelf_->capacity()) {
        return Status::too_large;
    }
    return demote(found.slot) ? Status::done : Status::full;
}

bool Objects::written(std::uint64_t job, bool ok) {
    const auto found = writes_.find(job);
    if (found == writes_.end()) {
        return false;
    }
    const std::uint64_t offset = found->second;
    const Leaving to = leaving_.at(offset);
    writes_.erase(found);
    const std::uint32_t slot = held_slot(offset);
    // Its memory is promised to others: what the file could not take is forgotten.
    if (slot != Index::none && ok && is_intact(slot) && reserve_slot()) {
        const Index::Entry entry = index_->at(slot);
        ObjectHeader header = header_at(offset);
        header.nbytes = payload_nbytes(slot);
        const std::string key(key_at(slot));
        enter(header, key, {entry.serial, to.offset, entry.expiry, entry.hash, to.units, to.block, to.blocks});
        take_out(slot);
    } else {
        if (slot != Index::none) {
            evict(slot);
            ++counts_.from_file;
        }
        free_extent(to.offset, to.units);
        free_blocks(to.block, to.blocks);
    }
    drop(offset);
    return true;
}

std::optional<Found> Objects::promote(std::uint64_t offset, const Aside& payload) {
    const std::uint32_t slot = held_slot(offset);
    if (slot == Index::none || index_->at(slot).blocks == 0 || !is_intact(slot)) {
        return std::nullopt;
    }
    const std::string key(key_at(slot));
    const std::uint64_t nbytes = payload_nbytes(slot);
    const auto units = static_cast<std::uint32_t>(units_for(key.size(), nbytes));
    const std::optional<std::uint64_t> place = alloc(units);  // the caller holds the object, so it is not evicted for itself
    if (!place || !reserve_slot()) {
        if (place) {
            free_extent(*place, units);
        }
        return std::nullopt;
    }
    const Index::Entry entry = index_->at(slot);
    ObjectHeader header = header_at(offset);
    header.nbytes = nbytes;
    std::memcpy(at(*place + payload_at(key.size())), payload.data(), nbytes);
    const std::uint32_t moved = enter(header, key, {entry.serial, *place, entry.expiry, entry.hash, units});
    take_out(slot);
    ++counts_.promotions;
    return found_at(moved);
}

void Objects::lose(std::uint64_t offset) {
    const std::uint32_t slot = held_slot(offset);
    if (slot != Index::none) {
        take_out(slot);
    }
}

}  // namespace farpool
