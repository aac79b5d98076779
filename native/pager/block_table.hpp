// The table of blocks. In addition to its number, a block has a name, which the tape uses.
//
// The lowest free name is given first, and a name is free again as soon as the program drops the block. So a program that
// allocates and frees in the same order on every pass gets the same names on every pass: the name of a gradient or a temporary
// is its ordinal of birth. The number is free only when no transfer is under way on the block, which depends on timing.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/extent_allocator.hpp"
#include "pager/allocated.hpp"
#include "pager/messages.hpp"

namespace farpool::pager {

enum class State : std::uint8_t {
    free = 0,  // the number is not in use
    absent = 1,
    fetching = 2,
    resident = 3,
    writing_back = 4,  // its arena range may already belong to another block, whose transfer waits for the write
};

// One block of 56 bytes: there may be millions, so small fields share a word.
struct Block {
    std::int64_t size = 0;
    std::int64_t place = nowhere;  // offset in the arena while fetching, resident or writing back
    std::int64_t copy = nowhere;   // offset of the copy in its tier; valid while the block is not dirty
    std::int64_t next_use = 0;     // key for eviction: the block with the highest key is evicted first
    std::int64_t last_use = -1;    // position on the tape of the latest access
    std::int32_t name = -1;
    std::int32_t heap_slot = -1;  // slot in the order of eviction; -1 while it may not be evicted
    std::int16_t tier = -1;       // tier of the copy below; -1 without one
    std::int8_t cls = 0;
    std::uint8_t uses = 0;  // accesses as rows of a table since it was fetched, up to 255
    State state : 3 = State::free;
    bool dirty : 1 = false;
    bool sourced : 1 = false;     // sources have parts of its clean copy
    bool hollow : 1 = false;      // placed to be overwritten; its only content is still the copy below
    bool prefetched : 1 = false;  // and not accessed since
    bool shunned : 1 = false;     // its last prefetch failed: not prefetched again before an access
    bool stuck : 1 = false;       // no tier takes its bytes: not a victim until the next access tries again
    bool moving : 1 = false;      // a transfer is under way on it
    std::int32_t pins : 22 = 0;
};
static_assert(sizeof(Block) == 56);

class BlockTable {
public:
    BlockTable();

    // Creates blocks with consecutive numbers and names, one for each size in bytes; returns the first number.
    BlockId create(std::span<const std::int64_t> sizes, int cls);
    // Frees the names of the blocks of one `create`, which the program has dropped.
    void retire(BlockId first, std::int32_t count);
    // Frees the numbers of retired blocks.
    void forget(BlockId first, std::int32_t count);
    // Number of the block that has this name now; -1 if none has.
    BlockId named(std::int64_t name) const;

    Block& operator[](BlockId block) { return blocks_[static_cast<std::size_t>(block)]; }
    const Block& operator[](BlockId block) const { return blocks_[static_cast<std::size_t>(block)]; }
    // Throws PortFailure (a ValueError in Python) unless each number of the range is in use.
    void require_used(BlockId first, std::int32_t count) const;
    // Numbers in use, in order.
    std::vector<BlockId> used() const;
    // Bytes of memory that the table holds.
    std::int64_t allocated_bytes() const { return allocated(blocks_) + allocated(named_); }

private:
    ExtentAllocator numbers_;
    ExtentAllocator names_;
    std::vector<Block> blocks_;
    std::vector<BlockId> named_;
};

}  // namespace farpool::pager
