// Residency: the state of each block, how it enters and leaves the arena, and how room is made there.
//
// A block is absent, fetching, resident or writing back (see `State`). Two more conditions are independent of the state:
//
// - hollow: a place was given to a block for an access that overwrites it, and its only content is still the copy below. If
//   that access never takes place, the hollow block is dropped and nothing is lost.
// - stuck: no tier takes the bytes of the block. It stays resident and is not a victim until the next access tries again.
//
// Room is made in this order: a hole that fits; evicting the blocks with the farthest next use until enough is free (clean
// blocks cost nothing, dirty blocks are written back); moving neighbours together.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pager/arena_map.hpp"
#include "pager/backing.hpp"
#include "pager/block_table.hpp"
#include "pager/farthest_use.hpp"
#include "pager/messages.hpp"
#include "pager/prefetch_gate.hpp"
#include "pager/row_policy.hpp"
#include "pager/tape.hpp"
#include "pager/transfer_times.hpp"
#include "pager/transfers.hpp"

namespace farpool::pager {

// Counts of the work that moved blocks.
struct MoveCounts {
    std::int64_t demand_fetches = 0;
    std::int64_t prefetches = 0;
    std::int64_t prefetches_used = 0;
    std::int64_t prefetches_wasted = 0;  // prefetched blocks that were evicted or overwritten before an access
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
    // `late`: the times at which the program computed are reported later.
    Residency(std::int64_t capacity, std::vector<std::shared_ptr<Space>> spaces, std::int64_t alignment, PrefetchGate& gate,
              bool late);
    Residency(const Residency&) = delete;
    Residency& operator=(const Residency&) = delete;

    // ---- looking ----

    const BlockTable& blocks() const noexcept { return blocks_; }
    const Block& operator[](BlockId block) const { return blocks_[block]; }
    const ArenaMap& arena() const noexcept { return arena_; }
    const Transfers& transfers() const noexcept { return transfers_; }
    const MoveCounts& counts() const noexcept { return counts_; }
    const std::vector<std::shared_ptr<Space>>& spaces() const noexcept { return backing_.spaces(); }
    // Arena bytes that a run occupies.
    std::int64_t run_bytes(const Run& run) const;
    // Arena offset of a run if it is resident and contiguous, else `nowhere`.
    std::int64_t place_of(const Run& run) const;
    // True if no transfer is under way on the run (a rescued block is resident while its write-back still runs).
    bool settled(const Run& run) const;
    bool any_pinned() const;
    // True if a block is resident and unpinned, and no transfer is under way on it.
    bool at_rest(BlockId block) const;
    // True if the block has a copy below the arena, clean or stale.
    bool has_copy(BlockId block) const { return backing_.has(block); }
    // The block to evict next; -1 if there is none.
    BlockId victim() const { return evictable_.victim(); }
    // Recent seconds per byte of fetches; 0 before the first one.
    double seconds_per_byte() const { return times_.seconds_per_byte(); }
    // Bytes that were prefetched, or are on their way, and that no access has used yet.
    std::int64_t ahead_bytes() const noexcept { return ahead_bytes_; }
    // Soonest next use of a block that was evicted since `take_soonest_evicted`; `never` if there was none.
    std::int64_t soonest_evicted() const noexcept { return soonest_evicted_; }
    // True if rows of tables are kept by how often they are used, false if by how recently.
    bool rows_by_frequency() const noexcept { return rows_.by_frequency(); }
    // Bytes of memory that the state of blocks, their order and the times of transfers hold.
    std::int64_t allocated_bytes() const {
        return blocks_.allocated_bytes() + evictable_.allocated_bytes() + rows_.allocated_bytes() + times_.allocated_bytes();
    }

    // ---- blocks ----

    // See `BlockTable` and `Backing`.
    BlockId create(std::span<const std::int64_t> sizes, int cls) { return blocks_.create(sizes, cls); }
    std::int32_t add_source() { return backing_.add_source(); }
    void adopt(BlockId block, const Piece& piece) { backing_.adopt(block, piece); }
    void note_copy(BlockId block, std::int32_t tier, std::int64_t offset) { backing_.note_copy(block, tier, offset); }
    void retire(BlockId first, std::int32_t count) { blocks_.retire(first, count); }
    // Frees blocks, which must be unpinned and without a transfer under way.
    void forget(BlockId first, std::int32_t count);

    // ---- accesses ----

    void pin(const Run& run);
    void unpin(const Run& run);
    // Before a pinned run is written: returns the ordinal of the last use of its range by earlier owners, -1 if there was none
    // or it was claimed before.
    std::int64_t claim(const Run& run);
    // Marks a block dirty: its bytes differ from its copy.
    void soil(BlockId block);
    void set_next_use(BlockId block, std::int64_t key);
    // Notes an access to a block by position and key of its next use. If the block was prefetched, the prefetch was used.
    void accessed(BlockId block, std::int64_t position, std::int64_t next_use);
    // The same for a run that the caller pins next, so that the order of eviction need not change.
    void accessed_and_pinned(const Run& run, std::int64_t position, std::int64_t next_use);
    // Notes that a row of a table, which no tape foretells, was picked; returns the position until which to keep it.
    std::int64_t picked_row(BlockId block, std::int64_t position);
    // Takes the error of a block whose last fetch failed while an access waited for it; null if there is none.
    Failure take_fault(BlockId block);

    // ---- placing and evicting ----

    // Places and fetches the missing blocks of a run; false if that has to wait (or, ahead of time, is not worth it). `keep`:
    // blocks that must not be evicted for it. `use`: for a prefetch, the position of the coming use; only blocks that are
    // needed later than that are evicted. Throws NoRoom.
    bool bring(const Run& run, const BlockSet& keep, std::optional<std::int64_t> use = {});
    // Makes room for the missing blocks of many small runs at once and places them next to each other if there is such a hole,
    // else each in a hole of its own. Resident blocks are moved only for those that fit into no hole.
    void bring_rows(std::span<const Run> runs, const BlockSet& keep);
    // Evicts a resident, unpinned block: at once if it is clean, else by writing it back. False if no lower tier takes it; it
    // stays.
    bool try_evict(BlockId block);
    // True if the next victim may be evicted for a prefetch for the position `use`: it is needed later, and not kept.
    bool may_evict_for(std::int64_t use) const;
    // While fewer bytes than this are prefetched, a prefetch may also evict blocks that were to be kept.
    void set_ahead_bytes_min(std::int64_t nbytes) { ahead_bytes_min_ = nbytes; }
    // Returns `soonest_evicted` and forgets it.
    std::int64_t take_soonest_evicted() { return std::exchange(soonest_evicted_, never); }
    bool has_stuck() const noexcept { return !stuck_.empty(); }
    // Lets the stuck blocks be tried again; returns the error of one of them, or null.
    Failure unstick();
    // Changes the arena's bytes; false (and nothing changed) while some bytes beyond are owned or still read.
    bool resize(std::int64_t capacity);

    // ---- transfers ----

    // Notes a transfer that has succeeded; it was on its link from `start` to `end`.
    void completed(TransferId number, double start, double end);
    // Notes that the program computed from `start` to `end`.
    void computed(double start, double end) { times_.computed(start, end); }
    // Notes a transfer that has failed. Transfers ordered after it are undone; bytes that it was to save stay in the arena.
    // `waited_for`: true if an access waits for its block.
    void failed(TransferId number, const Failure& error, bool waited_for);
    // See `Transfers`.
    std::vector<Command> take_commands() { return transfers_.take_commands(); }
    void take_commands(std::vector<Command>& commands) { transfers_.take_commands(commands); }
    std::vector<TransferId> take_raised() { return transfers_.take_raised(); }

private:
    void used(BlockId block);
    void evict(BlockId block);
    void forget(BlockId block);
    void enter(BlockId block);
    void fill(BlockId block, Mode mode, std::optional<std::int64_t> use);
    void raise_for(BlockId block, std::optional<std::int64_t> use);
    void write_out(BlockId block, TransferId number);
    bool rescue(BlockId block);
    void drop(BlockId block, std::int64_t claimed = -1);
    void undo(const Transfer& transfer);
    bool forget_prefetch(BlockId block);
    void count_waste(BlockId block);
    bool may_lose_copy(BlockId block) const;
    void write_back_failed(const Transfer& transfer, const Failure& error);

    std::int64_t new_place(const Run& run, const BlockSet& keep, std::optional<std::int64_t> use);
    void settle_at(const Run& run, std::int64_t base);
    bool fill_in(const Run& run, std::int64_t base);
    bool relocate(const Run& run, const BlockSet& keep);
    std::int64_t make_room(std::int64_t nbytes, const BlockSet& keep, std::optional<std::int64_t> use, bool in_one = true);
    void place_and_fill(const Run& run, std::int64_t base);
    void move(BlockId block, std::int64_t target);
    bool slide_together(std::int64_t nbytes, std::int64_t most);

    BlockTable blocks_;
    ArenaMap arena_;
    Backing backing_;
    FarthestUse evictable_;
    RowPolicy rows_;
    Transfers transfers_;
    TransferTimes times_;
    PrefetchGate& gate_;
    MoveCounts counts_;
    std::unordered_map<BlockId, Failure> faults_;     // see `take_fault`
    std::vector<std::pair<BlockId, Failure>> stuck_;  // with the error of the tier that did not take it
    std::int64_t ahead_bytes_ = 0;
    std::int64_t ahead_bytes_min_ = 0;
    std::int64_t soonest_evicted_ = never;
    // The latest search for a gap that failed: version of the map, bytes, and bytes to move at most.
    std::optional<std::tuple<std::uint64_t, std::int64_t, std::int64_t>> failed_search_;
};

}  // namespace farpool::pager
