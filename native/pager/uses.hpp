// Uses: the byte ranges that one operation touches, turned into runs of blocks, and where each lies in its run.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "messages.hpp"

namespace farpool::pager {

// Where a storage lies in its blocks. Small storages are packed anew when they are first used, so it changes.
struct Layout {
    BlockId first = -1;
    std::int32_t count = 0;
    std::int64_t offset = 0;       // where it begins in its block; 0 unless it shares one
    std::int64_t block_bytes = 0;  // of each of its blocks but the last; of the block if it shares one
    std::int64_t nbytes = 0;       // of the storage
    bool shared = false;           // whether it shares its block with other storages
    bool loose = false;            // whether it is still to be packed with what is used next to it
};

// Bytes [start, stop) of a storage, and what is done with them.
struct Use {
    std::shared_ptr<const Layout> storage;
    std::int64_t start;
    std::int64_t stop;
    Mode mode;

    bool empty() const noexcept { return stop <= start; }
};

// A run of blocks, and where in it something begins, in bytes.
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
