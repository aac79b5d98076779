// The pager: decides which block is where, and when it moves. Deterministic and without I/O: no clock, no file, no thread.
//
// It receives accesses and completions, and answers with the transfers to start, in order. The same calls always give the same
// transfers, so a run can be replayed from its seed, and a planner can use the pager itself.
//
// An access is granted when all its runs are whole, contiguous in the arena and pinned at the same time. An access that cannot
// be granted at once waits in line, and only the head of the line may make room. So two threads never evict each other's
// operands in turn, and every operation that fits alone is granted.
//
// The caller passes what `take_commands` returns to a queue, in order, and reports each transfer's end with `completed`
// or `failed`, then calls `proceed`. It holds one lock around the pager.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/transfer_queue.hpp"
#include "pager/look_ahead.hpp"
#include "pager/messages.hpp"
#include "pager/residency.hpp"
#include "pager/tape.hpp"

namespace farpool::pager {

// One operation's request for its operands, and the answer.
struct Access {
    std::vector<Run> runs;
    std::vector<std::int64_t> places;  // arena offset of each run; valid while granted
    Refusal refusal;                   // why it will not be granted; nothing is pinned then
    std::int64_t ordinal = -1;         // grows from one request to the next; rows of one table may share it
    std::int64_t last_use = -1;        // latest use by earlier owners of the ranges that it writes into; see `Transfer`
    bool granted = false;
    bool under_way = false;     // all blocks that it waits for are being transferred
    BlockSet blocks;            // of all runs; empty if the access was granted at once
    std::uintptr_t stream = 0;  // the program's stream on which the operation is queued; for the driver
};

// Thrown if a call cannot be carried out; the call has changed nothing.
struct Refused {
    Refusal why;
};

// Counts of accesses.
struct AccessCounts {
    std::int64_t accesses = 0;      // runs accessed
    std::int64_t hits = 0;          // runs found whole and in place
    std::int64_t row_accesses = 0;  // accesses to blocks of tables whose rows are picked by data
    std::int64_t row_hits = 0;
    std::int64_t late = 0;  // runs whose transfer was under way when they were accessed
};

// All counts of a pager's work.
struct Counters : AccessCounts, MoveCounts {};

// Counts of accesses to blocks of one table whose rows are picked by data; a hit found its block in place.
struct RowCounts {
    std::int64_t accesses = 0;
    std::int64_t hits = 0;
};

class Pager {
public:
    // `capacity`: bytes of the arena. `spaces`: the lower tiers from fast to slow; a null one stands for a read-only source.
    // `classes`: number of classes of blocks. `alignment`: of blocks in the arena, in bytes; each block of a storage but the
    // last must be a multiple of it. `history`: accesses that the tape remembers. `prefetch`: true to fetch along the tape
    // ahead of the accesses. `late`: the program computes on a device, and `ran` reports its times later.
    Pager(std::int64_t capacity, std::vector<std::shared_ptr<Space>> spaces, int classes, std::int64_t alignment,
          std::int64_t history, bool prefetch, bool late);

    // ---- blocks ----

    // Adds a read-only source; returns its index among the tiers.
    std::int32_t add_source() { return residency_.add_source(); }
    // Creates consecutive blocks of these sizes in bytes. They have no content until they are written.
    BlockId create(std::span<const std::int64_t> sizes, int cls);
    // Notes that a source has a part of an absent block's clean copy; `piece.place` is relative to the block.
    void adopt(BlockId block, const Piece& piece);
    // Notes that a tier has all bytes of an absent block, which has no content yet, at an offset reserved in the tier's space.
    // The caller has written them there, and they now belong to the block.
    void note_copy(BlockId block, std::int32_t tier, std::int64_t offset);
    // True if the block is absent and no tier has a copy of it.
    bool can_adopt(BlockId block) const;
    // Retires the blocks of one `create`, which the program has dropped. Call `forget` afterwards until it returns true.
    void retire(BlockId first, std::int32_t count);
    // Frees retired blocks; false (and nothing done) while they are being moved, are pinned or are waited for.
    bool forget(BlockId first, std::int32_t count);

    // ---- accesses ----

    // Requests runs, which must not overlap. They are granted at once or later. `now`: seconds on a clock that does not go
    // back. Unless times are reported late, the time between a grant and the next request counts as the program's computing;
    // without computing nothing is fetched ahead, because that would gain nothing. Throws Refused (TooLarge) if the runs do
    // not fit into the arena together.
    std::shared_ptr<Access> request(std::vector<Run> runs, double now);
    // Unpins the operands of an operation that has ended. Without `go_on` no other access is served and nothing is moved.
    void release(Access& access, bool go_on);
    // Notes when the device computed for accesses. Call in the order of the ends; nothing is noted if one is impossible.
    void ran(std::span<const Ran> accesses);
    // Withdraws a waiting access, or releases it if it has been granted. Transfers under way continue.
    void abandon(const std::shared_ptr<Access>& access);

    // ---- transfers ----

    // Commands to start now, in this order. A move must be made before any transfer that follows it is started.
    std::vector<Command> take_commands() { return residency_.take_commands(); }
    // The same into an empty vector, whose memory the pager uses for the next commands.
    void take_commands(std::vector<Command>& commands) { residency_.take_commands(commands); }
    // Transfers started as prefetches for which an access waits now.
    std::vector<TransferId> take_raised() { return residency_.take_raised(); }
    // Least number of transfers that have to end before this access can be granted; 1 if that is not known.
    std::uint64_t results_until_ready(const Access& access) const;
    // Reports a transfer that has succeeded; it was on its link from `start` to `end`, on the clock of `request`.
    void completed(TransferId transfer, double start, double end);
    // Reports a transfer that has failed. Transfers ordered after it are undone; do not report their ends.
    void failed(TransferId transfer, const Failure& error);
    // Grants the accesses that can be granted now; call after reporting completions.
    void proceed(double now);

    // ---- the budget ----

    // Changes the arena's bytes. False while blocks still occupy bytes beyond; then call again after completions. Throws
    // Refused if no lower tier takes a block that has to be evicted; the capacity is as it was.
    bool resize(std::int64_t capacity);

    // Evicts consecutive blocks before their turn; false if some stay, because they are in use or no tier takes them. The next
    // access to a block fetches it again.
    bool demote(BlockId first, std::int32_t count);

    // ---- looking ----

    const Residency& residency() const noexcept { return residency_; }
    Residency& residency() noexcept { return residency_; }
    const Tape& tape() const noexcept { return tape_; }
    // True if the program computes on a device, whose times `ran` reports.
    bool late() const noexcept { return late_; }
    // Bytes of memory that the pager holds to know its blocks, in addition to the tape.
    std::int64_t allocated_bytes() const {
        return residency_.allocated_bytes() + look_ahead_.allocated_bytes() + allocated(row_counts_);
    }
    Counters counters() const { return {access_counts_, residency_.counts()}; }
    // Counts of accesses to rows, by the first block of each table that exists.
    const std::unordered_map<BlockId, RowCounts>& row_counts() const noexcept { return row_counts_; }
    const std::vector<std::shared_ptr<Access>>& waiting() const noexcept { return waiting_; }
    // Throws PortFailure (a ValueError in Python) unless these are blocks in use.
    void require_blocks(BlockId first, std::int32_t count) const { residency_.blocks().require_used(first, count); }

private:
    // How an access found the blocks of a run: resident and contiguous, on their way, or not.
    enum class Found : std::uint8_t { in_place, late, missing };

    double busy_until(double now);
    double busy_before(double busy) const;
    void claim(Access& access);
    void pin_at_once(Access& access, double busy);
    void note(const Run& run, double busy, bool first);
    Found count(const Run& run);
    void count_row(BlockId table, bool in_place);
    bool make_ready(Access& access);
    bool lies_ready(Access& access) const;
    bool serve_line();
    void serve();
    bool wants(BlockId block) const;
    BlockSet wanted() const;

    int classes_;
    Tape tape_;
    PrefetchGate gate_;
    Residency residency_;
    LookAhead look_ahead_;
    std::vector<std::shared_ptr<Access>> waiting_;  // in the order of asking
    AccessCounts access_counts_;
    std::unordered_map<BlockId, RowCounts> row_counts_;
    BlockId counted_table_ = -1;  // table of `counted_`: accesses to rows of one table mostly follow each other
    RowCounts* counted_ = nullptr;
    double now_ = 0.0;
    double granted_at_ = 0.0;             // when an access was last granted: since then the program computes
    std::vector<Tape::Late> late_times_;  // scratch of `ran`, kept to reuse its memory
    bool late_;                           // `ran` reports the times of computing
    bool resizing_ = false;  // a smaller capacity waits for blocks to be evicted: until then nothing is fetched ahead
};

}  // namespace farpool::pager
