#include "node/catalogue/eviction.hpp"

#include <algorithm>
#include <string>
#include <vector>

namespace farpool {

std::optional<std::uint64_t> Eviction::alloc(std::uint32_t units, std::uint32_t taken) {
    const std::uint64_t most = std::uint64_t{units} * unit_nbytes;
    if (!room_.may_announce(std::uint64_t{units - taken} * unit_nbytes) || !room_.can_take(most) || !entries_.reserve_slot() ||
        !room_.make_room(std::uint64_t{taken} * unit_nbytes)) {
        return std::nullopt;
    }
    // Prefer a place below `dense`, where pages are already backed, because backing new pages costs as much as filling them. A
    // put that arrives whole may evict a little more to make a hole there. A put that arrives in slices must not evict before
    // its bytes are here.
    Ram& ram = media_.ram();
    const std::uint64_t dense = ram.end() - (media_.has_lower() ? 1 : 2) * room_.limit();
    const auto is_dense = [&](std::uint64_t offset) { return offset + most <= dense; };
    const std::uint64_t used = room_.used();
    std::optional<std::uint64_t> offset = ram.alloc(units);
    const bool must_evict_later = taken < units && room_.left() < std::uint64_t{units - taken} * unit_nbytes;
    if (must_evict_later && offset && !is_dense(*offset)) {
        // The next slices need an eviction anyway. Evict one now, because that may leave a hole for the whole payload.
        ram.release(*offset, units);
        evict_one();
        offset = ram.alloc(units);
    }
    while (!offset || (!is_dense(*offset) && taken == units && used - room_.used() < most)) {
        const std::uint64_t before = entries_.counts().evictions;
        if (offset) {
            ram.release(*offset, units);
        }
        evict_around(units);
        offset = ram.alloc(units);
        if (entries_.counts().evictions == before) {
            break;
        }
    }
    if (!offset) {
        return std::nullopt;
    }
    room_.take(taken);
    if (!ram.back(*offset, taken, units - taken)) {
        ram.release(*offset, units);
        room_.release(taken);
        return std::nullopt;
    }
    return offset;
}

bool Eviction::evict_one(bool at_once) {
    if (const policy::Slot victim = entries_.queues().victim_in_ram(entries_.in_use()); victim != policy::no_slot) {
        if (at_once || !demote(victim)) {
            entries_.evict(victim);
        }
        return true;
    }
    // An object in the lower medium still has its header and key in RAM.
    if (const policy::Slot victim = entries_.queues().victim_in_lower(entries_.in_use()); victim != policy::no_slot) {
        entries_.evict(victim);
        return true;
    }
    return false;
}

bool Eviction::evict_from_bucket(std::uint64_t hash) {
    const Index& index = entries_.index();
    std::uint32_t victim = Index::none;
    for (const std::uint32_t slot : index.bucket(index.bucket_of_hash(hash))) {  // the oldest is the last
        if (!entries_.is_fixed(index.at(slot)) &&
            (victim == Index::none || entries_.priority(slot) <= entries_.priority(victim))) {
            victim = slot;
        }
    }
    if (victim == Index::none) {
        return false;
    }
    entries_.evict(victim);
    return true;
}

// Evicts one object and then its neighbours above, until they leave a hole of so many units or one of them is in use. Otherwise
// a large object would wait until chance had emptied one place. We do not evict a neighbour of a higher priority, and none that
// was used lately or is worth more than most. We move none of them to the lower medium, because their places would not be empty
// before it has them.
void Eviction::evict_around(std::uint32_t units) {
    const Index& index = entries_.index();
    const Queues& queues = entries_.queues();
    policy::Slot slot = entries_.queues().victim_in_ram(entries_.in_use());
    if (slot == policy::no_slot) {
        slot = entries_.queues().victim_in_lower(entries_.in_use());
    }
    if (slot == policy::no_slot) {
        return;
    }
    const std::uint8_t priority = entries_.priority(slot);
    for (;;) {
        const Index::Entry entry = index.at(slot);
        entries_.evict(slot);
        // We search the hole by the last unit, because the header and key of an object in the lower medium may be before it.
        const Ram::Gap gap = media_.ram().gap_before(entry.offset + std::uint64_t{entry.units} * unit_nbytes);
        if (gap.units == 0 || gap.units >= units || gap.end >= media_.ram().end()) {
            return;
        }
        slot = media_.ram().header_at(gap.end).slot;  // a hint: programs that may write the data segment may change it
        if (!index.is_live(slot)) {
            return;
        }
        const Index::Entry next = index.at(slot);
        if (next.offset != gap.end || entries_.is_fixed(next) || entries_.priority(slot) > priority ||
            queues.would_pass(slot, next) || (next.blocks != 0 && queues.has_any_in_ram())) {
            return;
        }
    }
}

// Takes blocks in the lower medium for an object of a priority. Evicts no object of a higher priority for it.
std::optional<std::uint32_t> Eviction::alloc_blocks(std::uint32_t blocks, std::uint8_t priority) {
    std::optional<std::uint64_t> first = media_.lower().alloc(blocks);
    while (!first) {
        const policy::Slot victim = entries_.queues().victim_in_lower(entries_.in_use());
        if (victim == policy::no_slot || entries_.priority(victim) > priority) {
            return std::nullopt;
        }
        entries_.evict(victim);
        ++entries_.counts().from_file;
        first = media_.lower().alloc(blocks);
    }
    return static_cast<std::uint32_t>(*first);
}

// Begins to move a payload to the lower medium; false if nothing was changed.
bool Eviction::demote(std::uint32_t slot) {
    const Index::Entry entry = entries_.at(slot);
    const Records& records = entries_.records();
    const std::uint64_t nbytes = records.payload_nbytes(slot);
    if (!media_.has_lower() || entry.blocks != 0 || nbytes == 0 || nbytes > media_.lower().capacity() ||
        !records.is_intact(slot) || has_expired(entry.expiry) || !room_.may_move_more()) {
        return false;
    }
    const std::uint32_t blocks = media_.lower().units(nbytes);
    const std::optional<std::uint32_t> block = alloc_blocks(blocks, entries_.priority(slot));
    if (!block) {
        return false;
    }
    // Headers go to the lowest holes, so that they do not split large holes.
    Ram& ram = media_.ram();
    const auto units = static_cast<std::uint32_t>(units_for(records.key_nbytes(slot), 0));
    const std::optional<std::uint64_t> offset = ram.alloc(units);
    if (!offset) {
        media_.release_blocks(*block, blocks);
        return false;
    }
    room_.take(units);
    if (!ram.back(*offset, units)) {
        media_.release_units(*offset, units);
        media_.release_blocks(*block, blocks);
        return false;
    }
    entries_.retain(entry.offset, slot);
    entries_.queues().remove(slot, entry, policy::Leaving::evicted);
    media_.begin_move(entry.offset, entry.units, {*offset, units, *block, blocks});
    ++entries_.counts().demotions;
    const std::uint64_t payload = entry.offset + payload_at(records.key_nbytes(slot));
    media_.lower().put(*block, {ram.at(payload), nbytes, ram.segment().file.fd(), payload},
                       [this, from = entry.offset](bool ok) { finish_demote(from, ok); });
    return true;
}

Status Eviction::demote(const Found& found) {
    const Index::Entry entry = entries_.at(found.slot);
    if (!media_.has_lower()) {
        return Status::unknown;
    }
    if (entry.blocks != 0 || found.nbytes == 0 || media_.is_moving(entry.offset)) {
        return Status::done;
    }
    if (entries_.is_fixed(entry)) {
        return Status::busy;
    }
    if (found.nbytes > media_.lower().capacity()) {
        return Status::too_large;
    }
    return demote(found.slot) ? Status::done : Status::full;
}

// Enters an object again at the place to which it has moved. Its old memory is already promised to other objects, so we evict
// an object that the lower medium could not take.
void Eviction::finish_demote(std::uint64_t offset, bool ok) {
    const Media::Move to = media_.move_of(offset);
    const std::uint32_t slot = entries_.retained_slot(offset);
    const Records& records = entries_.records();
    if (slot != Index::none && ok && records.is_intact(slot) && entries_.reserve_slot()) {
        const Index::Entry entry = entries_.at(slot);
        ObjectHeader header = records.header(slot);
        header.nbytes = records.payload_nbytes(slot);
        const std::string key(records.key(slot));
        entries_.enter(header, key, {entry.serial, to.offset, entry.expiry, entry.hash, to.units, to.block, to.blocks},
                       entries_.retained(slot));
        entries_.remove(slot);
    } else {
        if (slot != Index::none) {
            entries_.evict(slot);
            ++entries_.counts().from_file;
        }
        media_.release_units(to.offset, to.units);
        media_.release_blocks(to.block, to.blocks);
    }
    entries_.release(offset);
}

std::optional<Found> Eviction::promote(std::uint64_t offset, const std::byte* payload) {
    const std::uint32_t slot = entries_.retained_slot(offset);
    const Records& records = entries_.records();
    if (slot == Index::none || entries_.at(slot).blocks == 0 || !records.is_intact(slot)) {
        return std::nullopt;
    }
    const std::string key(records.key(slot));
    const std::uint64_t nbytes = records.payload_nbytes(slot);
    const auto units = static_cast<std::uint32_t>(units_for(key.size(), nbytes));
    const std::optional<std::uint64_t> place = alloc(units, units);  // does not evict this object, which the caller holds
    if (!place || !entries_.reserve_slot()) {
        if (place) {
            media_.release_units(*place, units);
        }
        return std::nullopt;
    }
    const Index::Entry entry = entries_.at(slot);
    ObjectHeader header = records.header(slot);
    header.nbytes = nbytes;
    media_.ram().put(*place + payload_at(key.size()), {payload, nbytes}, [](bool) {});  // done when it returns
    const std::uint32_t moved =
        entries_.enter(header, key, {entry.serial, *place, entry.expiry, entry.hash, units}, entries_.retained(slot));
    entries_.remove(slot);
    ++entries_.counts().promotions;
    return entries_.found_at(moved);
}

}  // namespace farpool
