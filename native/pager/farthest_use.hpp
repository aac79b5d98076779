// Belady's order over known next uses: the victim is the block that is used farthest in the future, the lower number among
// equals. A binary heap whose slots the blocks know, so that it takes 16 bytes a block and allocates nothing.
#pragma once

#include <vector>

#include "pager/block_table.hpp"

namespace farpool::pager {

class FarthestUse {
public:
    explicit FarthestUse(BlockTable& blocks) : blocks_(blocks) {}

    // Inserts the block with its present `next_use`, or moves it to its new slot.
    void insert(BlockId block);
    void remove(BlockId block);
    bool contains(BlockId block) const { return blocks_[block].heap_slot >= 0; }
    // The block to evict next, and its next use; -1 if there is none.
    BlockId victim() const { return heap_.empty() ? -1 : heap_.front().block; }
    std::int64_t victim_next_use() const { return heap_.empty() ? -1 : heap_.front().next_use; }
    // Bytes of memory that the order holds.
    std::int64_t allocated_bytes() const { return allocated(heap_); }

private:
    struct Entry {
        std::int64_t next_use;
        BlockId block;
        bool before(const Entry& other) const {
            return next_use != other.next_use ? next_use > other.next_use : block < other.block;
        }
    };

    void put(std::size_t slot, Entry entry);
    void rise(std::size_t slot, Entry entry);
    void sink(std::size_t slot, Entry entry);

    BlockTable& blocks_;
    std::vector<Entry> heap_;
};

}  // namespace farpool::pager
