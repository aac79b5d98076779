// The map of the arena: the owner of each range, the transfers that still read from a range, and how to open a gap.
//
// The range of a dirty victim is free for its successor as soon as the write-back is queued: the successor's transfer is
// ordered after it, so the link does not wait for the program. Until the write has completed the range is a hazard: a transfer
// into it must wait, and no block may be moved there.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/extent_allocator.hpp"
#include "pager/last_uses.hpp"
#include "pager/messages.hpp"

namespace farpool::pager {

// A plan to open a hole: the blocks to move, each with its new place, in order.
using Slides = std::vector<std::pair<BlockId, std::int64_t>>;

class ArenaMap {
public:
    ArenaMap(std::int64_t capacity, std::int64_t alignment) : alignment_(alignment), ranges_(capacity, alignment) {}

    // Bytes of the arena that a block of `nbytes` bytes takes, rounded up to the alignment.
    std::int64_t rounded(std::int64_t nbytes) const { return (nbytes + alignment_ - 1) / alignment_ * alignment_; }
    std::int64_t alignment() const noexcept { return alignment_; }
    std::int64_t capacity() const noexcept { return ranges_.capacity(); }
    std::int64_t used() const noexcept { return ranges_.used(); }
    std::int64_t free() const noexcept { return ranges_.capacity() - ranges_.used(); }
    // Number of changes of the map so far.
    std::uint64_t version() const noexcept { return version_; }
    bool has_hazards() const noexcept { return !hazards_.empty(); }

    // Offset of a hole of `nbytes` bytes, -1 if there is none. Takes nothing.
    std::int64_t find(std::int64_t nbytes) const { return ranges_.find(nbytes); }
    bool fits(std::int64_t place, std::int64_t nbytes) const { return ranges_.fits(place, nbytes); }
    // Gives this very range to `block`; false if any byte of it is taken.
    bool take(BlockId block, std::int64_t place, std::int64_t nbytes);
    // Frees the range of `nbytes` bytes, which was last used by the access with ordinal `last_use`.
    void drop(std::int64_t place, std::int64_t nbytes, std::int64_t last_use);
    // Call before the owner writes into its range: returns the ordinal of the last use by earlier owners, -1 if there was
    // none or it has been claimed.
    std::int64_t claim(std::int64_t place, std::int64_t nbytes) { return last_uses_.claim(place, place + rounded(nbytes)); }

    // Notes that `transfer` reads the bytes of this range until it completes.
    void add_hazard(TransferId transfer, std::int64_t place, std::int64_t nbytes);
    void remove_hazard(TransferId transfer);
    // Transfers that still read bytes of this range.
    std::vector<TransferId> hazards_of(std::int64_t place, std::int64_t nbytes) const;

    // Blocks that own a range, in order of place.
    std::vector<BlockId> owners() const;
    // Calls `visit(block, place, nbytes)` for each range in order of place, until it returns false.
    template <typename Visit>
    void each_owner(Visit visit) const {
        ranges_.each([&](std::int64_t place, std::int64_t nbytes, std::int64_t tag) {
            return visit(static_cast<BlockId>(tag), place, nbytes);
        });
    }
    // Blocks with bytes at or beyond `capacity`.
    std::vector<BlockId> owners_beyond(std::int64_t capacity) const;

    // The cheapest way to open a hole of `nbytes` by moving neighbours towards the start, at most `most` bytes of them.
    // Considers each stretch of the arena without an immovable range, and in it each window whose holes add up to enough.
    template <typename Movable>
    std::optional<Slides> gap(std::int64_t nbytes, std::int64_t most, Movable movable) const {
        std::vector<Range> movables;
        std::vector<std::pair<std::int64_t, std::int64_t>> obstacles;
        each_owner([&](BlockId owner, std::int64_t place, std::int64_t size) {
            if (movable(owner)) {
                movables.push_back({owner, place, size});
            } else {
                obstacles.emplace_back(place, place + size);
            }
            return true;
        });
        return cheapest_gap(nbytes, most, movables, std::move(obstacles));
    }
    // Applies one step of a plan from gap() to the map; returns the copy to make.
    Move slide(BlockId block, std::int64_t place, std::int64_t target, std::int64_t nbytes, std::int64_t last_use);
    // Changes the capacity; false (and nothing changed) while a range beyond it has an owner or is still read.
    bool resize(std::int64_t capacity);

private:
    struct Range {
        BlockId owner;
        std::int64_t place;
        std::int64_t nbytes;
    };
    struct Hazard {
        TransferId transfer;
        std::int64_t low;
        std::int64_t high;
    };

    std::optional<Slides> cheapest_gap(std::int64_t nbytes, std::int64_t most, const std::vector<Range>& movables,
                                       std::vector<std::pair<std::int64_t, std::int64_t>> obstacles) const;

    std::int64_t alignment_;
    ExtentAllocator ranges_;       // a range's tag is its owner
    std::vector<Hazard> hazards_;  // in order of the transfers' numbers
    LastUses last_uses_;
    std::uint64_t version_ = 0;
};

}  // namespace farpool::pager
