// Backing: where the bytes of blocks are stored below the arena, in tiers or in sources, and room for them.
//
// Placement below is static: an evicted block goes to the first tier with room and keeps its place there.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pager/arena_map.hpp"
#include "pager/block_table.hpp"

namespace farpool::pager {

// The copies of blocks below the arena: a block has one in a tier, or parts of it in sources, or none.
class Backing {
public:
    // `spaces`: lower tiers from fast to slow; a null one stands for a read-only source.
    // `may_lose`: true if the arena holds a block's current bytes, so that its copy may be dropped.
    Backing(BlockTable& blocks, const ArenaMap& arena, std::vector<std::shared_ptr<Space>> spaces,
            std::function<bool(BlockId)> may_lose)
        : blocks_(blocks), arena_(arena), spaces_(std::move(spaces)), may_lose_(std::move(may_lose)) {}

    // Adds a read-only source; returns its index among the tiers.
    std::int32_t add_source();
    // Notes that a source has a part of a block's clean copy; `piece.place` is relative to the block.
    void adopt(BlockId block, const Piece& piece);
    // Notes that a tier has a copy of all of a block's bytes at `offset`, which was reserved for it.
    void note_copy(BlockId block, std::int32_t tier, std::int64_t offset);
    // True if the block has a copy, clean or stale.
    bool has(BlockId block) const { return blocks_[block].tier >= 0 || blocks_[block].sourced; }
    // The pieces to read for a block, which must have a copy, at `place` in the arena.
    std::vector<Piece> pieces(BlockId block, std::int64_t place) const;
    // One piece from the block's copy in its tier to its range in the arena.
    Piece extent(BlockId block, std::int64_t place) const;
    // Finds a place for the block's copy in a tier, if it has none; false if no tier has room.
    bool reserve(BlockId block);
    void drop_sources(BlockId block);
    // Drops the block's copy, in a tier or in sources.
    void drop(BlockId block);
    // Excludes the block's tier, which failed to take it, from further attempts; false if no other tier is left.
    bool bar(BlockId block);
    // Lets any tier be tried again for the block.
    void unbar(BlockId block) { barred_.erase(block); }
    const std::vector<std::shared_ptr<Space>>& spaces() const noexcept { return spaces_; }

private:
    bool make_way(std::int32_t tier, std::int64_t nbytes);
    void free(BlockId block);
    bool is_barred(BlockId block, std::size_t tier) const;

    BlockTable& blocks_;
    const ArenaMap& arena_;
    std::vector<std::shared_ptr<Space>> spaces_;
    std::function<bool(BlockId)> may_lose_;
    std::unordered_map<BlockId, std::vector<Piece>> sources_;
    std::unordered_map<BlockId, std::vector<bool>> barred_;  // by tier: true if it failed to take the block
};

}  // namespace farpool::pager
