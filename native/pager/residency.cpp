#include "pager/residency.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

namespace farpool::pager {

bool contains(const BlockSet& set, BlockId block) { return std::ranges::binary_search(set, block); }

namespace {

constexpr std::size_t most_unjudged = 1024;

}  // namespace

Residency::Residency(std::int64_t capacity, std::vector<std::shared_ptr<Space>> spaces, std::int64_t alignment, bool late)
    : arena(capacity, alignment),
      backing(blocks, arena, std::move(spaces), [this](BlockId block) { return may_lose_copy(block); }),
      evictable(blocks),
      gate(capacity),
      rows(capacity),
      late_(late) {}

// ---- looking ----

std::int64_t Residency::run_bytes(const Run& run) const {
    std::int64_t nbytes = 0;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        nbytes += arena.rounded(blocks[block].size);
    }
    return nbytes;
}

std::int64_t Residency::place_of(const Run& run) const {
    const std::int64_t start = blocks[run.first].place;
    std::int64_t place = start;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        const Block& b = blocks[block];
        if (b.state != State::resident || b.place != place || (b.hollow && run.mode != Mode::overwrite)) {
            return nowhere;
        }
        place += b.size;
    }
    return start;
}

bool Residency::settled(const Run& run) const {
    for (BlockId block = run.first; !transfers.empty() && block < run.stop(); ++block) {
        if (blocks[block].moving) {
            return false;
        }
    }
    return true;
}

bool Residency::any_pinned() const {
    bool pinned = false;
    arena.each_owner([&](BlockId block, std::int64_t, std::int64_t) {
        pinned = blocks[block].pins != 0;
        return !pinned;
    });
    return pinned;
}

bool Residency::at_rest(BlockId block) const {
    const Block& b = blocks[block];
    return b.state == State::resident && b.pins == 0 && !b.moving;
}

bool Residency::may_lose_copy(BlockId block) const {
    const Block& b = blocks[block];
    return b.state == State::resident && !b.moving && !b.hollow;
}

// ---- pins and keys ----

void Residency::pin(const Run& run) {
    for (BlockId block = run.first; block < run.stop(); ++block) {
        if (blocks[block].pins++ == 0) {
            evictable.remove(block);
        }
        if (run.mode != Mode::read || !backing.has(block)) {
            soil(block);
        }
    }
}

void Residency::unpin(const Run& run) {
    for (BlockId block = run.first; block < run.stop(); ++block) {
        if (--blocks[block].pins == 0) {
            enter(block);
        }
    }
}

void Residency::soil(BlockId block) {
    blocks[block].dirty = true;
    backing.drop_sources(block);
    clear_hollow(block);
}

void Residency::enter(BlockId block) {
    if (!blocks[block].stuck) {
        evictable.insert(block);
    }
}

void Residency::set_next_use(BlockId block, std::int64_t key) {
    blocks[block].next_use = key;
    if (evictable.contains(block)) {
        evictable.insert(block);
    }
}

void Residency::use(BlockId block) {
    blocks[block].shunned = false;
    if (forget_prefetch(block)) {
        ++counters.prefetches_used;
    }
}

void Residency::count_waste(BlockId block) {
    ++counters.prefetches_wasted;
    gate.charge_waste(static_cast<double>(blocks[block].size));
}

// Clears a block's mark as prefetched; true if it was set.
bool Residency::forget_prefetch(BlockId block) {
    if (!blocks[block].prefetched) {
        return false;
    }
    blocks[block].prefetched = false;
    ahead_bytes -= blocks[block].size;
    return true;
}

void Residency::clear_hollow(BlockId block) {
    if (blocks[block].hollow) {
        blocks[block].hollow = false;
        --hollow_blocks;
    }
}

// ---- coming and leaving ----

// Fills a block that has its place. Where there is nothing to fetch, only its range has to become free.
void Residency::fill(BlockId block, Mode mode, std::optional<std::int64_t> use) {
    Block& b = blocks[block];
    faults.erase(block);
    std::vector<Piece> pieces;
    if (backing.has(block)) {
        if (mode != Mode::overwrite) {
            pieces = backing.pieces(block, b.place);
        } else if (!b.hollow) {
            b.hollow = true;
            ++hollow_blocks;
        }
    }
    if (!pieces.empty() && !use) {
        ++counters.demand_fetches;
    } else if (!pieces.empty()) {
        ++counters.prefetches;
        b.prefetched = true;
        ahead_bytes += b.size;
    }
    if (use) {
        b.next_use = *use;
    }
    std::vector<TransferId> after = arena.hazards_of(b.place, b.size);
    if (!pieces.empty() || !after.empty()) {
        b.state = State::fetching;
        const std::int64_t last_use = pieces.empty() ? -1 : arena.claim(b.place, b.size);
        start(Kind::fetch, block, std::move(pieces), std::move(after), !use, last_use);
    } else {
        b.state = State::resident;
        enter(block);
    }
}

TransferId Residency::start(Kind kind, BlockId block, std::vector<Piece> pieces, std::vector<TransferId> after, bool demand,
                            std::int64_t last_use) {
    auto transfer = std::make_shared<const Transfer>(
        Transfer{++number_, kind, block, demand, std::move(pieces), std::move(after), last_use});
    transfers.emplace_hint(transfers.end(), number_, transfer);
    moving_[block] = number_;
    blocks[block].moving = true;
    commands.emplace_back(std::move(transfer));
    return number_;
}

// Raises the priority of the transfer under way on a block, as an access waits for it.
void Residency::raise_for(BlockId block, std::optional<std::int64_t> use) {
    if (use || !blocks[block].moving) {
        return;
    }
    const TransferId number = moving_.at(block);
    if (!transfers.at(number)->demand) {
        raised.push_back(number);
    }
}

void Residency::evict(BlockId block) {
    if (!try_evict(block)) {
        throw NoRoom{block, blocks[block].size};
    }
}

bool Residency::try_evict(BlockId block) {
    Block& b = blocks[block];
    lost = std::min(lost, coming_use(b.next_use));
    if (b.next_use >= never) {
        rows.left(worth_of(b.next_use));
    }
    if (b.moving) {  // rescued before, and its write-back still runs: let it leave after all
        write_out(block, moving_.at(block));
        return true;
    }
    if (!b.dirty) {
        leave(block);
        ++counters.evictions;
        return true;
    }
    if (!backing.reserve(block)) {
        return false;
    }
    const TransferId number = start(Kind::write_back, block, {backing.extent(block, b.place)}, {}, false, b.last_use);
    ++counters.write_backs;
    write_out(block, number);
    return true;
}

// Frees the range of a block that is being written back for others, whose transfers wait for the write.
void Residency::write_out(BlockId block, TransferId number) {
    Block& b = blocks[block];
    evictable.remove(block);
    if (forget_prefetch(block)) {
        count_waste(block);
    }
    b.state = State::writing_back;
    arena.drop(b.place, b.size, b.last_use);
    arena.add_hazard(number, b.place, b.size);
}

// Keeps a block that is being written back, if its range has not been promised to another.
bool Residency::rescue(BlockId block) {
    Block& b = blocks[block];
    if (!arena.take(block, b.place, b.size)) {
        return false;
    }
    b.state = State::resident;
    enter(block);
    return true;
}

// Takes a resident block out of the arena. `claimed`: ordinal of a last use that it had claimed and has not waited for.
void Residency::leave(BlockId block, std::int64_t claimed) {
    Block& b = blocks[block];
    evictable.remove(block);
    clear_hollow(block);
    if (forget_prefetch(block)) {
        count_waste(block);
    }
    arena.drop(b.place, b.size, std::max(b.last_use, claimed));
    b.place = nowhere;
    b.state = State::absent;
    b.uses = 0;
}

void Residency::forget(BlockId block) {
    Block& b = blocks[block];
    if (b.state == State::resident) {
        leave(block);
    }
    backing.drop(block);
    backing.unbar(block);
    forget_prefetch(block);
    if (b.stuck) {
        b.stuck = false;
        std::erase_if(stuck_, [&](const auto& entry) { return entry.first == block; });
    }
    faults.erase(block);
    b.shunned = false;
}

// ---- completions ----

// Takes a transfer from those under way; null where its block was given up, as a transfer that it waited for had failed.
std::shared_ptr<const Transfer> Residency::finish(TransferId number) {
    const auto found = transfers.find(number);
    if (found == transfers.end()) {
        return nullptr;
    }
    std::shared_ptr<const Transfer> transfer = std::move(found->second);
    transfers.erase(found);
    moving_.erase(transfer->block);
    blocks[transfer->block].moving = false;
    return transfer;
}

void Residency::completed(TransferId number, double start, double end) {
    const std::shared_ptr<const Transfer> transfer = finish(number);
    if (transfer == nullptr) {
        return;
    }
    const BlockId block = transfer->block;
    Block& b = blocks[block];
    if (transfer->kind == Kind::fetch) {
        b.state = State::resident;
        enter(block);
        if (!transfer->pieces.empty()) {
            rate.note(b.size, start, end);
            const Fetched fetched{b.size, start, end, !transfer->demand};
            if (!late_) {
                judge(fetched);
            } else if (unjudged_.push_back(fetched); unjudged_.size() > most_unjudged) {
                judge(unjudged_.front());
                unjudged_.pop_front();
            }
        }
        return;
    }
    writing.note(start, end);
    backing.unbar(block);
    b.dirty = false;
    arena.remove_hazard(number);
    if (b.state == State::writing_back) {
        b.state = State::absent;
        b.place = nowhere;
        b.uses = 0;
        ++counters.evictions;
    }
}

void Residency::computed(double start, double end) {
    computing_.note(start, end);
    while (!unjudged_.empty() && unjudged_.front().end <= end) {
        judge(unjudged_.front());
        unjudged_.pop_front();
    }
}

// Tells the gate what a fetch gained: the time in which the program computed or other blocks were written back meanwhile.
void Residency::judge(const Fetched& fetch) {
    const double seconds = fetch.end - fetch.start;
    if (seconds > 0) {
        gate.note_fetch(static_cast<double>(fetch.nbytes), computing_.between(fetch.start, fetch.end) / seconds,
                        writing.between(fetch.start, fetch.end) / seconds, fetch.ahead);
    }
}

void Residency::failed(TransferId number, const Failure& error, bool waited_for) {
    const std::shared_ptr<const Transfer> transfer = finish(number);
    if (transfer == nullptr) {
        return;
    }
    const BlockId block = transfer->block;
    Block& b = blocks[block];
    if (transfer->kind == Kind::fetch) {
        b.state = State::resident;
        forget_prefetch(block);
        leave(block, transfer->last_use);
        if (waited_for) {
            faults[block] = error;
        } else {
            b.shunned = true;
        }
        return;
    }
    std::vector<std::shared_ptr<const Transfer>> dependents;
    for (const auto& [id, other] : transfers) {
        if (std::ranges::find(other->after, number) != other->after.end()) {
            dependents.push_back(other);
        }
    }
    for (const auto& other : dependents) {
        give_up(*other);
    }
    arena.remove_hazard(number);
    if (b.state == State::writing_back) {
        if (!arena.take(block, b.place, b.size)) {
            throw std::logic_error("Pager: the range of block " + std::to_string(block) +
                                   " was given away before its write-back had completed");
        }
        b.state = State::resident;
    }
    if (!backing.bar(block)) {
        evictable.remove(block);
        b.stuck = true;
        stuck_.emplace_back(block, error);
    } else if (b.pins == 0) {
        enter(block);
    }
}

// Undoes a fetch that was ordered after a write-back which has failed.
void Residency::give_up(const Transfer& transfer) {
    const BlockId block = transfer.block;
    // If it has not been taken yet it must not start at all: its range is the victim's again.
    std::erase_if(commands, [&](const Command& command) {
        const auto* other = std::get_if<std::shared_ptr<const Transfer>>(&command);
        return other != nullptr && (*other)->id == transfer.id;
    });
    finish(transfer.id);
    blocks[block].state = State::resident;
    forget_prefetch(block);
    leave(block, transfer.last_use);
}

Failure Residency::unstick() {
    const std::vector<std::pair<BlockId, Failure>> stuck = std::exchange(stuck_, {});
    for (const auto& [block, error] : stuck) {
        blocks[block].stuck = false;
    }
    for (const auto& [block, error] : stuck) {
        backing.unbar(block);
        if (blocks[block].state == State::resident && blocks[block].pins == 0) {
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
        const Block& b = blocks[block];
        if (b.hollow && run.mode != Mode::overwrite) {
            if (b.moving || b.pins != 0) {
                return false;
            }
            leave(block);
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
        base = place_anew(run, keep, use);
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
            absent = blocks[block].state == State::absent;
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
        // Rows are as large as those that left for them, so their holes fit. To slide what lies between these together would
        // copy several times the bytes that are fetched.
        std::vector<Run> rest;
        nbytes = 0;
        for (const Run& run : missing) {
            const std::int64_t place = arena.find(run_bytes(run));
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

std::int64_t Residency::place_anew(const Run& run, const BlockSet& keep, std::optional<std::int64_t> use) {
    const std::int64_t nbytes = run_bytes(run);
    if (run.count == 1 && run.first > 0 && blocks[run.first - 1].place != nowhere) {
        // Beside its predecessor, so that a storage written block by block is contiguous when it is wanted whole.
        const std::int64_t place = blocks[run.first - 1].place + blocks[run.first - 1].size;
        if (place % arena.alignment() == 0 && arena.fits(place, nbytes)) {
            return place;
        }
    }
    return make_room(nbytes, keep, use);
}

// Gives the range that begins at `base` to these blocks; the caller knows that it is free.
void Residency::settle_at(const Run& run, std::int64_t base) {
    for (BlockId block = run.first; block < run.stop(); ++block) {
        Block& b = blocks[block];
        if (!arena.take(block, base, b.size)) {
            throw std::logic_error("Pager: arena range " + std::to_string(base) + "+" + std::to_string(b.size) +
                                   " is taken, it was meant for block " + std::to_string(block));
        }
        b.place = base;
        base += b.size;
    }
}

// Puts the missing blocks between their neighbours, if those places are free.
bool Residency::fill_in(const Run& run, std::int64_t base) {
    std::vector<BlockId> taken;
    std::int64_t place = base;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        Block& b = blocks[block];
        if (b.state == State::absent) {
            if (place < 0 || !arena.take(block, place, b.size)) {
                for (const BlockId other : taken) {
                    arena.drop(blocks[other].place, blocks[other].size, -1);
                    blocks[other].place = nowhere;
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

// Gathers a scattered run at a new place, with holes for what is missing; false if that has to wait.
bool Residency::relocate(const Run& run, const BlockSet& keep) {
    std::vector<BlockId> present;
    bool movable = true;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        if (blocks[block].state != State::absent) {
            present.push_back(block);
            movable = movable && !blocks[block].moving && blocks[block].pins == 0;
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
        if (transfers.empty() && !arena.has_hazards()) {
            for (const BlockId block : present) {  // not even room for the run beside its own parts: they leave and come back
                evict(block);
            }
        }
        return false;
    }
    if (!arena.hazards_of(base, nbytes).empty()) {
        return false;  // a move is made at once, and a write-back still reads there
    }
    for (BlockId block = run.first; block < run.stop(); ++block) {
        Block& b = blocks[block];
        if (b.state != State::absent) {
            ++counters.moves;
            counters.moved_bytes += b.size;
            commands.emplace_back(arena.slide(block, b.place, base, b.size, b.last_use));
            b.place = base;
        } else {
            settle_at({block, 1, run.mode}, base);
        }
        base += b.size;
    }
    return true;
}

// Offset of a hole of `nbytes` bytes, made if need be; -1 if that has to wait. Throws NoRoom where only blocks that no lower
// tier takes are left to evict. Without `in_one` nothing is moved: -1 also where so many bytes are free, but not side by side.
std::int64_t Residency::make_room(std::int64_t nbytes, const BlockSet& keep, std::optional<std::int64_t> use, bool in_one) {
    // Blocks out of the order of eviction for as long as this goes on; a tier's bookkeeping may throw in the middle of it.
    struct Spared {
        explicit Spared(Residency& owner) : residency(owner) {}
        ~Spared() {
            for (const BlockId block : blocks) {
                residency.enter(block);
            }
        }
        void add(BlockId block) {
            blocks.push_back(block);
            residency.evictable.remove(block);
        }
        Residency& residency;
        std::vector<BlockId> blocks;
    } spared(*this);
    std::int64_t enough = nbytes;
    std::optional<NoRoom> refused;
    for (;;) {
        const std::int64_t place = arena.find(nbytes);
        if (place >= 0) {
            return place;
        }
        if (arena.free() >= enough) {
            if (!in_one) {
                return -1;
            }
            if (slide_together(nbytes, use ? nbytes : arena.capacity())) {
                continue;
            }
            if (arena.has_hazards()) {
                return -1;  // enough is on its way out
            }
            enough = arena.free() + nbytes / 8;  // in vain: look again when it pays
        }
        const BlockId victim = evictable.victim();
        if (victim < 0) {
            if (refused && !use && transfers.empty() && !any_pinned()) {
                throw *refused;
            }
            return -1;
        }
        if (use && !may_leave_for(*use)) {
            return -1;
        }
        if (contains(keep, victim)) {
            spared.add(victim);
        } else if (!try_evict(victim)) {
            refused = refused.value_or(NoRoom{victim, blocks[victim].size});
            spared.add(victim);
        }
    }
}

bool Residency::may_leave_for(std::int64_t use) const {
    const std::int64_t key = evictable.victim_next_use();
    return coming_use(key) > use && (key >= spare || ahead_bytes < ahead_at_least);
}

// Opens a hole by moving resident blocks, at most `most` bytes of them.
bool Residency::slide_together(std::int64_t nbytes, std::int64_t most) {
    const std::tuple attempt{arena.version(), nbytes, most};
    if (in_vain_ == attempt) {
        return false;
    }
    const std::optional<Slides> slides = arena.gap(nbytes, most, [this](BlockId block) { return at_rest(block); });
    if (!slides) {
        // A block may have come to rest since, but looking again is worth it only when the map has changed.
        in_vain_.reset();
        if (most < arena.capacity()) {
            in_vain_ = attempt;
        }
        return false;
    }
    for (const auto& [block, target] : *slides) {
        const Move move = arena.slide(block, blocks[block].place, target, blocks[block].size, blocks[block].last_use);
        blocks[block].place = target;
        ++counters.moves;
        counters.moved_bytes += move.nbytes;
        commands.emplace_back(move);
    }
    return !slides->empty();
}

}  // namespace farpool::pager
