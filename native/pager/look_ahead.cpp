#include "pager/look_ahead.hpp"

#include <algorithm>
#include <functional>
#include <vector>

namespace farpool::pager {

namespace {

constexpr int strides_ahead = 8;
// Divisor of the bytes fetched along a stride to charge for their room: without a tape the true cost is not known.
constexpr double stride_rent = 4;
constexpr std::int64_t accesses_per_check = 16;   // the end of the known future is checked after this many new accesses
constexpr std::int64_t accesses_per_aging = 256;  // after this many the largest operation counts as a quarter smaller
constexpr std::int64_t large_divisor = 8;         // an operation is large if it exceeds the others by this part of the arena
constexpr double stretches_divisor = 4;        // the longest stretches without an access: together this part of the computing
constexpr std::int64_t arriving_divisor = 8;   // room for bytes that arrive in such a stretch: at most this part of the arena
constexpr std::int64_t reserve_divisor = 128;  // room for one more operation: at most this part of the bytes to fetch
constexpr std::int64_t window_divisor = 8;     // the window is this part of the arena, or
constexpr std::int64_t min_window_per_pinned = 4;  // this many times what one operation pins; prefetch only if that can pay

}  // namespace

// ---- accesses ----

std::int64_t LookAhead::note_access(const Run& run, std::int64_t key, std::int64_t nbytes) {
    if (key >= never) {
        if (!tape_.followed()) {
            strides_.record(residency_[run.first].name, run.count);
        }
        return key;
    }
    if (window_ == 0) {
        return key;
    }
    if (const std::int64_t turn = tape_.volume(tape_.pointer(), tape_.now()); turn != 0) {
        const double room = static_cast<double>(largest_ + residency_.ahead_bytes());
        gate_.charge_room(room * static_cast<double>(nbytes) / static_cast<double>(turn));
    }
    return key_for(key, tape_.pointer(), nbytes);
}

void LookAhead::note_miss(const Run& run, double busy) {
    if (tape_.foretold() || (!tape_.followed() && strides_.foretold())) {
        if (const double rate = residency_.seconds_per_byte(); rate != 0.0) {
            const auto nbytes = static_cast<double>(residency_.run_bytes(run));
            gate_.note_foretold(std::min(nbytes, busy / rate), largest_);
        }
    }
}

bool LookAhead::kept(BlockId block) const {
    const Block& b = residency_[block];
    return tape_.followed() && b.state == State::resident && b.next_use < never;
}

std::int64_t LookAhead::beside_kept(const Run& run) const {
    if (run.table < 0) {
        const std::int64_t nbytes = residency_.run_bytes(run);
        return nbytes < anchor_ ? nbytes : 0;
    }
    std::int64_t nbytes = 0;
    for (BlockId block = run.first; block < run.stop(); ++block) {
        nbytes += kept(block) ? 0 : residency_.run_bytes({block, 1, Mode::read, -1});
    }
    return nbytes;
}

void LookAhead::note_pinned(std::int64_t nbytes) {
    if (nbytes > largest_) {
        set_largest(nbytes);
    }
}

void LookAhead::set_largest(std::int64_t nbytes) {
    largest_ = nbytes;
    residency_.set_ahead_bytes_min(nbytes);
    retention_.set_room(std::max(std::int64_t{0}, residency_.arena().capacity() - anchored_ - 2 * nbytes - arriving_));
}

void LookAhead::forget_anchors() {
    anchor_ = never;
    anchored_ = 0;
    arriving_ = 0;
    surveyed_ = 0;
}

// Searches one turn of the loop for accesses so large that their blocks are better kept.
//
// Kept blocks must leave room for the operation that runs and for the next one. If one operation is much larger than the others
// (the head of a language model), that room would be most of the arena, all the time. If its blocks are kept instead, room for
// the largest of the other operations is enough.
void LookAhead::survey() {
    surveyed_ = tape_.now();
    std::vector<std::int64_t> sizes;
    for (std::int64_t position = tape_.pointer() + 1; position <= tape_.now(); ++position) {
        sizes.push_back(tape_.nbytes(position));
    }
    std::ranges::sort(sizes, std::greater<>());
    const std::int64_t capacity = residency_.arena().capacity();
    std::int64_t anchor = never;
    std::int64_t anchored = 0;
    std::int64_t sum = 0;
    for (std::size_t index = 0; index + 1 < sizes.size(); ++index) {
        const std::int64_t rest = sizes[index + 1];
        sum += sizes[index];
        if (sum + 2 * rest > capacity) {
            break;
        }
        if (rest < sizes[index] && sizes.front() - rest > capacity / large_divisor) {
            anchor = sizes[index];
            anchored = sum;
            break;
        }
    }
    if (anchor != anchor_ || anchored != anchored_) {
        anchor_ = anchor;
        anchored_ = anchored;
        if (largest_ >= anchor_) {
            largest_ = 0;
            for (const std::int64_t size : sizes) {
                largest_ = size < anchor_ ? std::max(largest_, size) : largest_;
            }
        }
    }
    arriving_ = std::max(std::int64_t{0}, std::min(arriving_bytes(), capacity / arriving_divisor) - largest_);
    if (tape_.volume(tape_.pointer(), tape_.now()) - capacity >= reserve_divisor * largest_) {
        // A device still uses a range for a moment after the program has released it. With room for one more operation the
        // link does not stop until then. This costs as many bytes more each turn.
        arriving_ = std::max(arriving_, largest_);
    }
    set_largest(largest_);
}

// Bytes that have to arrive during one of the longest stretches of a turn without an access, because the link cannot carry them
// in the rest of the turn.
//
// Room comes free at accesses only. A program that makes many small accesses and then computes for a long time (attention over
// blocks of keys and values, which are copied first) would leave the link idle during that time, unless there was room at its
// beginning. If each operation computes for as long as its own bytes take, this is no more than the room for the next one.
std::int64_t LookAhead::arriving_bytes() const {
    const double rate = residency_.seconds_per_byte();
    const double computing = tape_.seconds(tape_.pointer(), tape_.now());
    if (rate == 0.0 || computing <= 0.0) {
        return 0;
    }
    std::vector<double> stretches;
    for (std::int64_t position = tape_.pointer() + 1; position <= tape_.now(); ++position) {
        stretches.push_back(tape_.seconds(position - 1, position));
    }
    std::ranges::sort(stretches, std::greater<>());
    double longest = 0.0;
    double sum = 0.0;  // of the long stretches
    for (const double seconds : stretches) {
        if (sum < computing / stretches_divisor) {
            longest = seconds;
        } else if (seconds < longest / 2) {
            break;
        }
        sum += seconds;
    }
    const std::int64_t missing = tape_.volume(tape_.pointer(), tape_.now()) - residency_.arena().capacity();
    const double carried = static_cast<double>(missing) * rate - (computing - sum);
    return static_cast<std::int64_t>(longest / sum * std::clamp(carried, 0.0, sum) / rate);
}

// The key of blocks accessed at `start` of the known future (or the present) whose next use is at `use`.
std::int64_t LookAhead::key_for(std::int64_t use, std::int64_t start, std::int64_t nbytes) {
    if (nbytes >= anchor_) {
        return start + 1;  // as if it were used next: evicted last
    }
    if (!gate_.ample()) {
        return use;
    }
    std::int64_t turn = tape_.volume(tape_.pointer(), tape_.now());
    std::int64_t distance = tape_.volume(start, use);
    if (anchored_ != 0 && turn > anchored_) {  // average distance without the anchored bytes
        distance = static_cast<std::int64_t>(static_cast<double>(distance) * static_cast<double>(turn - anchored_) /
                                             static_cast<double>(turn));
        turn -= anchored_;
    }
    return retention_.keeps(nbytes, distance, turn) ? use : use + spare;
}

void LookAhead::set_window() {
    window_ = 0;
    const double rate = residency_.seconds_per_byte();
    if (!fetch_ || rate == 0.0 || !gate_.open()) {
        return;
    }
    const std::int64_t turn = tape_.volume(tape_.pointer(), tape_.now()) - anchored_;
    std::int64_t gain = std::max(std::int64_t{0}, turn - retention_.room());
    if (turn > 0) {  // another choice of kept blocks changes this share of the room, on average
        const double others = static_cast<double>(gain) / static_cast<double>(turn);
        gate_.set_refill(static_cast<std::int64_t>(static_cast<double>(retention_.room()) * others));
    }
    if (!gate_.ample()) {
        const double computing = tape_.seconds(tape_.pointer(), tape_.now()) / rate;
        if (computing < static_cast<double>(gain)) {
            gain = static_cast<std::int64_t>(computing);
        }
    }
    if (gain > min_window_per_pinned * largest_) {
        // More than this keeps the link no busier, also where the phases of a turn need it unequally: it only takes the room of
        // blocks that are kept.
        const std::int64_t capacity = residency_.arena().capacity();
        const std::int64_t enough = std::max(capacity / window_divisor, min_window_per_pinned * largest_);
        window_ = std::min({capacity, gain / 2, enough});
    }
}

// ---- looking ahead ----

bool LookAhead::due(bool freed) const {
    return (blocked_ && freed) || (!blocked_ && tape_.now() - cursor_ >= accesses_per_check) || cursor_ <= tape_.pointer() ||
           jumps_ != tape_.jumps() || residency_.soonest_evicted() != never || !tape_.followed();
}

void LookAhead::advance(const BlockSet& keep) {
    if (!tape_.followed()) {
        if (tape_.pointer() < 0) {
            give_up();
            follow_strides(keep);
        }
        return;
    }
    if (jumps_ != tape_.jumps()) {
        forget_anchors();
        rekey();
        jumps_ = tape_.jumps();
        restart();
    }
    const std::int64_t evicted = residency_.take_soonest_evicted();
    if (cursor_ <= tape_.pointer()) {
        restart();
    } else if (evicted < cursor_) {
        go_back(std::max(evicted, tape_.pointer() + 1));
    }
    pass_by();
    if (tape_.now() - surveyed_ >= tape_.now() - tape_.pointer()) {
        survey();
    }
    if (tape_.now() - aged_ > accesses_per_aging) {
        aged_ = tape_.now();
        set_largest(largest_ - largest_ / 4);
    }
    set_window();
    while (cursor_ <= tape_.now() && step(cursor_, keep)) {
        ++cursor_;
    }
    blocked_ = cursor_ <= tape_.now();
}

void LookAhead::resized() {
    forget_anchors();
    set_largest(largest_);
    restart();
}

void LookAhead::retreat() {
    jumps_ = -1;
    restart();
}

void LookAhead::restart() {
    cursor_ = tape_.pointer() + 1;
    births_.clear();
    birth_bytes_ = 0;
}

// Moves the cursor back to `position`, because a block that was resident when the cursor passed it has been evicted.
void LookAhead::go_back(std::int64_t position) {
    cursor_ = position;
    while (!births_.empty() && births_.back().first >= position) {
        birth_bytes_ -= births_.back().second;
        births_.pop_back();
    }
}

// Drops the expected creations that the pointer has passed, and makes prefetched runs evictable that were not accessed.
void LookAhead::pass_by() {
    while (!births_.empty() && births_.front().first <= tape_.pointer()) {
        birth_bytes_ -= births_.front().second;
        births_.pop_front();
    }
    while (!fetched_.empty() && fetched_.front().first <= tape_.pointer()) {
        expect_no_more(fetched_.front().second);
        fetched_.pop_front();
    }
}

// Resets the keys of prefetched blocks after the program has left the tape, because their next uses are unknown now.
void LookAhead::give_up() {
    for (const auto& [position, run] : fetched_) {
        expect_no_more(run);
    }
    fetched_.clear();
}

void LookAhead::expect_no_more(const Run& run) {
    for (BlockId block = run.first; block < run.stop(); ++block) {
        if (residency_[block].prefetched) {
            residency_.set_next_use(block, unknown_use(residency_[block].last_use));
        }
    }
}

void LookAhead::rekey() {
    const auto upcoming = tape_.upcoming();
    set_window();
    for (const BlockId block : residency_.arena().owners()) {
        const Block& b = residency_[block];
        const auto use = upcoming.find(b.name);
        if (use == upcoming.end()) {
            if (b.next_use < never) {  // otherwise the key says how long the block is worth keeping
                residency_.set_next_use(block, unknown_use(b.last_use));
            }
        } else if (window_ != 0 && b.next_use < never) {  // the jump changes the time of the next use; a kept block stays kept
            residency_.set_next_use(block, b.next_use < spare ? use->second : use->second + spare);
        } else if (window_ != 0) {
            residency_.set_next_use(block, key_for(use->second, tape_.pointer(), b.size));
        } else {
            residency_.set_next_use(block, use->second);
        }
    }
    fetched_.clear();
}

// Prepares for the access at `position`; false if there is no room for it yet.
bool LookAhead::step(std::int64_t position, const BlockSet& keep) {
    const BlockTable& blocks = residency_.blocks();
    const Tape::Token token = tape_.token(position);
    if (token.name < 0) {
        return true;
    }
    const BlockId first = blocks.named(token.name);
    if (token.created || first < 0) {
        births_.emplace_back(position, tape_.nbytes(position));
        birth_bytes_ += tape_.nbytes(position);
        return true;
    }
    if (blocks.named(token.name + token.count - 1) != first + token.count - 1) {
        return true;  // another storage has these names now
    }
    const Run run{first, token.count, Mode::read, -1};
    bool any_absent = false;
    bool all_absent = true;
    bool shunned = false;
    for (BlockId block = first; block < run.stop(); ++block) {
        if (block + 1 < run.stop() && blocks[block].size % residency_.arena().alignment() != 0) {
            return true;  // several storages have them: only the last block of a storage may have any size
        }
        const bool absent = blocks[block].state == State::absent;
        any_absent = any_absent || absent;
        all_absent = all_absent && absent;
        shunned = shunned || blocks[block].shunned;
    }
    if (!any_absent || shunned) {
        return true;
    }
    const std::int64_t nbytes = residency_.run_bytes(run);
    if (residency_.ahead_bytes() + nbytes > window_ || !gate_.covers(residency_.ahead_bytes() + nbytes)) {
        return false;
    }
    const std::tuple situation{position, residency_.arena().version(), residency_.victim(), residency_.ahead_bytes()};
    if (failed_step_ == situation) {
        return false;
    }
    if (birth_bytes_ != 0 && !clear(nbytes + birth_bytes_, position, keep)) {
        failed_step_ = situation;
        return false;
    }
    if (residency_.bring(run, keep, position)) {
        fetched_.emplace_back(position, run);
        return true;
    }
    failed_step_ = situation;
    // A run of which a part is resident and that cannot be filled in is gathered when it is accessed.
    return !all_absent;
}

// Evicts blocks that are needed later than `position` until `nbytes` bytes are free; false if that does not suffice.
bool LookAhead::clear(std::int64_t nbytes, std::int64_t position, const BlockSet& keep) {
    while (residency_.arena().free() < nbytes) {
        const BlockId victim = residency_.victim();
        if (victim < 0 || contains(keep, victim) || !residency_.may_evict_for(position) || !residency_.try_evict(victim)) {
            return false;
        }
    }
    return true;
}

void LookAhead::follow_strides(const BlockSet& keep) {
    if (!fetch_) {
        return;
    }
    const BlockTable& blocks = residency_.blocks();
    for (const std::int64_t name : strides_.coming(strides_ahead)) {
        const BlockId block = blocks.named(name);
        if (block < 0 || !residency_.has_copy(block)) {
            return;
        }
        if (blocks[block].state != State::absent || blocks[block].shunned) {
            continue;
        }
        const Run run{block, 1, Mode::read, -1};
        const std::int64_t nbytes = residency_.run_bytes(run);
        if (!gate_.covers(residency_.ahead_bytes() + nbytes)) {
            return;
        }
        // It gets the key of a block used just now: without a known future the least recently used block is evicted first.
        if (!residency_.bring(run, keep, unknown_use(tape_.now()))) {
            return;
        }
        gate_.charge_room(static_cast<double>(nbytes) / stride_rent);
    }
}

}  // namespace farpool::pager
