// Look-ahead: prefetches along the tape, into room that other blocks do not need sooner.
//
// The cursor runs ahead of the tape's pointer. A prefetched block replaces blocks that are not kept until their next use
// (`Retention`) and are needed later. The cursor stops if no such block is left, if the prefetched bytes reach the amount that
// can pay for itself (the window), and if so many predictions were wrong that fetching on demand is better (`PrefetchGate`).
//
// The window: the room of a prefetched block could have held a block that is kept, so each turn of a loop fetches as many bytes
// more as are prefetched. This pays while the bytes are fewer than the gain: transfers that run while the program computes, at
// most the computing of one turn and at most the bytes that do not fit.
//
// Blocks that the program will create on the way need room too. It is kept free, or a block fetched too early would have to be
// evicted for them again. If the tape does not know the future, a steady stride may (`Strides`).
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>

#include "pager/allocated.hpp"
#include "pager/residency.hpp"
#include "pager/retention.hpp"
#include "pager/strides.hpp"
#include "pager/tape.hpp"

namespace farpool::pager {

class LookAhead {
public:
    // `fetch`: true to fetch ahead. Without, the tape still decides which blocks are evicted.
    LookAhead(Tape& tape, Residency& residency, PrefetchGate& gate, bool fetch)
        : tape_(tape), residency_(residency), gate_(gate), fetch_(fetch), retention_(residency.arena().capacity()) {}

    // Notes a new access to a run of `nbytes` bytes, whose key on the tape is `key`; returns the key to use for its blocks.
    std::int64_t note_access(const Run& run, std::int64_t key, std::int64_t nbytes);
    // Notes that the access just noted found blocks absent; the program had computed for `busy` seconds before it.
    void note_miss(const Run& run, double busy);
    // True if a block is resident and kept for a known use.
    bool kept(BlockId block) const;
    // Bytes of a run that an operation needs in addition to blocks that are kept all the time.
    std::int64_t beside_kept(const Run& run) const;
    // Notes that an operation pins `nbytes` at once in addition to blocks that are kept.
    void note_pinned(std::int64_t nbytes);
    // True if `advance` may find something to do, now that an access has been noted or (`freed`) has ended.
    bool due(bool freed) const;
    // Prefetches as far as possible after an access. Blocks that an access waits for (`keep`) are not evicted.
    void advance(const BlockSet& keep);
    // Adapts to a new capacity of the arena.
    void resized();
    // Starts again at the pointer, after a transfer was undone.
    void retreat();
    // Bytes of memory that the look-ahead holds.
    std::int64_t allocated_bytes() const { return allocated(births_) + allocated(fetched_); }

private:
    void set_largest(std::int64_t nbytes);
    void survey();
    std::int64_t arriving_bytes() const;
    void forget_anchors();
    std::int64_t key_for(std::int64_t use, std::int64_t start, std::int64_t nbytes);
    void set_window();
    void restart();
    void go_back(std::int64_t position);
    void pass_by();
    void give_up();
    void expect_no_more(const Run& run);
    void rekey();
    bool step(std::int64_t position, const BlockSet& keep);
    bool clear(std::int64_t nbytes, std::int64_t position, const BlockSet& keep);
    void follow_strides(const BlockSet& keep);

    Tape& tape_;
    Residency& residency_;
    PrefetchGate& gate_;
    bool fetch_;
    Retention retention_;
    Strides strides_;
    std::int64_t cursor_ = 0;
    std::int64_t jumps_ = -1;  // the tape's count of jumps when the keys were made
    // Positions and bytes of the accesses ahead that will create blocks.
    std::deque<std::pair<std::int64_t, std::int64_t>> births_;
    std::int64_t birth_bytes_ = 0;
    // Prefetched runs, each with the position of the use that it was fetched for.
    std::deque<std::pair<std::int64_t, Run>> fetched_;
    std::int64_t largest_ = 0;  // the most bytes that one of the latest operations has pinned at once
    std::int64_t aged_ = 0;     // where on the tape `largest_` was last lowered
    // Blocks of accesses of at least this many bytes are kept all the time; they take `anchored_` bytes. An operation that
    // needs that much room at once loses least if its blocks keep it all the time.
    std::int64_t anchor_ = never;
    std::int64_t anchored_ = 0;
    std::int64_t arriving_ = 0;  // more room, for bytes that arrive while the program computes without an access
    std::int64_t surveyed_ = 0;  // position of the latest survey
    std::int64_t window_ = 0;    // bytes that may be prefetched
    bool blocked_ = false;       // the cursor could not go on
    // The latest step for which there was no room: the position, and the state of the arena at that time.
    std::optional<std::tuple<std::int64_t, std::uint64_t, BlockId, std::int64_t>> failed_step_;
};

}  // namespace farpool::pager
