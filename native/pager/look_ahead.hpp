// Look-ahead: fetches along the tape before the program asks, into room that other blocks do not need sooner.
//
// The cursor runs ahead of the tape's pointer. What it fetches takes the place of blocks that are not kept until their next
// use (`Retention`) and are needed later. It stops where there are none left, where as much lies ready as can pay for itself
// (the window), and where earlier predictions were so often wrong that fetching on demand is better (`PrefetchGate`).
//
// The window: what lies ready ahead of its use could have been room for a block that is kept, so each turn of a loop fetches
// as many bytes more as lie ready. That is worth it while it is less than what can be gained: transfers that run while the
// program computes, at most the turn's computing and at most what does not fit.
//
// Blocks that the program will create on the way need room too; it is kept for them, or a block fetched too early would have
// to leave for them again. Where the tape does not know the future, a steady stride does (`Strides`).
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <tuple>
#include <utility>

#include "pager/held.hpp"
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

    // Notes a new access to a run of `nbytes` bytes, to whose blocks the tape gave `key`; returns the key to use.
    std::int64_t note_access(const Run& run, std::int64_t key, std::int64_t nbytes);
    // Notes that the access just noted found its blocks neither resident nor on their way; the program had computed for
    // `busy` seconds before it.
    void note_miss(const Run& run, double busy);
    // True if a block is resident and kept for a known use.
    bool kept(BlockId block) const;
    // Bytes of a run that an operation needs beside blocks that are kept all the time.
    std::int64_t beside_kept(const Run& run) const;
    // Notes that an operation pins `nbytes` at once beside blocks that are kept.
    void note_pinned(std::int64_t nbytes);
    // True if `advance` may find something to do, now that an access has been noted or (`freed`) has ended.
    bool due(bool freed) const;
    // Fetches ahead as far as possible after an access. Blocks that somebody waits for (`keep`) are not evicted.
    void advance(const BlockSet& keep);
    // Adapts to a new capacity of the arena.
    void resized();
    // Looks again from the pointer on, after something was undone (a failure, a smaller budget).
    void retreat();
    // Bytes of memory that the look-ahead holds.
    std::int64_t held_bytes() const { return held(births_) + held(fetched_); }

private:
    void set_largest(std::int64_t nbytes);
    void survey();
    std::int64_t carried_meanwhile() const;
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
    std::int64_t jumps_ = -1;  // the tape's count of jumps for which the keys were made
    // Positions and bytes of the accesses ahead that will create blocks.
    std::deque<std::pair<std::int64_t, std::int64_t>> births_;
    std::int64_t birth_bytes_ = 0;
    // Runs fetched ahead, each with the position of the use that it was fetched for.
    std::deque<std::pair<std::int64_t, Run>> fetched_;
    std::int64_t largest_ = 0;  // bytes that the largest of the latest accesses has pinned at once
    std::int64_t aged_ = 0;     // where on the tape `largest_` was last lowered
    // Size in bytes from which accesses keep their blocks all the time; these take `anchored_` bytes. An operation that needs
    // that much room at once loses least by having it all the time.
    std::int64_t anchor_ = never;
    std::int64_t anchored_ = 0;
    std::int64_t meanwhile_ = 0;  // room beside that for what comes in while the program computes without an access
    std::int64_t surveyed_ = 0;   // where on the tape that was last looked at
    std::int64_t window_ = 0;     // bytes that may lie ready
    bool blocked_ = false;        // the cursor could not go on
    // The situation in which there was no room: the position, and the state of the arena then.
    std::optional<std::tuple<std::int64_t, std::uint64_t, BlockId, std::int64_t>> in_vain_;
};

}  // namespace farpool::pager
