// Uses: the byte ranges that one operation touches, and their conversion to runs of blocks.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "pager/messages.hpp"

namespace farpool::pager {

// Place of a storage in its blocks. It changes, because small storages are packed again when they are first used.
struct Layout {
    BlockId first = -1;
    std::int32_t count = 0;
    std::int64_t offset = 0;       // of the storage in its block, in bytes; 0 unless it shares one
    std::int64_t block_bytes = 0;  // of each of its blocks but the last; of the block if it shares one
    std::int64_t nbytes = 0;       // of the storage
    bool shared = false;           // true if it shares its block with other storages
    bool loose = false;            // true if it is still to be packed with storages used next to it
};

// Bytes [start, stop) of a storage, and if they are read or written.
struct Use {
    std::shared_ptr<const Layout> storage;
    std::int64_t start;
    std::int64_t stop;
    Mode mode;

    bool empty() const noexcept { return stop <= start; }
};

// A run of blocks, and the offset in it, in bytes, at which a use begins.
struct Span {
    Run run;
    std::int64_t offset;
};

// The blocks that cover a use that is not empty; as rows of the table that begins with block `table`, if it is not -1.
Span cover(const Use& use, BlockId table = -1);

struct Placed {
    std::int32_t run;  // index of the run; -1 for an empty use
    std::int64_t offset;
};

struct Runs {
    std::vector<Run> runs;
    std::vector<Placed> places;  // of each use
};

// Runs of blocks that cover the uses. Uses that share blocks share a run, so that aliases stay aliases. `rows`: the uses are
// rows picked by data.
Runs runs_of(std::span<const Use> uses, bool rows);

}  // namespace farpool::pager
