#include "pager/pager.hpp"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "core/error.hpp"

namespace farpool::pager {

namespace {

// Attempts to bring an access's runs: a scattered run that does not fit next to its own parts evicts these in one attempt and
// is fetched in the next one.
constexpr int attempts_max = 3;

BlockSet blocks_of(const std::vector<Run>& runs) {
    BlockSet blocks;
    for (const Run& run : runs) {
        for (BlockId block = run.first; block < run.stop(); ++block) {
            blocks.push_back(block);
        }
    }
    std::ranges::sort(blocks);
    return blocks;
}

}  // namespace

Pager::Pager(std::int64_t capacity, std::vector<std::shared_ptr<Space>> spaces, int classes, std::int64_t alignment,
             std::int64_t history, bool prefetch, bool late)
    : classes_(classes),
      tape_(history),
      gate_(capacity),
      residency_(capacity, std::move(spaces), alignment, gate_, late),
      look_ahead_(tape_, residency_, gate_, prefetch),
      late_(late) {
    if (history < 1 || classes < 1) {
        fail_value("Pager: at least one access to remember and one class of blocks are needed, got " + std::to_string(history) +
                   " and " + std::to_string(classes));
    }
}

// ---- blocks ----

BlockId Pager::create(std::span<const std::int64_t> sizes, int cls) {
    if (sizes.empty() || cls < 0 || cls >= classes_) {
        fail_value("Pager.create: got " + std::to_string(sizes.size()) + " sizes and class " + std::to_string(cls) +
                   "; at least one size and a class below " + std::to_string(classes_) + " are needed");
    }
    for (const std::int64_t& size : sizes) {
        const bool last = &size == &sizes.back();
        if (size < 1 || (!last && size % residency_.arena().alignment() != 0)) {
            fail_value("Pager.create: a block has at least one byte, and all but the last a multiple of " +
                       std::to_string(residency_.arena().alignment()) + "; got " + std::to_string(size));
        }
    }
    return residency_.create(sizes, cls);
}

void Pager::adopt(BlockId block, const Piece& piece) {
    require_blocks(block, 1);
    residency_.adopt(block, piece);
}

void Pager::note_copy(BlockId block, std::int32_t tier, std::int64_t offset) {
    require_blocks(block, 1);
    const auto& spaces = residency_.spaces();
    if (tier < 0 || static_cast<std::size_t>(tier) >= spaces.size() || spaces[static_cast<std::size_t>(tier)] == nullptr) {
        fail_value("Pager.note_copy: " + std::to_string(tier) + " is not the number of a tier");
    }
    if (residency_[block].state != State::absent || residency_.has_copy(block)) {
        fail_value("Pager.note_copy: block " + std::to_string(block) + " has content already");
    }
    residency_.note_copy(block, tier, offset);
}

bool Pager::can_adopt(BlockId block) const {
    require_blocks(block, 1);
    return residency_[block].state == State::absent && residency_[block].tier < 0;
}

void Pager::retire(BlockId first, std::int32_t count) {
    require_blocks(first, count);
    residency_.retire(first, count);
}

bool Pager::forget(BlockId first, std::int32_t count) {
    require_blocks(first, count);
    for (BlockId block = first; block < first + count; ++block) {
        if (residency_[block].pins != 0 || residency_[block].moving || wants(block)) {
            return false;
        }
    }
    residency_.forget(first, count);
    row_counts_.erase(first);
    counted_table_ = -1;
    return true;
}

// ---- accesses ----

std::shared_ptr<Access> Pager::request(std::vector<Run> runs, double now) {
    for (const Run& run : runs) {
        require_blocks(run.first, run.count);
        if (run.table >= 0) {
            require_blocks(run.table, 1);
        }
    }
    auto access = std::make_shared<Access>();
    access->runs = std::move(runs);
    // An access to rows goes through the line, which makes room for all of them at once.
    const bool of_rows = std::ranges::any_of(access->runs, [](const Run& run) { return run.table >= 0; });
    access->granted = !of_rows && waiting_.empty() && !residency_.has_stuck() && lies_ready(*access);
    std::int64_t beside_kept = 0;
    if (!access->granted) {
        std::int64_t needed = 0;
        for (const Run& run : access->runs) {
            needed += residency_.run_bytes(run);
            beside_kept += look_ahead_.beside_kept(run);
        }
        if (needed > residency_.arena().capacity()) {
            throw Refused{TooLarge{needed}};
        }
    }
    const double busy = busy_until(now);
    if (access->granted) {
        pin_at_once(*access, busy);
        if (!resizing_ && look_ahead_.due(false)) {
            look_ahead_.advance({});
        }
        return access;
    }
    access->blocks = blocks_of(access->runs);
    for (const Run& run : access->runs) {
        const bool first = &run == &access->runs.front();
        note(run, busy, first);
        access->ordinal = first ? tape_.now() : access->ordinal;
    }
    look_ahead_.note_pinned(beside_kept);
    if (residency_.has_stuck() && waiting_.empty()) {
        residency_.unstick();
    }
    waiting_.push_back(access);
    try {
        serve();
    } catch (...) {  // a tier's bookkeeping failed: the caller gets no access to wait for or to abandon
        if (access->granted) {
            release(*access, false);
        } else {
            std::erase(waiting_, access);
        }
        throw;
    }
    return access;
}

// Seconds since the latest grant: the program computed while transfers could run.
double Pager::busy_until(double now) {
    double busy = 0.0;
    if (!late_ && waiting_.empty() && now > granted_at_) {
        busy = now - granted_at_;
        residency_.computed(granted_at_, now);
    }
    now_ = granted_at_ = now;
    return busy;
}

// True if each run can be granted at its present place; the access then has the places.
bool Pager::lies_ready(Access& access) const {
    std::vector<std::int64_t> places;
    places.reserve(access.runs.size());
    for (const Run& run : access.runs) {
        const std::int64_t place = residency_.place_of(run);
        // A rescued block is resident while it is still being written back: its bytes must not change under the write.
        if (place == nowhere || (run.mode != Mode::read && !residency_.settled(run))) {
            return false;
        }
        places.push_back(place);
    }
    access.places = std::move(places);
    return true;
}

// Seconds that the program computes before an access that has to wait. If times are reported late they are not known yet, so
// use the seconds of one turn of the loop ago.
double Pager::busy_before(double busy) const {
    return late_ && tape_.pointer() > 0 ? tape_.seconds(tape_.pointer() - 1, tape_.pointer()) : busy;
}

// Claims the ranges that a granted access writes into from their earlier owners.
void Pager::claim(Access& access) {
    for (const Run& run : access.runs) {
        if (run.mode != Mode::read) {
            access.last_use = std::max(access.last_use, residency_.claim(run));
        }
    }
}

// Notes and pins the runs of an access that is granted at once.
void Pager::pin_at_once(Access& access, double busy) {
    std::int64_t beside_kept = 0;
    for (const Run& run : access.runs) {
        const std::int64_t nbytes = residency_.run_bytes(run);
        beside_kept += look_ahead_.beside_kept(run);
        const std::int64_t key =
            look_ahead_.note_access(run, tape_.record(residency_[run.first].name, run.count, nbytes, false, busy), nbytes);
        busy = 0.0;
        access.ordinal = access.ordinal < 0 ? tape_.now() : access.ordinal;
        residency_.accessed_and_pinned(run, tape_.now(), key);
        residency_.pin(run);
    }
    claim(access);
    access_counts_.accesses += static_cast<std::int64_t>(access.runs.size());
    access_counts_.hits += static_cast<std::int64_t>(access.runs.size());
    look_ahead_.note_pinned(beside_kept);
}

// Counts the access to a run, records it on the tape and sets the next use of its blocks. `busy`: seconds of computing before
// the request that the run is part of; the tape records them with the request's first run.
void Pager::note(const Run& run, double busy, bool first) {
    const std::int64_t nbytes = residency_.run_bytes(run);
    std::int64_t key = 0;
    bool created = false;
    if (run.table >= 0) {
        key = tape_.record_table(residency_[run.table].name, first ? busy : 0.0);
    } else {
        const Block& head = residency_[run.first];
        created = head.state == State::absent && !residency_.has_copy(run.first);
        key = look_ahead_.note_access(run, tape_.record(head.name, run.count, nbytes, created, first ? busy : 0.0), nbytes);
    }
    if (count(run) == Found::missing && run.table < 0 && !created) {
        look_ahead_.note_miss(run, busy_before(busy));
    }
    for (BlockId block = run.first; block < run.stop(); ++block) {
        // If it is known when the whole table is used next (tied embeddings), a lookup of one row does not change that.
        std::int64_t next_use = run.table < 0 ? key : residency_[block].next_use;
        if (run.table >= 0 && !look_ahead_.kept(block)) {
            next_use = key_until(residency_.picked_row(block, tape_.now()));
        }
        residency_.accessed(block, tape_.now(), next_use);
    }
}

// Counts the access to a run by the state of its blocks.
Pager::Found Pager::count(const Run& run) {
    Found found = Found::in_place;
    if (residency_.place_of(run) == nowhere) {
        found = Found::late;
        for (BlockId block = run.first; found == Found::late && block < run.stop(); ++block) {
            const State state = residency_[block].state;
            found = state == State::resident || state == State::fetching ? Found::late : Found::missing;
        }
    }
    ++access_counts_.accesses;
    access_counts_.hits += found == Found::in_place ? 1 : 0;
    access_counts_.late += found == Found::late ? 1 : 0;
    if (run.table >= 0) {
        ++access_counts_.row_accesses;
        access_counts_.row_hits += found == Found::in_place ? 1 : 0;
        count_row(run.table, found == Found::in_place);
    }
    return found;
}

void Pager::count_row(BlockId table, bool in_place) {
    if (counted_table_ != table) {
        counted_table_ = table;
        counted_ = &row_counts_[table];
    }
    ++counted_->accesses;
    counted_->hits += in_place ? 1 : 0;
}

void Pager::ran(std::span<const Ran> accesses) {
    for (const auto& [ordinal, start, end] : accesses) {
        if (!late_ || ordinal < 0 || ordinal > tape_.now() || !(start <= end)) {
            fail_value(
                "Pager.ran: access " + std::to_string(ordinal) + " of " + std::to_string(tape_.now()) + " ran from " +
                std::to_string(start) + " to " + std::to_string(end) +
                "; an access that was asked for, a beginning before the end and a pager whose times come late are needed");
        }
    }
    late_times_.clear();
    for (const auto& [ordinal, start, end] : accesses) {
        late_times_.push_back({ordinal, end - start});
        residency_.computed(start, end);
    }
    tape_.add_times(late_times_);
}

void Pager::release(Access& access, bool go_on) {
    if (!access.granted) {
        fail_value("Pager.release: the access is not granted, or has been released before");
    }
    access.granted = false;
    for (const Run& run : access.runs) {
        residency_.unpin(run);
    }
    if (!go_on) {
        return;
    }
    if (!waiting_.empty()) {
        serve();
    } else if (!resizing_ && look_ahead_.due(true)) {
        look_ahead_.advance({});
    }
}

void Pager::abandon(const std::shared_ptr<Access>& access) {
    if (access->granted) {
        release(*access, true);
        return;
    }
    const auto found = std::ranges::find(waiting_, access);
    if (found == waiting_.end()) {
        return;
    }
    waiting_.erase(found);
    for (const BlockId block : access->blocks) {
        if (!wants(block)) {
            residency_.take_fault(block);  // no access is left to take it
        }
    }
    serve();
}

// ---- the line ----

bool Pager::wants(BlockId block) const {
    return std::ranges::any_of(waiting_, [&](const auto& access) { return contains(access->blocks, block); });
}

// The blocks that any waiting access needs.
BlockSet Pager::wanted() const {
    BlockSet blocks;
    for (const auto& access : waiting_) {
        blocks.insert(blocks.end(), access->blocks.begin(), access->blocks.end());
    }
    std::ranges::sort(blocks);
    return blocks;
}

// Grants the accesses in line that can be granted; then looks ahead.
void Pager::serve() {
    if (serve_line()) {
        granted_at_ = now_;
    }
    if (!resizing_ && std::ranges::all_of(waiting_, [](const auto& access) { return access->under_way; })) {
        look_ahead_.advance(wanted());
    }
}

// Grants the accesses in line that can be granted, and refuses those that never can be; true if any was granted.
bool Pager::serve_line() {
    bool blocked = false;
    bool served = false;
    for (std::size_t index = 0; index < waiting_.size();) {
        Access& access = *waiting_[index];
        if (lies_ready(access) || (!blocked && make_ready(access))) {
            for (const Run& run : access.runs) {
                residency_.pin(run);
            }
            claim(access);
            access.granted = served = true;
        } else if (std::holds_alternative<std::monostate>(access.refusal)) {
            blocked = true;
            ++index;
            continue;
        }
        waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(index));
    }
    return served;
}

// Does all that is possible now for the head of the line; true if it can be granted.
bool Pager::make_ready(Access& access) {
    for (const BlockId block : access.blocks) {
        Failure fault = residency_.take_fault(block);
        if (fault != nullptr && std::holds_alternative<std::monostate>(access.refusal)) {
            access.refusal = std::move(fault);
        }
    }
    if (!std::holds_alternative<std::monostate>(access.refusal)) {
        return false;
    }
    const auto refuse = [&](Refusal why) {
        Failure failure = residency_.unstick();
        access.refusal = failure ? Refusal{std::move(failure)} : std::move(why);
        return false;
    };
    bool all = false;
    try {
        std::vector<Run> rows;
        std::ranges::copy_if(access.runs, std::back_inserter(rows), [](const Run& run) { return run.table >= 0; });
        if (rows.size() > 1) {
            residency_.bring_rows(rows, access.blocks);
        }
        access.under_way = false;
        for (int attempt = 0; attempt < attempts_max; ++attempt) {
            all = true;
            for (const Run& run : access.runs) {
                all = residency_.bring(run, access.blocks) && all;
            }
            if (all || !residency_.transfers().empty()) {
                break;
            }
        }
    } catch (const NoRoom& no_room) {
        return refuse(no_room);
    }
    access.under_way = all;
    if (!all && residency_.transfers().empty() && !residency_.any_pinned()) {
        std::int64_t needed = 0;
        for (const Run& run : access.runs) {
            needed += residency_.run_bytes(run);
        }
        return refuse(TooLarge{needed});
    }
    return lies_ready(access);
}

std::uint64_t Pager::results_until_ready(const Access& access) const {
    if (!access.under_way) {
        return 1;
    }
    const auto coming =
        std::ranges::count_if(access.blocks, [&](BlockId block) { return residency_[block].state == State::fetching; });
    return static_cast<std::uint64_t>(std::max<std::ptrdiff_t>(1, coming));
}

// ---- transfers ----

void Pager::completed(TransferId transfer, double start, double end) {
    if (!late_ && waiting_.empty()) {  // the program computes, and has done so since the latest grant
        residency_.computed(granted_at_, end);
    }
    residency_.completed(transfer, start, end);
}

void Pager::failed(TransferId transfer, const Failure& error) {
    if (const auto found = residency_.transfers().find(transfer)) {
        residency_.failed(transfer, error, wants(found->block));
    }
    look_ahead_.retreat();
}

void Pager::proceed(double now) {
    now_ = std::max(now_, now);
    serve();
}

// ---- the budget ----

bool Pager::resize(std::int64_t capacity) {
    resizing_ = !residency_.resize(capacity);
    if (resizing_) {
        for (const BlockId block : residency_.arena().owners_beyond(capacity)) {
            if (residency_.at_rest(block) && !residency_.try_evict(block)) {
                // Tiers that refused the block are tried again at the next attempt.
                Failure failure = residency_.unstick();
                throw Refused{failure ? Refusal{std::move(failure)} : Refusal{NoRoom{block, residency_[block].size}}};
            }
        }
        resizing_ = !residency_.resize(capacity);
    }
    if (!resizing_) {
        gate_.set_capacity(capacity);
        look_ahead_.resized();
    }
    return !resizing_;
}

bool Pager::demote(BlockId first, std::int32_t count) {
    require_blocks(first, count);
    bool all = true;
    for (BlockId block = first; block < first + count; ++block) {
        const State state = residency_[block].state;
        if (state == State::absent || state == State::writing_back) {
            continue;
        }
        all = residency_.at_rest(block) && !wants(block) && residency_.try_evict(block) && all;
    }
    residency_.unstick();  // tiers that refused a block are tried again at the next attempt
    return all;
}

}  // namespace farpool::pager
