// Room for objects: free extents, their backing with memory by the system, and eviction.
#include <algorithm>
#include <cerrno>
#include <limits>

#include "node/objects.hpp"

namespace farpool {

namespace {

constexpr std::uint64_t page_nbytes = 4096;
// Bytes of holes to look at in a round, for memory to return: about a millisecond of work.
constexpr std::uint64_t looked_nbytes = std::uint64_t{4} << 30;
// Bytes that count in addition for each hole, because its system call takes as long as looking at this many bytes.
constexpr std::uint64_t hole_cost_nbytes = std::uint64_t{1} << 20;

constexpr std::uint64_t down(std::uint64_t value, std::uint64_t step) { return value / step * step; }
constexpr std::uint64_t up(std::uint64_t value, std::uint64_t step) { return down(value + step - 1, step); }

}  // namespace

void Objects::free_extent(std::uint64_t offset, std::uint32_t units) {
    space_->free(static_cast<std::int64_t>((offset - segment_header_nbytes) / unit_nbytes), units);
    if (leaving_.erase(offset) > 0) {
        budget_.leaving -= std::uint64_t{units} * unit_nbytes;
    } else {
        give(units);
    }
}

void Objects::take(std::uint32_t units) {
    used_ += std::uint64_t{units} * unit_nbytes;
    budget_.used += std::uint64_t{units} * unit_nbytes;
    budget_.objects += std::uint64_t{units} * unit_nbytes;
}

void Objects::give(std::uint32_t units) {
    used_ -= std::uint64_t{units} * unit_nbytes;
    budget_.used -= std::uint64_t{units} * unit_nbytes;
    budget_.objects -= std::uint64_t{units} * unit_nbytes;
}

std::optional<std::uint64_t> Objects::alloc(std::uint32_t units, std::uint32_t taken) {
    const std::uint64_t most = std::uint64_t{units} * unit_nbytes;
    if (!may_announce(std::uint64_t{units - taken} * unit_nbytes) || !can_take(most) || !reserve_slot() ||
        !budget_.make_room(tenant_, std::uint64_t{taken} * unit_nbytes)) {
        return std::nullopt;
    }
    // Where memory has been: to move it from one place to another takes as long as to fill it. So what comes whole makes
    // itself a hole there, at the price of a little more that goes; what comes in slices must not evict before its bytes
    // are here.
    const auto dense = static_cast<std::int64_t>((room() - (shelf_ == nullptr ? 2 : 1) * budget_.limit) / unit_nbytes);
    const std::uint64_t used = used_;
    std::int64_t first = space_->alloc_lowest(units);
    if (first + units > dense && taken < units && budget_.left() < std::uint64_t{units - taken} * unit_nbytes) {
        // One would have to go for the next slices anyway, and may leave a hole for all of them.
        if (first >= 0) {
            space_->free(first, units);
        }
        evict_one();
        first = space_->alloc_lowest(units);
    }
    while (first < 0 || (first + units > dense && taken == units && used - used_ < most)) {
        const std::uint64_t before = counts_.evictions;
        if (first >= 0) {
            space_->free(first, units);
        }
        evict_around(units);
        first = space_->alloc_lowest(units);
        if (counts_.evictions == before) {
            break;
        }
    }
    if (first < 0) {
        return std::nullopt;
    }
    const std::uint64_t offset = segment_header_nbytes + static_cast<std::uint64_t>(first) * unit_nbytes;
    take(taken);
    if (!back_extent(offset, taken, units - taken)) {
        space_->free(first, units);
        give(taken);
        return std::nullopt;
    }
    return offset;
}

Status Objects::extend(std::uint64_t offset) {
    Preparation& prepared = preparations_.at(offset);
    const auto more = std::min(prepared.units - prepared.taken, static_cast<std::uint32_t>(slice_nbytes / unit_nbytes));
    const std::uint64_t nbytes = std::uint64_t{more} * unit_nbytes;
    if (!budget_.may_fix(tenant_, nbytes)) {
        return Status::busy;
    }
    // Others may have taken memory since the node counted enough for all of it.
    if (!can_take(std::uint64_t{prepared.units - prepared.taken} * unit_nbytes) || !budget_.make_room(tenant_, nbytes)) {
        return Status::full;
    }
    take(more);
    if (!back_extent(offset + std::uint64_t{prepared.taken} * unit_nbytes, more, prepared.units - prepared.taken - more)) {
        give(more);
        return Status::full;
    }
    prepared.taken += more;
    announced_units_ -= more;
    return Status::done;
}

std::uint64_t Objects::writable(std::uint64_t offset) const {
    const Preparation& prepared = preparations_.at(offset);
    return std::min(prepared.header.nbytes, std::uint64_t{prepared.taken} * unit_nbytes - payload_at(prepared.key.size()));
}

void Objects::free_prepared(std::uint64_t offset, const Preparation& prepared) {
    announced_units_ -= prepared.units - prepared.taken;
    space_->free(static_cast<std::int64_t>((offset - segment_header_nbytes) / unit_nbytes), prepared.units);
    give(prepared.taken);
}

bool Objects::reserve_slot() {
    const std::uint64_t slot = index_->next_slot();
    const std::uint64_t more = index_->growth() + (slot < visits_->backed() ? 0 : Visits::backing_slots);
    if (more > 0 && (!budget_.make_room(tenant_, more) || !budget_.make_backing_room(tenant_, more))) {
        return false;
    }
    const auto has_memory = [this] {
        errno = 0;  // the index has a limit of its own, which is no lack of memory
        return index_->reserve() && visits_->back(index_->next_slot());
    };
    bool done = has_memory();
    while (!done && is_lack_of_memory(errno) && budget_.return_backing(tenant_, more)) {
        done = has_memory();
    }
    charge_tables();
    return done;
}

void Objects::charge_tables() {
    const std::uint64_t backed = index_->grown() + visits_->backed();
    const std::uint64_t charged = backed - std::min(backed, Visits::backing_slots);
    used_ += charged - tables_;
    budget_.used += charged - tables_;
    tables_ = charged;
}

bool Objects::evict_one(bool at_once) {
    if (const policy::Slot victim = upper_->victim({}, in_use()); victim != policy::no_slot) {
        if (at_once || !demote(victim)) {
            evict(victim);
        }
        return true;
    }
    // Evicts an object in the file, for its header and key that stay in memory.
    if (const policy::Slot victim = lower_->victim({}, in_use()); victim != policy::no_slot) {
        evict(victim);
        return true;
    }
    return false;
}

// Evicts the object that has been in the hash's bucket for longest, of those that may leave.
bool Objects::evict_from_bucket(std::uint64_t hash) {
    const std::vector<std::uint32_t> members = index_->bucket(index_->bucket_of_hash(hash));
    const auto oldest =
        std::find_if(members.rbegin(), members.rend(), [this](std::uint32_t slot) { return !is_fixed(index_->at(slot)); });
    if (oldest == members.rend()) {
        return false;
    }
    evict(*oldest);
    return true;
}

// Evicts one and then its neighbours above, until they leave a hole of so many units or one of them is in use. Without this a
// large object would wait until chance had emptied one place. A neighbour that was used lately, or is worth more than most,
// stays. None of them goes to the file: a place is not empty before the file has its object.
void Objects::evict_around(std::uint32_t units) {
    policy::Slot slot = upper_->victim({}, in_use());
    if (slot == policy::no_slot) {
        slot = lower_->victim({}, in_use());
    }
    if (slot == policy::no_slot) {
        return;
    }
    for (;;) {
        const Index::Entry entry = index_->at(slot);
        const std::uint64_t end = entry.offset + std::uint64_t{entry.units} * unit_nbytes;
        evict(slot);
        // Found by the last unit, as the header and key of an object in the file may lie before it.
        const Hole hole = space_->hole_at(static_cast<std::int64_t>((end - segment_header_nbytes) / unit_nbytes) - 1);
        const std::uint64_t next = segment_header_nbytes + static_cast<std::uint64_t>(hole.offset + hole.nbytes) * unit_nbytes;
        if (hole.nbytes == 0 || hole.nbytes >= units || next >= segment_header_nbytes + room()) {
            return;
        }
        slot = header_at(next).slot;  // a hint: whoever may write the data segment may have changed it
        if (!index_->is_live(slot) || index_->at(slot).offset != next || is_fixed(index_->at(slot)) ||
            queue_of(index_->at(slot)).would_pass(slot) || (index_->at(slot).blocks != 0 && upper_->size() > 0)) {
            return;
        }
    }
}

void Objects::sweep(std::size_t slots) {
    const std::uint32_t used = index_->slots_used();
    for (std::size_t step = 0; step < std::min<std::size_t>(slots, used); ++step) {
        sweep_at_ = sweep_at_ + 1 < used ? sweep_at_ + 1 : 0;
        if (index_->is_live(sweep_at_) && is_over(index_->at(sweep_at_))) {
            take_out_over(sweep_at_);
        }
    }
}

void Objects::trim() {
    for (const auto& [units, first] : space_->holes()) {
        const std::uint64_t offset = segment_header_nbytes + static_cast<std::uint64_t>(first) * unit_nbytes;
        release(offset, offset + static_cast<std::uint64_t>(units) * unit_nbytes);
    }
    if (announced_units_ > 0) {  // what they are to lie in may have had memory before
        for (const auto& [offset, prepared] : preparations_) {
            release(offset + std::uint64_t{prepared.taken} * unit_nbytes, offset + std::uint64_t{prepared.units} * unit_nbytes);
        }
    }
}

std::uint64_t Objects::hole_nbytes() const {
    const std::uint64_t places = room() - static_cast<std::uint64_t>(space_->free_units()) * unit_nbytes;
    return backed_nbytes_ - std::min(backed_nbytes_, places);
}

// The node soon needs holes again that it needed a moment ago, and taking memory from the system costs more than keeping it.
// So we return only as much as was free in each of the last rounds: the largest holes first, which cost the fewest calls.
bool Objects::return_idle(std::uint64_t most) {
    if (idle_nbytes_ == 0) {
        least_holes_ = rounds_ == 0 ? hole_nbytes() : std::min(least_holes_, hole_nbytes());
        if (++rounds_ < idle_rounds) {
            return false;
        }
        rounds_ = 0;
        idle_nbytes_ = least_holes_;
        next_idle_ = {std::numeric_limits<std::int64_t>::max(), 0};
    }
    most = std::min(most, idle_nbytes_);
    std::uint64_t looked = 0;
    std::uint64_t returned = 0;
    auto hole = space_->holes().upper_bound(next_idle_);
    while (returned < most && looked < looked_nbytes) {
        const bool is_last = hole == space_->holes().begin();
        const std::uint64_t nbytes = is_last ? 0 : static_cast<std::uint64_t>((--hole)->first) * unit_nbytes;
        if (nbytes < page_nbytes) {  // its pages hold objects, too
            idle_nbytes_ = 0;
            return true;
        }
        const std::uint64_t begin = segment_header_nbytes + static_cast<std::uint64_t>(hole->second) * unit_nbytes;
        std::uint64_t end = *hole == next_idle_ ? next_idle_end_ : begin + nbytes;
        end = std::min(end, std::max(begin, backed_end_));
        while (begin < end && returned < most && looked < looked_nbytes) {
            const std::uint64_t step = std::min(end - begin, std::max(most - returned, page_nbytes));
            const std::uint64_t from = std::max(begin, down(end - step, page_nbytes));
            returned += release(from, end);
            looked += end - from;
            end = from;
        }
        looked += hole_cost_nbytes;
        next_idle_ = *hole;
        next_idle_end_ = end;
    }
    idle_nbytes_ -= std::min(idle_nbytes_, returned);
    return most > 0;
}

std::uint64_t Objects::release(std::uint64_t begin, std::uint64_t end) {
    if (begin >= backed_end_) {
        return 0;
    }
    const bool is_last = end == data_.memory.nbytes();  // nothing shares its last page, which may be a part of one
    begin = up(begin, page_nbytes);
    end = std::min(is_last ? up(end, page_nbytes) : down(end, page_nbytes), backed_end_);
    if (begin >= end) {
        return 0;
    }
    const std::uint64_t returned = mark_pages(begin, end, false);
    if (returned > 0) {
        discard(data_, begin, end - begin);
    }
    backed_end_ = end == backed_end_ ? begin : backed_end_;
    return returned;
}

bool Objects::can_take(std::uint64_t nbytes) const {
    return budget_.can_make_room(tenant_, nbytes) && budget_.can_be_backed(tenant_, nbytes);
}

// Backs an extent with memory, in whole chunks, to need few system calls. If that is more than the node may take, we first
// return free memory, and then back only the pages of the extent. `ahead` is the number of units that the same object takes
// next: we evict nothing if there is no memory for them, and nothing at all without `ahead`.
bool Objects::back_extent(std::uint64_t offset, std::uint32_t units, std::optional<std::uint32_t> ahead) {
    const std::uint64_t begin = down(offset, page_nbytes);
    const std::uint64_t end = up(offset + std::uint64_t{units} * unit_nbytes, page_nbytes);
    const auto first = backed_.begin() + static_cast<std::ptrdiff_t>(begin / page_nbytes);
    const auto last = backed_.begin() + static_cast<std::ptrdiff_t>(end / page_nbytes);
    if (std::find(first, last, false) == last) {
        return true;
    }
    const std::uint64_t chunks_begin = std::max<std::uint64_t>(down(begin, chunk_nbytes), segment_header_nbytes);
    const std::uint64_t chunks_end = std::min<std::uint64_t>(up(end, chunk_nbytes), backed_.size() * page_nbytes);
    if (budget_.taken() + (chunks_end - chunks_begin) <= budget_.limit && back_pages(chunks_begin, chunks_end)) {
        return true;
    }
    const auto missing = static_cast<std::uint64_t>(std::count(first, last, false)) * page_nbytes;
    if (ahead && !budget_.make_backing_room(tenant_, missing)) {
        return false;
    }
    if (back_pages(begin, end)) {
        return true;
    }
    budget_.trim();
    while (!back_pages(begin, end)) {
        if (!ahead || !is_lack_of_memory(errno) ||
            !budget_.return_backing(tenant_, missing, std::uint64_t{*ahead} * unit_nbytes)) {
            return false;
        }
    }
    return true;
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
    backed_end_ = backed ? std::max(backed_end_, end) : backed_end_;
    backed_nbytes_ += backed ? changed : 0 - changed;
    budget_.backed += backed ? changed : 0 - changed;
    return changed;
}

// Assumes that all (`backed`) or nothing of the data segment is backed, where its state is not known.
void Objects::forget_backing(bool backed) {
    const std::uint64_t pages = up(data_.memory.nbytes(), page_nbytes) / page_nbytes;
    budget_.backed -= backed_nbytes_;
    backed_.assign(pages, backed);
    backed_.front() = true;  // the header, which is not lent
    backed_nbytes_ = backed ? (pages - 1) * page_nbytes : 0;
    backed_end_ = backed ? pages * page_nbytes : 0;
    budget_.backed += backed_nbytes_;
}

}  // namespace farpool
