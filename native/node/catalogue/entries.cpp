#include "node/catalogue/entries.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <string_view>

#include "node/catalogue/expiry.hpp"

namespace farpool {

namespace {

// Objects of an ended session that lose their priority at once. The node serves nothing else until that is done.
constexpr std::size_t ended_at_once_max = 4096;

}  // namespace

Entries::Entries(std::uint32_t tenant, Room& room, Index& index, Media& media)
    : tenant_(tenant),
      room_(room),
      index_(index),
      media_(media),
      records_(index, media),
      queues_(index, room.limit()),
      epochs_(index) {
    index_.adopt([this](std::uint32_t slot) { return adopt(slot); });
    charge_tables();
}

std::uint32_t Entries::find(std::string_view key, std::uint64_t hash) {
    ++counts_.searches;
    const std::uint32_t slot = records_.find(key, hash);
    // If a header or a key is damaged, we do not know which object it was: it may be this one.
    const std::uint32_t damaged = slot != Index::none && records_.is_intact(slot) ? Index::none : records_.find_damaged(hash);
    if (damaged != Index::none) {
        evict(damaged, Change::damaged);
        ++counts_.damaged;
        return find(key, hash);
    }
    if (slot != Index::none && is_over(index_.at(slot))) {
        remove_over(slot);
        return Index::none;
    }
    return slot;
}

Found Entries::found_at(std::uint32_t slot) const {
    const Index::Entry entry = index_.at(slot);
    const ObjectHeader& header = media_.ram().header_at(entry.offset);
    const std::size_t key_nbytes = records_.key_nbytes(slot);
    Found found{};
    found.status = Status::done;
    found.serial = entry.serial;
    found.slot = slot;
    found.offset = entry.offset;
    found.payload = entry.offset + payload_at(key_nbytes);
    found.nbytes = records_.payload_nbytes(slot);
    found.view = media_.view(entry, key_nbytes);
    found.is_mapped_by_readers = media_.is_mapped_by_readers(entry);
    found.block = entry.block;
    found.crc = header.payload_crc;
    found.pins = references_.count(entry.offset);
    found.visited = entry.blocks != 0 && queues_.was_visited(slot);
    const Retained retained = this->retained(slot);
    const bool ends = retained.session != 0 || retained.until != 0;
    const std::uint32_t flags =
        (is_kept(entry) ? kept_object : 0) | (ends ? priority_ends : 0) | std::uint32_t{retained.priority} << priority_shift;
    found.head = {left_until(entry.expiry), header.copies,     header.kind, header.parts,
                  header.recompute_us,      header.name_space, flags,       epochs_.epoch()};
    return found;
}

bool Entries::reserve_slot() {
    Visits& visits = queues_.visits();
    const std::uint64_t more = index_.growth() + (index_.next_slot() < visits.backed() ? 0 : Visits::backing_slots);
    if (more > 0 && (!room_.make_room(more) || !room_.make_backing_room(more))) {
        return false;
    }
    const auto has_memory = [&] {
        errno = 0;  // the index has a limit of its own, which is no lack of memory
        return index_.reserve() && visits.back(index_.next_slot());
    };
    bool done = has_memory();
    while (!done && is_lack_of_memory(errno) && room_.return_backing(more)) {
        done = has_memory();
    }
    charge_tables();
    return done;
}

void Entries::charge_tables() {
    const std::uint64_t backed = index_.grown() + queues_.visits().backed();
    room_.set_tables(backed - std::min(backed, Visits::backing_slots));
}

std::uint32_t Entries::enter(const ObjectHeader& settings, std::string_view key, const Index::Entry& entry,
                             const Retained& retained) {
    ObjectHeader header = settings;  // not in the segment, where publishers may write
    header.key_nbytes = static_cast<std::uint16_t>(key.size());
    header.serial = entry.serial;
    header.units = entry.units;
    header.slot = index_.next_slot();
    header.tenant = tenant_;
    header.epoch = epochs_.is_outdated(entry.serial) ? header.epoch : epochs_.epoch();
    seal(header, key.data());
    std::byte* extent = media_.ram().at(entry.offset);
    std::memset(extent, 0, payload_at(key.size()));
    std::memcpy(extent, &header, sizeof header);
    std::memcpy(extent + sizeof header, key.data(), key.size());
    const std::uint32_t slot = index_.add(entry);
    if (retained.priority > 0) {
        queues_.retention().set(slot, retained);
    }
    set_up(slot, header);
    return slot;
}

// Counts an object that has entered the index, and enters it into its queue.
void Entries::set_up(std::uint32_t slot, const ObjectHeader& header) {
    const Index::Entry entry = index_.at(slot);
    enqueue(slot, entry);
    room_.enter(entry.units, is_fixed(entry), is_firm(entry));
    records_.add(slot, header);
    epochs_.add(entry.serial, header.nbytes);
    counts_.payload_bytes += header.nbytes;
    counts_.shelved += entry.blocks != 0 ? 1 : 0;
    count_retained(slot, true);
}

void Entries::enqueue(std::uint32_t slot, const Index::Entry& entry) {
    if (!is_kept(entry) && !media_.is_moving(entry.offset)) {
        queues_.insert(slot, entry, media_.ram().header_at(entry.offset).recompute_us);  // a hint: publishers may change it
    }
}

// True if a header from an earlier start is intact and its payload is where the slot says.
bool Entries::fits(const ObjectHeader& header, const Index::Entry& entry) const {
    const std::uint64_t nbytes = std::uint64_t{entry.units} * unit_nbytes;
    if (entry.blocks == 0) {
        return is_whole(header, nbytes) && units_for(header.key_nbytes, header.nbytes) == entry.units;
    }
    return media_.has_lower() && index_.shelf() == media_.lower_id() && is_whole(header, nbytes, false) &&
           units_for(header.key_nbytes, 0) == entry.units && header.nbytes > 0 && header.nbytes <= media_.lower().capacity() &&
           media_.lower().units(header.nbytes) == entry.blocks;
}

// We trust the index, because only the node can write it, and not the data segment.
bool Entries::adopt(std::uint32_t slot) {
    const Index::Entry entry = index_.at(slot);
    if (!media_.ram().has_place(entry.offset, entry.units)) {
        return false;
    }
    const Head head = copy_head(media_.ram().at(entry.offset), std::uint64_t{entry.units} * unit_nbytes);
    const ObjectHeader& header = head.header;
    if (epochs_.is_outdated(entry.serial) || header.epoch != epochs_.epoch() || !fits(header, entry) ||
        header.serial != entry.serial || header.units != entry.units || header.slot != slot ||
        index_.hash(key_of(header)) != entry.hash) {
        return false;
    }
    if (records_.find(key_of(header), entry.hash) != Index::none) {  // the node was killed while it moved the object
        return false;
    }
    if (!media_.adopt(entry)) {
        return false;
    }
    set_up(slot, header);
    return true;
}

void Entries::remove(std::uint32_t slot) {
    const Index::Entry entry = index_.at(slot);
    const std::uint64_t nbytes = records_.payload_nbytes(slot);
    epochs_.remove(entry.serial, nbytes);
    records_.remove(slot);
    counts_.payload_bytes -= nbytes;
    counts_.shelved -= entry.blocks != 0 ? 1 : 0;
    count_retained(slot, false);
    room_.leave(entry.units, is_fixed(entry), is_firm(entry) && !references_.is_pinned(entry.offset));
    index_.remove(slot);
    queues_.remove(slot, entry, policy::Leaving::deleted);
    queues_.retention().set(slot, {});
    if (!references_.mark_gone(entry.offset)) {
        media_.release_units(entry.offset, entry.units);
        media_.release_blocks(entry.block, entry.blocks);
    }
}

void Entries::remove(std::uint32_t slot, Change why) {
    const Index::Entry entry = index_.at(slot);
    // The journal has named all outdated objects at once.
    if (journal_.is_on() && !epochs_.is_outdated(entry.serial)) {
        char copied[largest_key];  // before we check it: publishers may change the key in the segment
        const std::string_view key(copied, records_.key(slot).copy(copied, sizeof copied));
        const bool is_intact = index_.hash(key) == entry.hash;
        journal_.add(why, entry.serial, is_intact ? key : std::string_view(), records_.payload_nbytes(slot));
    }
    remove(slot);
}

void Entries::remove_over(std::uint32_t slot) {
    counts_.expired += epochs_.is_outdated(index_.at(slot).serial) ? 0 : 1;
    remove(slot, Change::expired);
}

void Entries::set_expiry(std::uint32_t slot, std::uint64_t word) {
    const Index::Entry before = index_.at(slot);
    room_.leave(before.units, is_fixed(before), is_firm(before));
    queues_.remove(slot, before, policy::Leaving::deleted);
    index_.set_expiry(slot, word);
    const Index::Entry after = index_.at(slot);
    room_.enter(after.units, is_fixed(after), is_firm(after));
    enqueue(slot, after);
}

void Entries::count_retained(std::uint32_t slot, bool more) {
    if (priority(slot) > 0) {
        const std::uint64_t nbytes = records_.payload_nbytes(slot);
        counts_.retained += more ? 1 : ~std::uint64_t{0};
        counts_.retained_bytes += more ? nbytes : 0 - nbytes;
    }
}

void Entries::set_retained(std::uint32_t slot, const Retained& retained) {
    if (retained.priority == priority(slot)) {  // the object keeps its place, and what the queue has learnt about it
        return queues_.retention().set(slot, retained);
    }
    const Index::Entry entry = index_.at(slot);
    queues_.remove(slot, entry, policy::Leaving::deleted);
    count_retained(slot, false);
    queues_.retention().set(slot, retained);
    count_retained(slot, true);
    enqueue(slot, entry);
}

std::size_t Entries::end_session(std::uint64_t session) {
    const std::size_t objects = queues_.retention().end(session);
    release_ended(ended_at_once_max);
    return objects;
}

void Entries::release_ended(std::size_t objects) {
    for (; objects > 0; --objects) {
        const policy::Slot slot = queues_.retention().next_ended();
        if (slot == policy::no_slot) {
            return;
        }
        set_retained(slot, {});
    }
}

void Entries::retain(std::uint64_t offset, std::uint32_t slot) {
    const Index::Entry entry = index_.at(slot);
    if (references_.add(offset, slot, entry)) {
        room_.fix(is_kept(entry) ? 0 : entry.units);
    }
}

void Entries::release(std::uint64_t offset) {
    const std::optional<References::Counted> last = references_.release(offset);
    if (!last) {
        return;
    }
    if (last->gone) {
        media_.release_units(offset, last->units);
        media_.release_blocks(last->block, last->blocks);
    } else {
        room_.unfix(is_kept(index_.at(last->slot)) ? 0 : last->units);
    }
}

void Entries::pin(const Found& found) {
    const Index::Entry entry = index_.at(found.slot);
    room_.make_firm(is_firm(entry) ? 0 : entry.units);
    retain(found.offset, found.slot);
    references_.add_pin(found.offset);
}

void Entries::unpin(std::uint64_t offset) {
    const References::Counted& object = references_.at(offset);
    const bool kept = !object.gone && is_kept(index_.at(object.slot));
    room_.end_firm(references_.remove_pin(offset) && !kept ? object.units : 0);
    release(offset);
}

std::pair<std::string, std::uint64_t> Entries::held(std::uint64_t offset) const {
    const References::Counted& object = references_.at(offset);
    const std::uint64_t nbytes = std::uint64_t{object.units} * unit_nbytes;
    const Head head = copy_head(media_.ram().at(offset), nbytes);
    const bool is_intact = is_whole(head.header, nbytes, false) &&
                           (object.gone || index_.hash(key_of(head.header)) == index_.at(object.slot).hash);
    return {std::string(is_intact ? key_of(head.header) : std::string_view()), nbytes};
}

bool Entries::may_fix(const Found& found) const {
    const Index::Entry entry = index_.at(found.slot);
    const std::uint64_t nbytes = std::uint64_t{entry.units} * unit_nbytes;
    return room_.may_fix(is_fixed(entry) ? 0 : nbytes) && (is_firm(entry) || room_.may_be_firm(nbytes));
}

bool Entries::may_send(const Found& found, std::uint64_t nbytes, std::uint64_t nbytes_max) const {
    const Index::Entry entry = index_.at(found.slot);
    const std::uint64_t more = std::uint64_t{entry.units} * unit_nbytes;
    return nbytes + more <= nbytes_max && (is_firm(entry) || room_.may_be_firm(more));
}

void Entries::sweep(std::size_t slots) {
    release_ended(slots);
    const std::uint32_t used = index_.slots_used();
    for (std::size_t step = 0; step < std::min<std::size_t>(slots, used); ++step) {
        sweep_at_ = sweep_at_ + 1 < used ? sweep_at_ + 1 : 0;
        if (index_.is_live(sweep_at_) && is_over(index_.at(sweep_at_))) {
            remove_over(sweep_at_);
        } else if (queues_.retention().has_ended(sweep_at_)) {
            set_retained(sweep_at_, {});
        }
    }
}

std::uint64_t Entries::overhead_nbytes() const noexcept {
    const std::uint64_t mark_nbytes = 1;  // of visits
    return index_.slots_used() * (sizeof(IndexSlot) + mark_nbytes + records_.slot_nbytes()) +
           index_.buckets() * sizeof(std::uint32_t) + records_.overhead_nbytes() + queues_.nbytes() + journal_.nbytes();
}

}  // namespace farpool
