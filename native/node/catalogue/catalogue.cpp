#include "node/catalogue/catalogue.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <system_error>
#include <tuple>

namespace farpool {

namespace {

constexpr std::size_t listed_buckets = 64;  // in one call: the node serves nothing else until it returns
// We sweep this many slots when an epoch begins, and the others later: never more than the tenant's puts have paid for.
constexpr std::uint64_t rotation_slots_max = 20'000;
constexpr std::uint64_t slots_per_object = 64;
// The step in which a payload that is being received takes memory, as its bytes arrive.
constexpr std::uint64_t slice_nbytes = std::uint64_t{128} << 10;
// A payload of at most this size gets all of its memory at first, even if it arrives in slices.
constexpr std::uint64_t one_slice_nbytes = std::uint64_t{1} << 20;

std::uint64_t lent_nbytes(const Budget& budget) { return budget.limit() / unit_nbytes * unit_nbytes; }

// Bytes of the data segment: for present objects, for announced ones whose bytes have not arrived, and as many again, so that
// there are large holes. Objects that move to the lower medium keep their place a while longer.
std::uint64_t place_nbytes(const Budget& budget, const Medium* lower) {
    return 3 * lent_nbytes(budget) + (lower == nullptr ? 0 : Budget::moving_bytes_max);
}

}  // namespace

Catalogue::Catalogue(const std::string& folder, std::uint32_t tenant, Budget& budget, Medium* lower, bool fresh,
                     std::string& note)
    : Catalogue(object_paths(folder, tenant), tenant, budget, lower,
                open_object_files(object_paths(folder, tenant), tenant, lent_nbytes(budget), place_nbytes(budget, lower), fresh,
                                  note),
                note) {}

Catalogue::Catalogue(ObjectPaths paths, std::uint32_t tenant, Budget& budget, Medium* lower, ObjectFiles files,
                     std::string& note)
    : paths_(std::move(paths)),
      room_(budget, tenant),
      index_(std::move(files.index)),
      media_(room_, std::move(files.data), lower),
      entries_(tenant, room_, *index_, media_),
      eviction_(room_, media_, entries_) {
    if (index_->lent_out()) {
        leave_old_file(note);
    } else {
        media_.ram().assume_backed(true);
        trim();  // the holes of an earlier start
    }
    index_->set_shelf(media_.lower_id());
    entries_.counts().adopted = index_->size();
    // Objects that were moving to the lower medium when a node was killed move there now. We evict none only because the medium
    // is slow.
    while (budget.used() > budget.limit() && room_.may_move_more() && evict_one(false)) {
    }
    index_->set_retired(false);
    room_.join(*this);
}

Catalogue::~Catalogue() { room_.leave_budget(); }

// Moves the objects to a new data file. Programs of an earlier start may still read their pins or write their preparations in
// the old file. We do not know these programs, so they keep the old file as long as they have it mapped. The new file replaces
// the old one when it has all objects: a node that is killed before that begins again.
void Catalogue::leave_old_file(std::string& note) {
    Ram& ram = media_.ram();
    SegmentHeader header{};  // not the old one, which those programs can write
    lay_out_data(header, index_->segment().header(), ram.capacity());
    std::optional<Segment> old;
    try {
        old = ram.replace(draft_segment(paths_.data, header));
    } catch (const std::system_error& error) {
        if (!is_lack_of_memory(error.code().value())) {
            throw;
        }
        note = "the objects of an earlier start are forgotten: the file system has no memory for a file without programs in it";
        for (std::uint32_t slot = 0; slot < index_->slots_used(); ++slot) {
            if (index_->is_live(slot)) {
                entries_.remove(slot);
            }
        }
        remove_file(paths_.data);
        ram.close_segment();  // frees its memory, unless a program has it mapped
        ram.replace(draft_segment(paths_.data, header));
    }
    for (std::uint32_t slot = 0; slot < index_->slots_used(); ++slot) {
        if (!index_->is_live(slot)) {
            continue;
        }
        const Index::Entry entry = index_->at(slot);
        if (ram.back(entry.offset, entry.units)) {
            std::memcpy(at(entry.offset), old->memory.data() + entry.offset, std::uint64_t{entry.units} * unit_nbytes);
        } else {
            entries_.remove(slot);
        }
    }
    put_in_place(ram.segment());
    index_->count_lent_out(0);
}

Found Catalogue::find(std::string_view key, bool visit) {
    const std::uint32_t slot = entries_.find(key, index_->hash(key));
    if (slot == Index::none) {
        return {};
    }
    const Found found = entries_.found_at(slot);
    if (visit) {
        entries_.visit(slot);
    }
    return found;
}

// Answers a put of a key that already has an object; this counts as a use. The higher priority stays.
Found Catalogue::present(std::uint32_t slot, std::uint64_t expiry, std::uint8_t priority) {
    if (priority > entries_.retained(slot).priority) {
        entries_.set_retained(slot, {priority});
    }
    index_->set_expiry(slot, extended(index_->at(slot).expiry, expiry));
    entries_.visit(slot);
    Found found = entries_.found_at(slot);
    found.status = Status::present;
    return found;
}

// True for a copy from another node that is older than this catalogue's epoch or than the deletion of its key.
bool Catalogue::is_refused(bool copied, std::uint32_t epoch, std::uint64_t hash) const {
    return copied && (epoch < this->epoch() || deletes_.contains(hash));
}

Found Catalogue::prepare(std::string_view key, std::uint64_t nbytes, const ObjectHead& head, Arrival arrival) {
    const std::uint64_t expiry = end_of(head.ttl_ms);
    const auto priority = static_cast<std::uint8_t>(head.flags >> priority_shift & priority_mask);
    const std::uint64_t hash = index_->hash(key);
    if (const std::uint32_t slot = entries_.find(key, hash); slot != Index::none) {
        return present(slot, expiry, priority);
    }
    Found prepared{};
    const bool copied = (head.flags & copied_object) != 0;
    if (is_refused(copied, head.epoch, hash)) {
        return prepared;
    }
    if (nbytes > room_.limit() || units_for(key.size(), nbytes) * unit_nbytes > room_.limit() ||
        units_for(key.size(), nbytes) > std::numeric_limits<std::uint32_t>::max()) {
        prepared.status = Status::too_large;
        return prepared;
    }
    const auto units = static_cast<std::uint32_t>(units_for(key.size(), nbytes));
    if (!room_.may_fix(std::uint64_t{units} * unit_nbytes)) {
        prepared.status = Status::busy;
        return prepared;
    }
    const std::uint64_t first = arrival == Arrival::in_slices && nbytes > one_slice_nbytes ? slice_nbytes : nbytes;
    const auto taken = static_cast<std::uint32_t>(units_for(key.size(), first));
    const std::optional<std::uint64_t> offset = eviction_.alloc(units, taken);
    if (!offset) {
        prepared.status = Status::full;
        return prepared;
    }
    room_.announce(units - taken);
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
    preparations_.emplace(
        *offset, Preparation{std::string(key), prepared.serial, expiry, units, taken, header, copied, head.epoch, priority});
    return prepared;
}

Status Catalogue::extend(std::uint64_t offset) {
    Preparation& prepared = preparations_.at(offset);
    const std::uint32_t rest = prepared.units - prepared.taken;
    const auto more = std::min(rest, static_cast<std::uint32_t>(slice_nbytes / unit_nbytes));
    const std::uint64_t nbytes = std::uint64_t{more} * unit_nbytes;
    if (!room_.may_fix(nbytes)) {
        return Status::busy;
    }
    // Others may have taken memory since we found enough for the whole payload.
    if (!room_.can_take(std::uint64_t{rest} * unit_nbytes) || !room_.make_room(nbytes)) {
        return Status::full;
    }
    room_.take(more);
    if (!media_.ram().back(offset + std::uint64_t{prepared.taken} * unit_nbytes, more, rest - more)) {
        room_.release(more);
        return Status::full;
    }
    prepared.taken += more;
    room_.end_announcement(more);
    return Status::done;
}

std::uint64_t Catalogue::writable(std::uint64_t offset) const {
    const Preparation& prepared = preparations_.at(offset);
    return std::min(prepared.header.nbytes, std::uint64_t{prepared.taken} * unit_nbytes - payload_at(prepared.key.size()));
}

Found Catalogue::commit(std::uint64_t offset, std::uint64_t serial, std::uint32_t crc) {
    const auto known = preparations_.find(offset);
    Found found{};
    if (known == preparations_.end() || known->second.serial != serial) {
        found.status = Status::unknown;
        return found;
    }
    Preparation prepared = std::move(known->second);
    preparations_.erase(known);
    const std::uint64_t hash = index_->hash(prepared.key);
    if (const std::uint32_t first = entries_.find(prepared.key, hash); first != Index::none) {
        free_prepared(offset, prepared);
        return present(first, prepared.expiry, prepared.priority);
    }
    if (is_refused(prepared.copied, prepared.epoch, hash)) {
        free_prepared(offset, prepared);
        return found;
    }
    if ((index_->is_crowded(hash) && !eviction_.evict_from_bucket(hash)) || !entries_.reserve_slot()) {
        free_prepared(offset, prepared);
        found.status = Status::full;
        return found;
    }
    prepared.header.payload_crc = crc;
    found.status = Status::done;
    // A put during a rotation belongs to the new epoch.
    found.serial = entries_.epochs().is_outdated(serial) ? index_->next_serial() : serial;
    entries_.enter(prepared.header, prepared.key, {found.serial, offset, prepared.expiry, hash, prepared.units},
                   {prepared.priority});
    entries_.journal().add(Change::stored, found.serial, prepared.key, prepared.header.nbytes, prepared.expiry,
                           prepared.header.copies);
    return found;
}

bool Catalogue::abort(std::uint64_t offset, std::uint64_t serial) {
    const auto found = preparations_.find(offset);
    if (found == preparations_.end() || found->second.serial != serial) {
        return false;
    }
    free_prepared(offset, found->second);
    preparations_.erase(found);
    return true;
}

void Catalogue::free_prepared(std::uint64_t offset, const Preparation& prepared) {
    room_.end_announcement(prepared.units - prepared.taken);
    media_.ram().release(offset, prepared.units);
    room_.release(prepared.taken);
}

Status Catalogue::remove(std::string_view key) {
    const std::uint64_t hash = index_->hash(key);
    deletes_.add(hash);  // also if there is no object, because a copy may be on its way
    const std::uint32_t slot = entries_.find(key, hash);
    if (slot == Index::none) {
        return Status::missing;
    }
    entries_.remove(slot, Change::dropped);
    return Status::done;
}

Touched Catalogue::touch(std::string_view key, std::uint64_t ttl_ms, Keep keep, std::uint64_t seen) {
    const std::uint32_t slot = entries_.find(key, index_->hash(key));
    if (slot == Index::none) {
        return {Status::missing, 0};
    }
    const auto [serial, word] = std::pair(index_->at(slot).serial, index_->at(slot).expiry);
    const bool is_kept = (word & kept_flag) != 0;
    // Keeping an object that another program keeps does not harm that program.
    if (seen != 0 && seen != mark_of(serial, word) && !(keep == Keep::keep && is_kept)) {
        return {Status::unknown, mark_of(serial, word)};
    }
    if (keep == Keep::keep && !is_kept && !entries_.may_fix(entries_.found_at(slot))) {
        return {Status::busy, mark_of(serial, word)};
    }
    const std::uint64_t end = end_of(ttl_ms);
    const std::uint64_t now = keep == Keep::let_go ? changed(word, end)
                              : keep == Keep::keep ? kept_flag | changed(word, later(end_in(word), end))
                                                   : extended(word, end);
    entries_.set_expiry(slot, now);
    if (is_kept != ((now & kept_flag) != 0)) {
        const Found found = entries_.found_at(slot);
        entries_.journal().add(is_kept ? Change::let_go : Change::kept, serial, key, found.nbytes, now, found.head.copies);
    }
    entries_.visit(slot);
    return {Status::done, mark_of(serial, now)};
}

Status Catalogue::retain(std::string_view key, const Retained& retained, bool raises) {
    const std::uint32_t slot = entries_.find(key, index_->hash(key));
    if (slot == Index::none) {
        return Status::missing;
    }
    if (!raises || retained.priority >= entries_.retained(slot).priority) {
        entries_.set_retained(slot, retained);
    }
    if (retained.priority > 0) {
        entries_.visit(slot);
    }
    return Status::done;
}

void Catalogue::rotate(std::uint32_t epoch) {
    entries_.rotate(epoch);
    entries_.sweep(std::min(rotation_slots_max, slots_per_object * begun().objects));
}

Found Catalogue::copy_to_ram(const Found& found) {
    if (found.is_mapped_by_readers) {
        return found;
    }
    retain(found);
    const std::optional<Found> moved = promote(found.offset, found.view);
    release(found.offset);
    return moved.value_or(found);
}

void Catalogue::lose(std::uint64_t offset) {
    if (const std::uint32_t slot = entries_.retained_slot(offset); slot != Index::none) {
        entries_.remove(slot, Change::damaged);
    }
}

void Catalogue::trim() {
    Ram& ram = media_.ram();
    ram.trim();
    if (room_.has_announced()) {  // places without memory may have had memory before
        for (const auto& [offset, prepared] : preparations_) {
            ram.return_pages(offset + std::uint64_t{prepared.taken} * unit_nbytes,
                             offset + std::uint64_t{prepared.units} * unit_nbytes);
        }
    }
}

std::uint64_t Catalogue::taken() const {
    return media_.ram().segment().file.taken() + entries_.queues().visits().taken() + index_->segment().file.taken();
}

void Catalogue::list(std::uint64_t& place, std::string_view after, std::string_view prefix, std::size_t limit,
                     std::vector<Listed>& found) const {
    const std::uint64_t passed = place_of(after);
    for (std::size_t searched = 0; searched < listed_buckets && found.size() < limit; ++searched) {
        using Candidate = std::tuple<std::uint64_t, std::string, std::uint32_t>;
        std::vector<Candidate> candidates;
        for (const std::uint32_t slot : index_->bucket(index_->bucket_of_hash(Index::reversed(place)))) {
            const Index::Entry entry = index_->at(slot);
            const std::uint64_t at = Index::reversed(entry.hash);
            std::string key(entries_.records().key(slot));  // a copy: publishers may change the key in the segment
            const bool is_behind = at > passed || (at == passed && key > after);
            if (at >= place && is_behind && !entries_.is_over(entry) && key.starts_with(prefix)) {
                candidates.emplace_back(at, std::move(key), slot);
            }
        }
        std::sort(candidates.begin(), candidates.end());
        for (const auto& [at, key, slot] : candidates) {
            const Found one = entries_.found_at(slot);
            const bool kept = (one.head.flags & kept_object) != 0;
            found.push_back({key, one.serial, one.nbytes, one.head.ttl_ms, one.pins, one.head.copies, kept});
        }
        place = index_->next_place(place);
        if (place == 0) {
            return;
        }
    }
}

std::pair<int, int> Catalogue::open_files(bool writable) const {
    File index(index_->segment().file.read_only());
    const File& data = media_.ram().segment().file;
    const int opened = writable ? data.duplicate() : data.read_only();
    return {index.release(), opened};
}

void Catalogue::remove_files() {
    index_->set_retired(true);
    remove_file(paths_.index);
    remove_file(paths_.data);
}

}  // namespace farpool
