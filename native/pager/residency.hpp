// Residency: the state of each block, its steps into the arena and out of it, and how room is made there.
//
// A block is absent, fetching, resident or writing back (see `State`). Two further conditions cut across these:
//
// - hollow: placed for an access that overwrites it, while its only content is still the copy below. If that access never
//   comes to pass, the hollow block is dropped and nothing is lost.
// - stuck: no tier takes its bytes. It stays resident and is not a victim until the next access tries again.
//
// Room is made in this order: a hole that fits; evicting, farthest next use first, until enough is free (clean blocks cost
// nothing, dirty ones are written back); sliding neighbours together.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "pager/arena_map.hpp"
#include "pager/backing.hpp"
#include "pager/block_table.hpp"
#include "pager/farthest_use.hpp"
#include "pager/messages.hpp"
#include "pager/prefetch_gate.hpp"
#include "pager/row_policy.hpp"
#include "pager/tape.hpp"

namespace farpool::pager {

struct Counters {
    std::int64_t accesses = 0;      // runs accessed
    std::int64_t hits = 0;          // runs found whole and in place
    std::int64_t row_accesses = 0;  // accesses to blocks of tables whose rows are picked by data
    std::int64_t row_hits = 0;
    std::int64_t late = 0;  // runs whose transfer was under way when they were accessed
    std::int64_t demand_fetches = 0;
    std::int64_t prefetches = 0;
    std::int64_t prefetches_used = 0;
    std::int64_t prefetches_wasted = 0;  // blocks prefetched that left, or were overwritten, before they were accessed
    std::int64_t evictions = 0;
    std::int64_t write_backs = 0;
    std::int64_t moves = 0;
    std::int64_t moved_bytes = 0;
};

// Blocks in ascending order.
using BlockSet = std::vector<BlockId>;
bool contains(const BlockSet& set, BlockId block);

class Residency {
public:
    // `late`: the times at which the program computed are known only later.
    Residency(std::int64_t capacity, std::vector<std::shared_ptr<Space>> spaces, std::int64_t alignment, bool late);
    Residency(const Residency&) = delete;
    Residency& operator=(const Residency&) = delete;

    // ---- looking ----

    // Arena bytes that a run occupies.
    std::int64_t run_bytes(const Run& run) const;
    // Arena offset of a run if it is resident and contiguous, else `nowhere`.
    std::int64_t place_of(const Run& run) const;
    // True if no transfer is under way on the run (a rescued block is resident while its write-back still runs).
    bool settled(const Run& run) const;
    bool any_pinned() const;
    // True if a block is resident and unpinned, and no transfer is under way on it.
    bool at_rest(BlockId block) const;

    // ---- pins and keys ----

    void pin(const Run& run);
    void unpin(const Run& run);
    // Marks a block dirty: its bytes differ from its copy.
    void soil(BlockId block);
    void set_next_use(BlockId block, std::int64_t key);
    // Notes an access to a block; if it was prefetched, the prefetch counts as used.
    void use(BlockId block);

    // ---- coming and leaving ----

    // Places and fetches the missing blocks of a run; false if that has to wait (or, ahead of time, is not worth it). `keep`:
    // blocks that must not be evicted for it. `use`: for a prefetch, the position of the coming use; only blocks needed later
    // than that make room. Throws NoRoom.
    bool bring(const Run& run, const BlockSet& keep, std::optional<std::int64_t> use = {});
    // Makes room for the missing blocks of many small runs at once and places them: side by side where there is such a hole,
    // else each in a hole of its own. Resident blocks are moved only for those that fit into no hole.
    void bring_rows(std::span<const Run> runs, const BlockSet& keep);
    // Makes a resident, unpinned block leave: at once if it is clean, else by writing it back. Throws NoRoom where no lower
    // tier takes it; it stays.
    void evict(BlockId block);
    // evict(), but returns false where that throws.
    bool try_evict(BlockId block);
    // True if the victim may leave for a prefetch for the position `use`: it is needed later, and not kept.
    bool may_leave_for(std::int64_t use) const;
    // Frees a block, which must be unpinned and without a transfer under way.
    void forget(BlockId block);
    bool has_stuck() const noexcept { return !stuck_.empty(); }
    // Lets the stuck blocks be tried again; returns the error of one of them, or null.
    Failure unstick();

    // ---- completions ----

    // Notes a transfer that has succeeded; it was on its link from `start` to `end`.
    void completed(TransferId number, double start, double end);
    // Notes that the program computed from `start` to `end`.
    void computed(double start, double end);
    // Notes a transfer that has failed. Transfers that waited for it are undone; bytes that it was to save stay in the arena.
    // `waited_for`: true if an access waits for its block.
    void failed(TransferId number, const Failure& error, bool waited_for);

    BlockTable blocks;
    // Bytes of memory that the state of blocks, their order and the times of transfers hold.
    std::int64_t held_bytes() const {
        return blocks.held_bytes() + evictable.held_bytes() + rows.held_bytes() + rate.held_bytes() + writing.held_bytes() +
               computing_.held_bytes() + held(unjudged_);
    }

    ArenaMap arena;
    Backing backing;
    FarthestUse evictable;
    PrefetchGate gate;
    RowPolicy rows;
    LinkRate rate;      // of fetches
    BusyTimes writing;  // when blocks were written back
    Counters counters;
    std::vector<Command> commands;
    std::vector<TransferId> raised;  // transfers that somebody waits for by now
    // Transfers under way, by number, which is the order in which they were started.
    std::map<TransferId, std::shared_ptr<const Transfer>> transfers;
    // Errors of blocks whose last fetch failed while an access waited for it; the access takes the error.
    std::unordered_map<BlockId, Failure> faults;
    std::int64_t ahead_bytes = 0;     // prefetched, or on their way, and not accessed yet
    std::int64_t ahead_at_least = 0;  // while fewer bytes lie ready, blocks that were to be kept make room too
    std::int64_t lost = never;        // the soonest use of a block that left since the look-ahead last asked
    std::int64_t hollow_blocks = 0;

private:
    // An ended fetch, for the prefetch gate to judge.
    struct Fetched {
        std::int64_t nbytes;
        double start;
        double end;
        bool ahead;
    };

    void judge(const Fetched& fetch);
    void enter(BlockId block);
    void fill(BlockId block, Mode mode, std::optional<std::int64_t> use);
    TransferId start(Kind kind, BlockId block, std::vector<Piece> pieces, std::vector<TransferId> after, bool demand,
                     std::int64_t last_use);
    std::shared_ptr<const Transfer> finish(TransferId number);
    void raise_for(BlockId block, std::optional<std::int64_t> use);
    void write_out(BlockId block, TransferId number);
    bool rescue(BlockId block);
    void leave(BlockId block, std::int64_t claimed = -1);
    void give_up(const Transfer& transfer);
    bool forget_prefetch(BlockId block);
    void count_waste(BlockId block);
    void clear_hollow(BlockId block);
    bool may_lose_copy(BlockId block) const;

    std::int64_t place_anew(const Run& run, const BlockSet& keep, std::optional<std::int64_t> use);
    void settle_at(const Run& run, std::int64_t base);
    bool fill_in(const Run& run, std::int64_t base);
    bool relocate(const Run& run, const BlockSet& keep);
    std::int64_t make_room(std::int64_t nbytes, const BlockSet& keep, std::optional<std::int64_t> use, bool in_one = true);
    void place_and_fill(const Run& run, std::int64_t base);
    bool slide_together(std::int64_t nbytes, std::int64_t most);

    std::unordered_map<BlockId, TransferId> moving_;  // the transfer under way for a block
    std::vector<std::pair<BlockId, Failure>> stuck_;  // with the error of the tier that did not take it
    TransferId number_ = 0;
    bool late_;
    BusyTimes computing_;           // when the program computed
    std::deque<Fetched> unjudged_;  // fetches of which it is not known yet whether the program computed meanwhile
    // The latest search for a gap that failed: version of the map, bytes, and bytes to move at most.
    std::optional<std::tuple<std::uint64_t, std::int64_t, std::int64_t>> in_vain_;
};

}  // namespace farpool::pager
