#include "node/objects.hpp"

#include <algorithm>
#include <limits>
#include <tuple>

#include "node/extent_head.hpp"

namespace farpool {

namespace {

constexpr std::size_t listed_buckets = 4096;  // at once: nothing else is served meanwhile

}  // namespace

std::uint32_t Objects::slot_of(std::string_view key, std::uint64_t hash) const {
    return index_->find(hash, [&](std::uint32_t slot) { return key_at(slot) == key; });
}

std::string_view Objects::key_at(std::uint32_t slot) const {
    const ObjectHeader& header = header_at(index_->at(slot).offset);
    return {reinterpret_cast<const char*>(&header + 1), key_nbytes(slot)};
}

std::uint32_t Objects::live_slot(std::string_view key, std::uint64_t hash) {
    const std::uint32_t slot = slot_of(key, hash);
    // Where a header or a key has been damaged, what is left of the object is that it was there.
    const std::uint32_t damaged = slot != Index::none && is_intact(slot)
                                      ? Index::none
                                      : index_->find(hash, [this](std::uint32_t other) { return !is_intact(other); });
    if (damaged != Index::none) {
        drop_knowledge(damaged);
        ++counts_.evictions;
        return live_slot(key, hash);
    }
    if (slot != Index::none) {
        const std::uint64_t expiry = index_->at(slot).expiry;
        if (expiry != 0 && expiry <= now_milliseconds()) {
            drop_knowledge(slot);
            ++counts_.expired;
            return Index::none;
        }
    }
    return slot;
}

bool Objects::is_intact(std::uint32_t slot) const {
    const Index::Entry entry = index_->at(slot);
    const std::uint64_t nbytes = std::uint64_t{entry.units} * unit_nbytes;
    const Head head = copy_head(at(entry.offset), nbytes);
    return head.header.key_nbytes == key_nbytes(slot) && head.header.generation == entry.generation &&
           is_whole(head.header, nbytes, false) && index_->hash(key_of(head.header)) == entry.hash;
}

bool Objects::is_tombstone(std::uint32_t slot) const {
    return shapes_[slot].tombstone != 0;
}

Found Objects::find(std::string_view key, bool visit) {
    const std::uint64_t hash = index_->hash(key);
    const std::uint32_t slot = live_slot(key, hash);
    Found found{};
    if (slot == Index::none) {
        found.status = Status::missing;
        found.generation = index_->floor(hash);
        return found;
    }
    const Index::Entry entry = index_->at(slot);
    const ObjectHeader& header = header_at(entry.offset);
    found.shelved = entry.blocks != 0;
    found.block = entry.block;
    found.generation = entry.generation;
    found.slot = slot;
    found.offset = entry.offset;
    found.expiry = entry.expiry;
    found.nbytes = payload_nbytes(slot);
    found.crc = header.payload_crc;
    found.payload = entry.offset + payload_at(key.size());
    const auto held = held_.find(entry.offset);
    found.pins = held == held_.end() ? 0 : held->second.count;
    found.status = is_tombstone(slot) ? Status::deleted : Status::done;
    if ((entry.blocks & unwritten) != 0) {
        const auto writing = writing_.find(entry.offset);
        found.aside = writing == writing_.end() ? nullptr : writing->second.payload;
    }
    if (visit) {
        found.visited = marks_.get(slot) != 0;
        marks_.set(slot);
    }
    return found;
}

Prepared Objects::prepare(std::string_view key, std::uint64_t nbytes, std::uint64_t expiry, std::uint64_t generation) {
    const std::uint64_t hash = index_->hash(key);
    const std::uint32_t slot = live_slot(key, hash);
    const std::uint64_t known = slot == Index::none ? index_->floor(hash) : index_->at(slot).generation;
    Prepared prepared{};
    prepared.generation = known;
    if (generation <= known) {
        prepared.status = Status::stale;
        return prepared;
    }
    if (nbytes > capacity() || units_for(key.size(), nbytes) * unit_nbytes > capacity() ||
        units_for(key.size(), nbytes) > std::numeric_limits<std::uint32_t>::max()) {
        prepared.status = Status::too_large;
        return prepared;
    }
    const auto units = static_cast<std::uint32_t>(units_for(key.size(), nbytes));
    const std::optional<std::uint64_t> offset = alloc(units);
    if (!offset) {
        prepared.status = Status::full;
        return prepared;
    }
    preparations_.emplace(*offset, Preparation{std::string(key), nbytes, expiry, generation, units});
    prepared.status = Status::done;
    prepared.generation = generation;
    prepared.offset = *offset;
    prepared.payload = *offset + payload_at(key.size());
    return prepared;
}

Outcome Objects::commit(std::uint64_t offset, std::uint64_t generation, std::uint32_t crc) {
    const auto found = preparations_.find(offset);
    if (found == preparations_.end() || found->second.generation != generation) {
        return {Status::unknown};
    }
    const Preparation what = std::move(found->second);
    preparations_.erase(found);
    return publish(offset, what, crc, 0);
}

bool Objects::abort(std::uint64_t offset, std::uint64_t generation) {
    const auto found = preparations_.find(offset);
    if (found == preparations_.end() || found->second.generation != generation) {
        return false;
    }
    free_extent(offset, found->second.units);
    preparations_.erase(found);
    return true;
}

Outcome Objects::publish(std::uint64_t offset, const Preparation& what, std::uint32_t crc, std::uint16_t flags) {
    const std::uint64_t hash = index_->hash(what.key);
    const std::uint32_t older = live_slot(what.key, hash);
    // What came and went since the preparation counts as well.
    const std::uint64_t known = older == Index::none ? index_->floor(hash) : index_->at(older).generation;
    if (what.generation <= known || !index_->reserve() || !back_visited(index_->next_slot())) {
        free_extent(offset, what.units);
        return what.generation <= known ? Outcome{Status::stale, known} : Outcome{Status::full};
    }
    ObjectHeader header{};
    header.flags = flags;
    header.nbytes = what.nbytes;
    header.payload_crc = crc;
    enter(header, what.key, {what.generation, offset, what.expiry, hash, what.units});
    if (older != Index::none) {
        take_out(older);
    }
    return {Status::done, what.generation};
}

// Writes the header of an extent and puts it into the index.
std::uint32_t Objects::enter(const ObjectHeader& settings, std::string_view key, Index::Entry entry) {
    ObjectHeader& header = header_at(entry.offset);
    header = settings;
    header.key_nbytes = static_cast<std::uint16_t>(key.size());
    header.generation = entry.generation;
    header.units = entry.units;
    header.slot = index_->next_slot();
    header.tenant = tenant_;
    std::memset(&header + 1, 0, payload_at(key.size()) - sizeof header);
    std::memcpy(&header + 1, key.data(), key.size());
    seal(header, key.data());
    const std::uint32_t slot = index_->add(entry);
    enqueue(slot, entry);
    indexed_units_ += entry.units;
    count(slot, header);
    return slot;
}

void Objects::count(std::uint32_t slot, const ObjectHeader& header) {
    if (slot >= shapes_.size()) {
        shapes_.resize(slot + 1);
        free_units_.resize(shelf_ == nullptr ? 0 : slot + 1);
    }
    const Index::Entry entry = index_->at(slot);
    Shape& shape = shapes_[slot];
    const std::uint64_t padding = payload_room(entry, header.key_nbytes) - header.nbytes;
    shape.last_of_key = static_cast<std::uint8_t>(header.key_nbytes - 1);
    shape.padding = padding % unit_nbytes;
    if (shelf_ != nullptr) {
        free_units_[slot] = static_cast<std::uint8_t>(padding / unit_nbytes);
    }
    shape.tombstone = (header.flags & tombstone_flag) != 0;
    header_bytes_ += std::uint64_t{entry.units} * unit_nbytes - header.key_nbytes - (entry.blocks == 0 ? header.nbytes : 0);
    counts_.payload_bytes += header.nbytes;
    counts_.tombstones += shape.tombstone;
    counts_.shelved += entry.blocks != 0 ? 1 : 0;
}

void Objects::discount(std::uint32_t slot) {
    const Index::Entry entry = index_->at(slot);
    const Shape shape = shapes_[slot];
    const std::uint64_t nbytes = payload_nbytes(slot);
    header_bytes_ -= std::uint64_t{entry.units} * unit_nbytes - key_nbytes(slot) - (entry.blocks == 0 ? nbytes : 0);
    counts_.payload_bytes -= nbytes;
    counts_.tombstones -= shape.tombstone;
    counts_.shelved -= entry.blocks != 0 ? 1 : 0;
}

std::uint64_t Objects::payload_nbytes(std::uint32_t slot) const {
    const std::uint64_t units = shelf_ == nullptr ? 0 : free_units_[slot];
    return payload_room(index_->at(slot), key_nbytes(slot)) - units * unit_nbytes - shapes_[slot].padding;
}

Outcome Objects::remove(std::string_view key, std::uint64_t generation) {
    const std::uint64_t hash = index_->hash(key);
    const std::uint32_t slot = live_slot(key, hash);
    const std::uint64_t known = slot == Index::none ? index_->floor(hash) : index_->at(slot).generation;
    if (generation <= known) {
        return {Status::stale, known};
    }
    const std::uint64_t was = slot == Index::none || is_tombstone(slot) ? 0 : known;
    const auto units = static_cast<std::uint32_t>(units_for(key.size(), 0));
    const std::optional<std::uint64_t> offset = alloc(units);
    if (offset && publish(*offset, {std::string(key), 0, 0, generation, units}, 0, tombstone_flag).status == Status::done) {
        return {Status::done, was};
    }
    // No room for a tombstone: the floor says as much, for more keys than this one.
    const std::uint32_t left = slot_of(key, hash);
    index_->raise_floor(hash, generation);  // first: a node that is killed in between must not forget
    if (left != Index::none) {
        take_out(left);
    }
    return {Status::done, was};
}

Outcome Objects::touch(std::string_view key, std::uint64_t expiry) {
    const Found found = find(key, true);
    if (found.status == Status::done) {
        index_->set_expiry(found.slot, expiry);
    }
    return {found.status, found.generation};
}

Outcome Objects::forget(std::string_view key, std::uint64_t generation) {
    const std::uint64_t hash = index_->hash(key);
    const std::uint32_t slot = slot_of(key, hash);
    if (slot == Index::none || !is_tombstone(slot) || index_->at(slot).generation != generation) {
        return {Status::missing, index_->floor(hash)};
    }
    drop_knowledge(slot);
    return {Status::done, generation};
}

void Objects::hold(const Found& found) {
    Held& held = held_[found.offset];
    if (held.count++ == 0) {
        const Index::Entry entry = index_->at(found.slot);
        held.units = entry.units;
        held.block = entry.block;
        held.blocks = entry.blocks & ~unwritten;
        held_units_ += held.units;
    }
}

void Objects::count_lent_out(std::int64_t change) {
    lent_out_ += change;
    index_->set_lent_out(lent_out_ > 0);
}

void Objects::drop(std::uint64_t offset) {
    const auto found = held_.find(offset);
    if (found == held_.end() || --found->second.count > 0) {
        return;
    }
    const Held held = found->second;
    held_.erase(found);
    if (held.gone) {
        free_extent(offset, held.units);
        free_blocks(held.block, held.blocks);
    } else {
        held_units_ -= held.units;
    }
}

void Objects::take_out(std::uint32_t slot) {
    const Index::Entry entry = index_->at(slot);
    discount(slot);
    indexed_units_ -= entry.units;
    index_->remove(slot);
    queue_of(entry).remove(slot, policy::Leaving::deleted);
    const auto held = held_.find(entry.offset);
    if (held == held_.end()) {
        free_extent(entry.offset, entry.units);
        free_blocks(entry.block, entry.blocks & ~unwritten);
    } else {
        held->second.gone = true;
        held_units_ -= entry.units;
    }
}

void Objects::drop_knowledge(std::uint32_t slot) {
    const Index::Entry entry = index_->at(slot);
    index_->raise_floor(entry.hash, entry.generation);
    take_out(slot);
}

void Objects::list(std::uint64_t& place, std::string_view after, std::string_view prefix, std::size_t limit, bool tombstones,
                   std::vector<Listed>& found) const {
    const std::uint64_t now = now_milliseconds();
    const std::uint64_t passed = place_of(after);
    for (std::size_t looked = 0; looked < listed_buckets && found.size() < limit; ++looked) {
        using Candidate = std::tuple<std::uint64_t, std::string, std::uint32_t>;
        std::vector<Candidate> candidates;
        for (const std::uint32_t slot : index_->bucket(index_->bucket_of_hash(Index::reversed(place)))) {
            const Index::Entry entry = index_->at(slot);
            const std::uint64_t at = Index::reversed(entry.hash);
            std::string key(key_at(slot));  // a copy: publishers may change the one in the segment
            const bool behind = at > passed || (at == passed && key > after);
            const bool expired = entry.expiry != 0 && entry.expiry <= now;
            if (at >= place && behind && is_tombstone(slot) == tombstones && !expired && key.starts_with(prefix)) {
                candidates.emplace_back(at, std::move(key), slot);
            }
        }
        std::sort(candidates.begin(), candidates.end());
        for (const auto& [at, key, slot] : candidates) {
            const Index::Entry entry = index_->at(slot);
            const auto held = held_.find(entry.offset);
            found.push_back({key, entry.generation, payload_nbytes(slot), entry.expiry,
                             held == held_.end() ? 0 : held->second.count});
        }
        place = index_->next_place(place);
        if (place == 0) {
            return;
        }
    }
}

std::uint64_t Objects::overhead() const noexcept {
    // The mark of a visit, the links of the queue, and what is known of the header.
    const std::uint64_t beside_slot = 1 + 8 + sizeof(Shape) + (shelf_ == nullptr ? 0 : 1);
    return index_->slots_used() * (sizeof(IndexSlot) + beside_slot) + index_->buckets() * sizeof(std::uint32_t) + header_bytes_;
}

}  // namespace farpool
