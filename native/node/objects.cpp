#include "node/objects.hpp"

#include <algorithm>
#include <limits>
#include <tuple>

#include "node/extent_head.hpp"
#include "node/files.hpp"

namespace farpool {

namespace {

constexpr std::size_t listed_buckets = 64;  // at once: nothing else is served meanwhile
// Slots that are swept when an epoch begins, the others later: never more than the tenant's puts have paid for.
constexpr std::uint64_t swept_at_once = 20'000;
constexpr std::uint64_t swept_for_each = 64;

// Time at which a time to live ends, in ms since 1970; 0 for never.
std::uint64_t end_of(std::uint64_t ttl_ms) {
    const std::uint64_t now = now_milliseconds();
    return ttl_ms == 0 ? 0 : now + std::min(ttl_ms, end_mask - now);
}

std::uint64_t left_until(std::uint64_t expiry) {
    const std::uint64_t end = end_in(expiry);
    const std::uint64_t now = end == 0 ? 0 : now_milliseconds();
    return end == 0 ? 0 : end > now ? end - now : 1;
}

std::uint64_t later(std::uint64_t one, std::uint64_t other) { return one == 0 || other == 0 ? 0 : std::max(one, other); }

// The word with another end. Each word without an end has a random number, so no two of them are the same.
std::uint64_t with_end(std::uint64_t word, std::uint64_t end) {
    const std::uint64_t rest = word & ~(numbered_flag | end_mask);
    return rest | (end == 0 ? numbered_flag | (random_word() & end_mask) : end);
}

// Moves the end in an expiry word away, never nearer. If the end does not move, the word stays as it is.
std::uint64_t extended(std::uint64_t word, std::uint64_t end) {
    const std::uint64_t last = later(end_in(word), end);
    return last == end_in(word) ? word : with_end(word, last);
}

// The word of an object that is kept or let go now. It counts the change, so it differs from all words before it even if they
// end at the same time, as within a tick of the clock or with another time to live. So a touch that names one of them is
// refused, also after a restart. The count begins again behind 4,095 changes, which take far more than a tick.
std::uint64_t changed(std::uint64_t word, std::uint64_t end) {
    const std::uint64_t count = (word + change_unit) & change_mask;
    return with_end(count == 0 ? change_unit : count, end);
}

// The mark of an object with this word. The serial makes it differ from the marks of other objects that the key had before. On
// the wire, 0 stands for any mark, and `mark_of_none` for that of no object.
std::uint64_t mark_of(std::uint64_t serial, std::uint64_t word) {
    const std::uint64_t mark = mix64(mix64(serial) + word);
    return mark == 0 || mark == mark_of_none ? 1 : mark;
}

}  // namespace

std::uint32_t Objects::slot_of(std::string_view key, std::uint64_t hash) const {
    return index_->find(hash, [&](std::uint32_t slot) { return key_at(slot) == key; });
}

std::string_view Objects::key_at(std::uint32_t slot) const {
    const ObjectHeader& header = header_at(index_->at(slot).offset);
    return {reinterpret_cast<const char*>(&header + 1), key_nbytes(slot)};
}

std::uint32_t Objects::live_slot(std::string_view key, std::uint64_t hash) {
    ++counts_.searches;
    const std::uint32_t slot = slot_of(key, hash);
    // With a damaged header or key, it is not known which object it was.
    const std::uint32_t damaged = slot != Index::none && is_intact(slot)
                                      ? Index::none
                                      : index_->find(hash, [this](std::uint32_t other) { return !is_intact(other); });
    if (damaged != Index::none) {
        take_out(damaged);
        ++counts_.evictions;
        ++counts_.damaged;
        return live_slot(key, hash);
    }
    if (slot != Index::none && is_over(index_->at(slot))) {
        take_out_over(slot);
        return Index::none;
    }
    return slot;
}

bool Objects::is_intact(std::uint32_t slot) const {
    const Index::Entry entry = index_->at(slot);
    const std::uint64_t nbytes = std::uint64_t{entry.units} * unit_nbytes;
    const Head head = copy_head(at(entry.offset), nbytes);
    return head.header.key_nbytes == key_nbytes(slot) && head.header.serial == entry.serial &&
           is_whole(head.header, nbytes, false) && index_->hash(key_of(head.header)) == entry.hash;
}

Found Objects::found_at(std::uint32_t slot) const {
    const Index::Entry entry = index_->at(slot);
    const ObjectHeader& header = header_at(entry.offset);
    const auto held = held_.find(entry.offset);
    Found found{};
    found.status = Status::done;
    found.serial = entry.serial;
    found.slot = slot;
    found.offset = entry.offset;
    found.payload = entry.offset + payload_at(key_nbytes(slot));
    found.nbytes = payload_nbytes(slot);
    found.crc = header.payload_crc;
    found.pins = held == held_.end() ? 0 : held->second.count;
    found.block = entry.block;
    found.shelved = entry.blocks != 0;
    found.visited = found.shelved && marks_.get(slot) != 0;
    found.head = {left_until(entry.expiry),
                  header.copies,
                  header.kind,
                  header.parts,
                  header.recompute_us,
                  header.name_space,
                  (entry.expiry & kept_flag) != 0 ? kept_object : 0,
                  epoch_};
    return found;
}

Found Objects::find(std::string_view key, bool visit) {
    const std::uint32_t slot = live_slot(key, index_->hash(key));
    if (slot == Index::none) {
        return {};
    }
    const Found found = found_at(slot);
    if (visit) {
        marks_.set(slot);
    }
    return found;
}

// Reply for a key that already has an object; putting it again counts as a use.
Found Objects::present(std::uint32_t slot, std::uint64_t expiry) {
    const std::uint64_t word = index_->at(slot).expiry;
    index_->set_expiry(slot, extended(word, expiry));
    marks_.set(slot);
    Found found = found_at(slot);
    found.status = Status::present;
    return found;
}

Found Objects::prepare(std::string_view key, std::uint64_t nbytes, const ObjectHead& head, Arrival arrival) {
    const std::uint64_t expiry = end_of(head.ttl_ms);
    if (const std::uint32_t slot = live_slot(key, index_->hash(key)); slot != Index::none) {
        return present(slot, expiry);
    }
    Found prepared{};
    const bool copied = (head.flags & copied_object) != 0;
    if (copied && (head.epoch < epoch_ || dropped_lately(index_->hash(key)))) {
        prepared.status = Status::missing;
        return prepared;
    }
    if (nbytes > budget_.limit || units_for(key.size(), nbytes) * unit_nbytes > budget_.limit ||
        units_for(key.size(), nbytes) > std::numeric_limits<std::uint32_t>::max()) {
        prepared.status = Status::too_large;
        return prepared;
    }
    const auto units = static_cast<std::uint32_t>(units_for(key.size(), nbytes));
    if (!budget_.may_fix(tenant_, std::uint64_t{units} * unit_nbytes)) {
        prepared.status = Status::busy;
        return prepared;
    }
    const std::uint64_t first = arrival == Arrival::in_slices && nbytes > one_slice_nbytes ? slice_nbytes : nbytes;
    const auto taken = static_cast<std::uint32_t>(units_for(key.size(), first));
    const std::optional<std::uint64_t> offset = alloc(units, taken);
    if (!offset) {
        prepared.status = Status::full;
        return prepared;
    }
    announced_units_ += units - taken;
    ObjectHeader header{};
    header.nbytes = nbytes;
    header.recompute_us = head.recompute_us;
    header.name_space = head.name_space;
    header.parts = head.parts;
    header.copies = head.copies;
    header.kind = head.kind;
    prepared.status = Status::done;
    prepared.serial = index_->next_serial();
    prepared.offset = *offset;
    prepared.payload = *offset + payload_at(key.size());
    preparations_.emplace(*offset,
                          Preparation{std::string(key), prepared.serial, expiry, units, taken, header, copied, head.epoch});
    return prepared;
}

Found Objects::commit(std::uint64_t offset, std::uint64_t serial, std::uint32_t crc) {
    const auto prepared = preparations_.find(offset);
    Found found{};
    if (prepared == preparations_.end() || prepared->second.serial != serial) {
        found.status = Status::unknown;
        return found;
    }
    Preparation what = std::move(prepared->second);
    preparations_.erase(prepared);
    const std::uint64_t hash = index_->hash(what.key);
    if (const std::uint32_t first = live_slot(what.key, hash); first != Index::none) {
        free_prepared(offset, what);
        return present(first, what.expiry);
    }
    if (what.copied && (what.epoch < epoch_ || dropped_lately(hash))) {
        free_prepared(offset, what);
        return found;
    }
    if ((index_->is_crowded(hash) && !evict_from_bucket(hash)) || !reserve_slot()) {
        free_prepared(offset, what);
        found.status = Status::full;
        return found;
    }
    what.header.payload_crc = crc;
    found.status = Status::done;
    found.serial = serial < first_serial_ ? index_->next_serial() : serial;  // a put during a rotation comes after it
    enter(what.header, what.key, {found.serial, offset, what.expiry, hash, what.units});
    return found;
}

bool Objects::abort(std::uint64_t offset, std::uint64_t serial) {
    const auto found = preparations_.find(offset);
    if (found == preparations_.end() || found->second.serial != serial) {
        return false;
    }
    free_prepared(offset, found->second);
    preparations_.erase(found);
    return true;
}

// Writes the header of an extent and puts it into the index.
std::uint32_t Objects::enter(const ObjectHeader& settings, std::string_view key, const Index::Entry& entry) {
    ObjectHeader header = settings;  // apart from the segment, where publishers may write
    header.key_nbytes = static_cast<std::uint16_t>(key.size());
    header.serial = entry.serial;
    header.units = entry.units;
    header.slot = index_->next_slot();
    header.tenant = tenant_;
    header.epoch = entry.serial < first_serial_ ? header.epoch : epoch_;
    seal(header, key.data());
    std::byte* extent = at(entry.offset);
    std::memset(extent, 0, payload_at(key.size()));
    std::memcpy(extent, &header, sizeof header);
    std::memcpy(extent + sizeof header, key.data(), key.size());
    const std::uint32_t slot = index_->add(entry);
    enqueue(slot, entry);
    indexed_units_ += entry.units;
    fixed_units_ += is_fixed(entry) ? entry.units : 0;
    firm_units_ += is_firm(entry) ? entry.units : 0;
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
    header_bytes_ += std::uint64_t{entry.units} * unit_nbytes - header.key_nbytes - (entry.blocks == 0 ? header.nbytes : 0);
    if (entry.serial < first_serial_) {  // it moves
        ++outdated_.objects;
        outdated_.nbytes += header.nbytes;
    }
    counts_.payload_bytes += header.nbytes;
    counts_.shelved += entry.blocks != 0 ? 1 : 0;
}

void Objects::discount(std::uint32_t slot) {
    const Index::Entry entry = index_->at(slot);
    const std::uint64_t nbytes = payload_nbytes(slot);
    if (entry.serial < first_serial_) {
        --outdated_.objects;
        outdated_.nbytes -= nbytes;
    }
    header_bytes_ -= std::uint64_t{entry.units} * unit_nbytes - key_nbytes(slot) - (entry.blocks == 0 ? nbytes : 0);
    counts_.payload_bytes -= nbytes;
    counts_.shelved -= entry.blocks != 0 ? 1 : 0;
}

std::uint64_t Objects::payload_nbytes(std::uint32_t slot) const {
    const std::uint64_t units = shelf_ == nullptr ? 0 : free_units_[slot];
    return payload_room(index_->at(slot), key_nbytes(slot)) - units * unit_nbytes - shapes_[slot].padding;
}

Status Objects::remove(std::string_view key) {
    const std::uint64_t hash = index_->hash(key);
    remember_drop(hash);  // also where there is nothing: a copy may be under way
    const std::uint32_t slot = live_slot(key, hash);
    if (slot == Index::none) {
        return Status::missing;
    }
    take_out(slot);
    return Status::done;
}

void Objects::remember_drop(std::uint64_t hash) {
    const std::uint64_t now = now_milliseconds();
    while (!drops_.empty() && (drops_.front().first <= now || drops_.size() >= most_drops)) {
        const auto [until, oldest] = drops_.front();
        drops_.pop_front();
        if (const auto known = dropped_.find(oldest); known != dropped_.end() && known->second == until) {
            dropped_.erase(known);
        }
    }
    drops_.emplace_back(now + drops_kept_ms, hash);
    dropped_.insert_or_assign(hash, now + drops_kept_ms);
}

bool Objects::dropped_lately(std::uint64_t hash) const {
    const auto known = dropped_.find(hash);
    return known != dropped_.end() && known->second > now_milliseconds();
}

void Objects::rotate(std::uint32_t epoch) {
    begun_ = {index_->size() - outdated_.objects, counts_.payload_bytes - outdated_.nbytes};
    outdated_ = {index_->size(), counts_.payload_bytes};
    epoch_ = epoch;
    first_serial_ = index_->next_serial();
    index_->begin_epoch(epoch_, first_serial_);
    sweep(std::min(swept_at_once, swept_for_each * begun_.objects));
}

bool Objects::is_over(const Index::Entry& entry) const { return entry.serial < first_serial_ || has_expired(entry.expiry); }

void Objects::take_out_over(std::uint32_t slot) {
    counts_.expired += index_->at(slot).serial < first_serial_ ? 0 : 1;
    take_out(slot);
}

Touched Objects::touch(std::string_view key, std::uint64_t ttl_ms, Keep keep, std::uint64_t seen) {
    const std::uint32_t slot = live_slot(key, index_->hash(key));
    if (slot == Index::none) {
        return {Status::missing, 0};
    }
    const auto [serial, word] = std::pair(index_->at(slot).serial, index_->at(slot).expiry);
    const bool is_kept = (word & kept_flag) != 0;
    // Keeping an object that another program keeps does not harm that program.
    if (seen != 0 && seen != mark_of(serial, word) && !(keep == Keep::keep && is_kept)) {
        return {Status::unknown, mark_of(serial, word)};
    }
    if (keep == Keep::keep && !is_kept && !may_fix(found_at(slot))) {
        return {Status::busy, mark_of(serial, word)};
    }
    const std::uint64_t end = end_of(ttl_ms);
    const std::uint64_t now = keep == Keep::let_go ? changed(word, end)
                              : keep == Keep::keep ? kept_flag | changed(word, later(end_in(word), end))
                                                   : extended(word, end);
    set_expiry(slot, now);
    marks_.set(slot);
    return {Status::done, mark_of(serial, now)};
}

void Objects::set_expiry(std::uint32_t slot, std::uint64_t expiry) {
    const Index::Entry before = index_->at(slot);
    fixed_units_ -= is_fixed(before) ? before.units : 0;
    firm_units_ -= is_firm(before) ? before.units : 0;
    unqueue(slot, before, policy::Leaving::deleted);
    index_->set_expiry(slot, expiry);
    const Index::Entry after = index_->at(slot);
    fixed_units_ += is_fixed(after) ? after.units : 0;
    firm_units_ += is_firm(after) ? after.units : 0;
    enqueue(slot, after);
}

// Enters an object into its eviction queue, with what it costs to make again if its publisher has said so. Kept objects are in
// none, and those leaving for the file in none before they are there.
void Objects::enqueue(std::uint32_t slot, const Index::Entry& entry) {
    if ((entry.expiry & kept_flag) == 0 && !leaving_.contains(entry.offset)) {
        const double cost = header_at(entry.offset).recompute_us;  // a hint: publishers may have changed it
        queue_of(entry).insert(slot, {entry.hash, entry.blocks == 0 ? entry.units : entry.blocks, policy::never, cost});
    }
}

void Objects::unqueue(std::uint32_t slot, const Index::Entry& entry, policy::Leaving why) {
    if (queue_of(entry).contains(slot)) {
        queue_of(entry).remove(slot, why);
    }
}

bool Objects::may_fix(const Found& found) const {
    const Index::Entry entry = index_->at(found.slot);
    const std::uint64_t nbytes = std::uint64_t{entry.units} * unit_nbytes;
    const std::uint64_t share = budget_.share_of_objects(tenant_);
    const std::uint64_t firm = firm_units_ * unit_nbytes + unsent_ + (is_firm(entry) ? 0 : nbytes);
    return budget_.may_fix(tenant_, is_fixed(entry) ? 0 : nbytes) && (is_firm(entry) || firm <= share - share / 8);
}

bool Objects::may_send(const Found& found, std::uint64_t nbytes, std::uint64_t most) const {
    const Index::Entry entry = index_->at(found.slot);
    const std::uint64_t more = std::uint64_t{entry.units} * unit_nbytes;
    const std::uint64_t share = budget_.share_of_objects(tenant_);
    return nbytes + more <= most && (is_firm(entry) || firm_units_ * unit_nbytes + unsent_ + more <= share - share / 8);
}

void Objects::hold(const Found& found) {
    Held& held = held_[found.offset];
    if (held.count++ == 0) {
        const Index::Entry entry = index_->at(found.slot);
        held.slot = found.slot;
        held.units = entry.units;
        held.block = entry.block;
        held.blocks = entry.blocks;
        fixed_units_ += (entry.expiry & kept_flag) == 0 ? entry.units : 0;
    }
}

void Objects::pin(const Found& found) {
    firm_units_ += is_firm(index_->at(found.slot)) ? 0 : index_->at(found.slot).units;
    hold(found);
    ++held_.at(found.offset).pins;
}

void Objects::unpin(std::uint64_t offset) {
    Held& held = held_.at(offset);
    const bool kept = !held.gone && (index_->at(held.slot).expiry & kept_flag) != 0;
    firm_units_ -= --held.pins == 0 && !kept ? held.units : 0;
    drop(offset);
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
        fixed_units_ -= (index_->at(held.slot).expiry & kept_flag) == 0 ? held.units : 0;
    }
}

std::uint32_t Objects::held_slot(std::uint64_t offset) const {
    const auto held = held_.find(offset);
    return held == held_.end() || held->second.gone ? Index::none : held->second.slot;
}

void Objects::take_out(std::uint32_t slot) {
    const Index::Entry entry = index_->at(slot);
    discount(slot);
    indexed_units_ -= entry.units;
    fixed_units_ -= is_fixed(entry) ? entry.units : 0;
    firm_units_ -= is_firm(entry) && !is_pinned(entry.offset) ? entry.units : 0;
    index_->remove(slot);
    unqueue(slot, entry, policy::Leaving::deleted);
    const auto held = held_.find(entry.offset);
    if (held == held_.end()) {
        free_extent(entry.offset, entry.units);
        free_blocks(entry.block, entry.blocks);
    } else {
        held->second.gone = true;
    }
}

void Objects::list(std::uint64_t& place, std::string_view after, std::string_view prefix, std::size_t limit,
                   std::vector<Listed>& found) const {
    const std::uint64_t passed = place_of(after);
    for (std::size_t looked = 0; looked < listed_buckets && found.size() < limit; ++looked) {
        using Candidate = std::tuple<std::uint64_t, std::string, std::uint32_t>;
        std::vector<Candidate> candidates;
        for (const std::uint32_t slot : index_->bucket(index_->bucket_of_hash(Index::reversed(place)))) {
            const Index::Entry entry = index_->at(slot);
            const std::uint64_t at = Index::reversed(entry.hash);
            std::string key(key_at(slot));  // a copy: publishers may change the one in the segment
            const bool behind = at > passed || (at == passed && key > after);
            if (at >= place && behind && !is_over(entry) && key.starts_with(prefix)) {
                candidates.emplace_back(at, std::move(key), slot);
            }
        }
        std::sort(candidates.begin(), candidates.end());
        for (const auto& [at, key, slot] : candidates) {
            const Found one = found_at(slot);
            const bool kept = (index_->at(slot).expiry & kept_flag) != 0;
            found.push_back({key, one.serial, one.nbytes, one.head.ttl_ms, one.pins, one.head.copies, kept});
        }
        place = index_->next_place(place);
        if (place == 0) {
            return;
        }
    }
}

std::uint64_t Objects::overhead() const noexcept {
    // The mark of a visit, and what is known of the header.
    const std::uint64_t beside_slot = 1 + sizeof(Shape) + (shelf_ == nullptr ? 0 : 1);
    return index_->slots_used() * (sizeof(IndexSlot) + beside_slot) + index_->buckets() * sizeof(std::uint32_t) +
           header_bytes_ + upper_->nbytes() + lower_->nbytes();
}

}  // namespace farpool
