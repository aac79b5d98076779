#include "pager/residency.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>

namespace farpool::pager {

bool contains(const BlockSet& set, BlockId block) { return std::ranges::binary_search(set, block); }

Residency::Residency(std::int64_t capacity, std::vector<std::shared_ptr<Space>> spaces, std::int64_t alignment,
                     PrefetchGate& gate, bool late)
    : arena_(capacity, alignment),
      backing_(blocks_, arena_, std::move(spaces), [this](BlockId block) { return may_lose_copy(block); }),
      evictable_(blocks_),
      rows_(capacity),
      transfers_(blocks_),
      times_(gate, late),
      gate_(gate) {}

// ---- looking ----

std::int64_t Residency::run_bytes(const Run& run) const {
    std::int64_t nbytes = 0;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        nbytes += arena_.rounded(blocks_[block].size);
    }
    return nbytes;
}

std::int64_t Residency::place_of(const Run& run) const {
    const std::int64_t start = blocks_[run.first].place;
    std::int64_t place = start;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        const Block& b = blocks_[block];
        if (b.state != State::resident || b.place != place || (b.hollow && run.mode != Mode::overwrite)) {
            return nowhere;
        }
        place += b.size;
    }
    return start;
}

bool Residency::settled(const Run& run) const {
    for (BlockId block = run.first; !transfers_.empty() && block < run.stop(); ++block) {
        if (blocks_[block].moving) {
            return false;
        }
    }
    return true;
}

bool Residency::any_pinned() const {
    bool pinned = false;
    arena_.each_owner([&](BlockId block, std::int64_t, std::int64_t) {
        pinned = blocks_[block].pins != 0;
        return !pinned;
    });
    return pinned;
}

bool Residency::at_rest(BlockId block) const {
    const Block& b = blocks_[block];
    return b.state == State::resident && b.pins == 0 && !b.moving;
}

bool Residency::may_lose_copy(BlockId block) const {
    const Block& b = blocks_[block];
    return b.state == State::resident && !b.moving && !b.hollow;
}

// ---- blocks ----

void Residency::forget(BlockId first, std::int32_t count) {
    for (BlockId block = first; block < first + count; ++block) {
        forget(block);
    }
    blocks_.forget(first, count);
}

void Residency::forget(BlockId block) {
    Block& b = blocks_[block];
    if (b.state == State::resident) {
        drop(block);
    }
    backing_.drop(block);
    backing_.unbar(block);
    forget_prefetch(block);
    if (b.stuck) {
        b.stuck = false;
        std::erase_if(stuck_, [&](const auto& entry) { return entry.first == block; });
    }
    faults_.erase(block);
    b.shunned = false;
}

// ---- accesses ----

void Residency::pin(const Run& run) {
    for (BlockId block = run.first; block < run.stop(); ++block) {
        if (blocks_[block].pins++ == 0) {
            evictable_.remove(block);
        }
        if (run.mode != Mode::read || !backing_.has(block)) {
            soil(block);
        }
    }
}

void Residency::unpin(const Run& run) {
    for (BlockId block = run.first; block < run.stop(); ++block) {
        if (--blocks_[block].pins == 0) {
            enter(block);
        }
    }
}

std::int64_t Residency::claim(const Run& run) {
    std::int64_t last_use = -1;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        last_use = std::max(last_use, arena_.claim(blocks_[block].place, blocks_[block].size));
    }
    return last_use;
}

void Residency::soil(BlockId block) {
    blocks_[block].dirty = true;
    blocks_[block].hollow = false;
    backing_.drop_sources(block);
}

// Makes an unpinned resident block a candidate for eviction.
void Residency::enter(BlockId block) {
    if (!blocks_[block].stuck) {
        evictable_.insert(block);
    }
}

void Residency::set_next_use(BlockId block, std::int64_t key) {
    blocks_[block].next_use = key;
    if (evictable_.contains(block)) {
        evictable_.insert(block);
    }
}

void Residency::accessed(BlockId block, std::int64_t position, std::int64_t next_use) {
    blocks_[block].last_use = position;
    set_next_use(block, next_use);
    used(block);
}

void Residency::accessed_and_pinned(const Run& run, std::int64_t position, std::int64_t next_use) {
    for (BlockId block = run.first; block < run.stop(); ++block) {
        blocks_[block].last_use = position;
        blocks_[block].next_use = next_use;
        used(block);
    }
}

std::int64_t Residency::picked_row(BlockId block, std::int64_t position) {
    Block& b = blocks_[block];
    b.uses += b.uses < std::numeric_limits<std::uint8_t>::max() ? 1 : 0;
    return rows_.access(block, b.size, b.uses, position);
}

void Residency::used(BlockId block) {
    blocks_[block].shunned = false;
    if (forget_prefetch(block)) {
        ++counts_.prefetches_used;
    }
}

Failure Residency::take_fault(BlockId block) {
    const auto found = faults_.find(block);
    if (found == faults_.end()) {
        return nullptr;
    }
    Failure fault = std::move(found->second);
    faults_.erase(found);
    return fault;
}

void Residency::count_waste(BlockId block) {
    ++counts_.prefetches_wasted;
    gate_.charge_waste(static_cast<double>(blocks_[block].size));
}

// Clears a block's mark as prefetched; true if it was set.
bool Residency::forget_prefetch(BlockId block) {
    if (!blocks_[block].prefetched) {
        return false;
    }
    blocks_[block].prefetched = false;
    ahead_bytes_ -= blocks_[block].size;
    return true;
}

// ---- placing and evicting ----

// Fills a block that has its place. If there is nothing to fetch, only its range has to become free.
void Residency::fill(BlockId block, Mode mode, std::optional<std::int64_t> use) {
    Block& b = blocks_[block];
    faults_.erase(block);
    std::vector<Piece> pieces;
    if (backing_.has(block)) {
        if (mode != Mode::overwrite) {
            pieces = backing_.pieces(block, b.place);
        } else {
            b.hollow = true;
        }
    }
    if (!pieces.empty() && !use) {
        ++counts_.demand_fetches;
    } else if (!pieces.empty()) {
        ++counts_.prefetches;
        b.prefetched = true;
        ahead_bytes_ += b.size;
    }
    if (use) {
        b.next_use = *use;
    }
    std::vector<TransferId> after = arena_.hazards_of(b.place, b.size);
    if (!pieces.empty() || !after.empty()) {
        b.state = State::fetching;
        const std::int64_t last_use = pieces.empty() ? -1 : arena_.claim(b.place, b.size);
        transfers_.start(Kind::fetch, block, std::move(pieces), std::move(after), !use, last_use);
    } else {
        b.state = State::resident;
        enter(block);
    }
}

// Hurries the transfer under way on a block because an access, not a prefetch, waits for it.
void Residency::raise_for(BlockId block, std::optional<std::int64_t> use) {
    if (!use) {
        transfers_.raise(block);
    }
}

// Evicts a block as `try_evict` does. Throws NoRoom if no lower tier takes it.
void Residency::evict(BlockId block) {
    if (!try_evict(block)) {
        throw NoRoom{block, blocks_[block].size};
    }
}

bool Residency::try_evict(BlockId block) {
    Block& b = blocks_[block];
    soonest_evicted_ = std::min(soonest_evicted_, coming_use(b.next_use));
    if (b.next_use >= never) {
        rows_.left(worth_of(b.next_use));
    }
    if (b.moving) {  // it was rescued and its write-back still runs: let that finish the eviction
        write_out(block, transfers_.number_of(block));
        return true;
    }
    if (!b.dirty) {
        drop(block);
        ++counts_.evictions;
        return true;
    }
    if (!backing_.reserve(block)) {
        return false;
    }
    const TransferId number =
        transfers_.start(Kind::write_back, block, {backing_.extent(block, b.place)}, {}, false, b.last_use);
    ++counts_.write_backs;
    write_out(block, number);
    return true;
}

// Frees the range of a block that is being written back. Transfers into the range wait for the write.
void Residency::write_out(BlockId block, TransferId number) {
    Block& b = blocks_[block];
    evictable_.remove(block);
    if (forget_prefetch(block)) {
        count_waste(block);
    }
    b.state = State::writing_back;
    arena_.drop(b.place, b.size, b.last_use);
    arena_.add_hazard(number, b.place, b.size);
}

// Keeps a block that is being written back, if its range was not given to another block.
bool Residency::rescue(BlockId block) {
    Block& b = blocks_[block];
    if (!arena_.take(block, b.place, b.size)) {
        return false;
    }
    b.state = State::resident;
    enter(block);
    return true;
}

// Takes a resident block out of the arena. `claimed`: ordinal of a last use that it had claimed and has not waited for.
void Residency::drop(BlockId block, std::int64_t claimed) {
    Block& b = blocks_[block];
    evictable_.remove(block);
    b.hollow = false;
    if (forget_prefetch(block)) {
        count_waste(block);
    }
    arena_.drop(b.place, b.size, std::max(b.last_use, claimed));
    b.place = nowhere;
    b.state = State::absent;
    b.uses = 0;
}

// ---- transfers ----

void Residency::completed(TransferId number, double start, double end) {
    const std::shared_ptr<const Transfer> transfer = transfers_.finish(number);
    if (transfer == nullptr) {  // it was undone, because a transfer that it waited for had failed
        return;
    }
    const BlockId block = transfer->block;
    Block& b = blocks_[block];
    if (transfer->kind == Kind::fetch) {
        b.state = State::resident;
        enter(block);
        if (!transfer->pieces.empty()) {
            times_.fetched(b.size, start, end, !transfer->demand);
        }
        return;
    }
    times_.wrote(start, end);
    backing_.unbar(block);
    b.dirty = false;
    arena_.remove_hazard(number);
    if (b.state == State::writing_back) {
        b.state = State::absent;
        b.place = nowhere;
        b.uses = 0;
        ++counts_.evictions;
    }
}

void Residency::failed(TransferId number, const Failure& error, bool waited_for) {
    const std::shared_ptr<const Transfer> transfer = transfers_.finish(number);
    if (transfer == nullptr) {
        return;
    }
    if (transfer->kind == Kind::write_back) {
        write_back_failed(*transfer, error);
        return;
    }
    const BlockId block = transfer->block;
    blocks_[block].state = State::resident;
    forget_prefetch(block);
    drop(block, transfer->last_use);
    if (waited_for) {
        faults_[block] = error;
    } else {
        blocks_[block].shunned = true;
    }
}

void Residency::write_back_failed(const Transfer& transfer, const Failure& error) {
    for (const auto& other : transfers_.ordered_after(transfer.id)) {
        undo(*other);
    }
    arena_.remove_hazard(transfer.id);
    const BlockId block = transfer.block;
    Block& b = blocks_[block];
    if (b.state == State::writing_back) {
        if (!arena_.take(block, b.place, b.size)) {
            throw std::logic_error("Pager: the range of block " + std::to_string(block) +
                                   " was given away before its write-back had completed");
        }
        b.state = State::resident;
    }
    if (!backing_.bar(block)) {
        evictable_.remove(block);
        b.stuck = true;
        stuck_.emplace_back(block, error);
    } else if (b.pins == 0) {
        enter(block);
    }
}

// Undoes a fetch that was ordered after a write-back which has failed: its range belongs to the victim again.
void Residency::undo(const Transfer& transfer) {
    transfers_.cancel(transfer.id);
    blocks_[transfer.block].state = State::resident;
    forget_prefetch(transfer.block);
    drop(transfer.block, transfer.last_use);
}

Failure Residency::unstick() {
    const std::vector<std::pair<BlockId, Failure>> stuck = std::exchange(stuck_, {});
    for (const auto& [block, error] : stuck) {
        blocks_[block].stuck = false;
    }
    for (const auto& [block, error] : stuck) {
        backing_.unbar(block);
        if (blocks_[block].state == State::resident && blocks_[block].pins == 0) {
            enter(block);
        }
    }
    return stuck.empty() ? nullptr : stuck.front().second;
}

// ---- placement ----

bool Residency::bring(const Run& run, const BlockSet& keep, std::optional<std::int64_t> use) {
    std::vector<BlockId> missing;
    std::int64_t base = nowhere;
    std::int64_t ahead = 0;
    bool scattered = false;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        const Block& b = blocks_[block];
        if (b.hollow && run.mode != Mode::overwrite) {
            if (b.moving || b.pins != 0) {
                return false;
            }
            drop(block);
        }
        if (b.state == State::writing_back && !rescue(block)) {
            raise_for(block, use);
            return false;
        }
        if (b.state == State::absent) {
            missing.push_back(block);
        } else if (base == nowhere) {
            base = b.place - ahead;
        } else if (b.place - ahead != base) {
            scattered = true;
        }
        ahead += b.size;
    }
    if (!missing.empty() && missing.size() == static_cast<std::size_t>(run.count)) {
        base = new_place(run, keep, use);
        if (base < 0) {
            return false;
        }
        settle_at(run, base);
    } else if ((scattered || (!missing.empty() && !fill_in(run, base))) && (use || !relocate(run, keep))) {
        return false;
    }
    for (const BlockId block : missing) {
        fill(block, run.mode, use);
    }
    for (BlockId block = run.first; block < run.stop(); ++block) {
        raise_for(block, use);
    }
    return true;
}

void Residency::bring_rows(std::span<const Run> runs, const BlockSet& keep) {
    std::vector<Run> missing;
    std::int64_t nbytes = 0;
    for (const Run& run : runs) {
        bool absent = true;
        for (BlockId block = run.first; absent && block < run.stop(); ++block) {
            absent = blocks_[block].state == State::absent;
        }
        if (absent) {
            missing.push_back(run);
            nbytes += run_bytes(run);
        }
    }
    if (missing.size() < 2) {
        return;
    }
    std::int64_t base = make_room(nbytes, keep, {}, false);
    if (base < 0) {
        // Rows are as large as the rows that were evicted for them, so their holes fit. To move the blocks between the holes
        // together would copy several times the bytes that are fetched.
        std::vector<Run> rest;
        nbytes = 0;
        for (const Run& run : missing) {
            const std::int64_t place = arena_.find(run_bytes(run));
            if (place >= 0) {
                place_and_fill(run, place);
            } else {
                rest.push_back(run);
                nbytes += run_bytes(run);
            }
        }
        missing = std::move(rest);
        base = missing.size() > 1 ? make_room(nbytes, keep, {}) : -1;
    }
    for (std::size_t index = 0; base >= 0 && index < missing.size(); ++index) {
        place_and_fill(missing[index], base);
        base += run_bytes(missing[index]);
    }
}

void Residency::place_and_fill(const Run& run, std::int64_t base) {
    settle_at(run, base);
    for (BlockId block = run.first; block < run.stop(); ++block) {
        fill(block, run.mode, {});
    }
}

std::int64_t Residency::new_place(const Run& run, const BlockSet& keep, std::optional<std::int64_t> use) {
    const std::int64_t nbytes = run_bytes(run);
    if (run.count == 1 && run.first > 0 && blocks_[run.first - 1].place != nowhere) {
        // Next to its predecessor, so that a storage written block by block is contiguous when it is wanted whole.
        const std::int64_t place = blocks_[run.first - 1].place + blocks_[run.first - 1].size;
        if (place % arena_.alignment() == 0 && arena_.fits(place, nbytes)) {
            return place;
        }
    }
    return make_room(nbytes, keep, use);
}

// Gives the range that begins at `base` to these blocks; the caller knows that it is free.
void Residency::settle_at(const Run& run, std::int64_t base) {
    for (BlockId block = run.first; block < run.stop(); ++block) {
        Block& b = blocks_[block];
        if (!arena_.take(block, base, b.size)) {
            throw std::logic_error("Pager: arena range " + std::to_string(base) + "+" + std::to_string(b.size) +
                                   " is taken, it was meant for block " + std::to_string(block));
        }
        b.place = base;
        base += b.size;
    }
}

// Puts the missing blocks between their neighbours, if these places are free.
bool Residency::fill_in(const Run& run, std::int64_t base) {
    std::vector<BlockId> taken;
    std::int64_t place = base;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        Block& b = blocks_[block];
        if (b.state == State::absent) {
            if (place < 0 || !arena_.take(block, place, b.size)) {
                for (const BlockId other : taken) {
                    arena_.drop(blocks_[other].place, blocks_[other].size, -1);
                    blocks_[other].place = nowhere;
                }
                return false;
            }
            b.place = place;
            taken.push_back(block);
        }
        place += b.size;
    }
    return true;
}

// Gathers a scattered run at a new place, with holes for the missing blocks; false if that has to wait.
bool Residency::relocate(const Run& run, const BlockSet& keep) {
    std::vector<BlockId> present;
    bool movable = true;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        if (blocks_[block].state != State::absent) {
            present.push_back(block);
            movable = movable && !blocks_[block].moving && blocks_[block].pins == 0;
        }
    }
    if (!movable) {
        for (const BlockId block : present) {
            raise_for(block, {});
        }
        return false;
    }
    const std::int64_t nbytes = run_bytes(run);
    std::int64_t base = make_room(nbytes, keep, {});
    if (base < 0) {
        if (transfers_.empty() && !arena_.has_hazards()) {
            // The run does not fit next to its own parts: evict these, and fetch all of it at the next attempt.
            for (const BlockId block : present) {
                evict(block);
            }
        }
        return false;
    }
    if (!arena_.hazards_of(base, nbytes).empty()) {
        return false;  // a move is made at once, but a write-back still reads these bytes
    }
    for (BlockId block = run.first; block < run.stop(); ++block) {
        Block& b = blocks_[block];
        if (b.state != State::absent) {
            move(block, base);
        } else {
            settle_at({block, 1, run.mode}, base);
        }
        base += b.size;
    }
    return true;
}

// Offset of a hole of `nbytes` bytes, made if necessary; -1 if that has to wait. Throws NoRoom if the only blocks left to
// evict are refused by all lower tiers. Without `in_one` nothing is moved: the result is also -1 if enough bytes are free but
// not next to each other.
std::int64_t Residency::make_room(std::int64_t nbytes, const BlockSet& keep, std::optional<std::int64_t> use, bool in_one) {
    // Blocks taken out of the order of eviction until this call ends, also if a tier's bookkeeping throws.
    struct Spared {
        explicit Spared(Residency& owner) : residency(owner) {}
        ~Spared() {
            for (const BlockId block : blocks) {
                residency.enter(block);
            }
        }
        void add(BlockId block) {
            blocks.push_back(block);
            residency.evictable_.remove(block);
        }
        Residency& residency;
        std::vector<BlockId> blocks;
    } spared(*this);
    std::int64_t enough = nbytes;
    std::optional<NoRoom> refused;
    for (;;) {
        const std::int64_t place = arena_.find(nbytes);
        if (place >= 0) {
            return place;
        }
        if (arena_.free() >= enough) {
            if (!in_one) {
                return -1;
            }
            if (slide_together(nbytes, use ? nbytes : arena_.capacity())) {
                continue;
            }
            if (!use && arena_.has_hazards()) {
                return -1;  // write-backs under way will free enough, and the access waits for them in any case
            }
            enough = arena_.free() + nbytes / 8;  // the search failed: evict some more before the next one
        }
        const BlockId victim = evictable_.victim();
        if (victim < 0) {
            if (refused && !use && transfers_.empty() && !any_pinned()) {
                throw *refused;
            }
            return -1;
        }
        if (use && !may_evict_for(*use)) {
            return -1;
        }
        if (contains(keep, victim)) {
            spared.add(victim);
        } else if (!try_evict(victim)) {
            refused = refused.value_or(NoRoom{victim, blocks_[victim].size});
            spared.add(victim);
        }
    }
}

bool Residency::may_evict_for(std::int64_t use) const {
    const std::int64_t key = evictable_.victim_next_use();
    return coming_use(key) > use && (key >= spare || ahead_bytes_ < ahead_bytes_min_);
}

// Moves a resident block inside the arena.
void Residency::move(BlockId block, std::int64_t target) {
    Block& b = blocks_[block];
    transfers_.copy(arena_.slide(block, b.place, target, b.size, b.last_use));
    b.place = target;
    ++counts_.moves;
    counts_.moved_bytes += b.size;
}

// Opens a hole by moving resident blocks, at most `most` bytes of them.
bool Residency::slide_together(std::int64_t nbytes, std::int64_t most) {
    const std::tuple search{arena_.version(), nbytes, most};
    if (failed_search_ == search) {
        return false;
    }
    const std::optional<Slides> slides = arena_.gap(nbytes, most, [this](BlockId block) { return at_rest(block); });
    if (!slides) {
        // A transfer may end without a change of the map, but another search is worth its time only after a change.
        failed_search_.reset();
        if (most < arena_.capacity()) {
            failed_search_ = search;
        }
        return false;
    }
    for (const auto& [block, target] : *slides) {
        move(block, target);
    }
    return !slides->empty();
}

bool Residency::resize(std::int64_t capacity) {
    if (!arena_.resize(capacity)) {
        return false;
    }
    rows_.set_room(capacity);
    return true;
}

}  // namespace farpool::pager
