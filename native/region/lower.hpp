// Where the pages of a region are stored below: extents of tiers, in the order of the region's pages.
#pragma once

#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <string>
#include <vector>

#include "core/port.hpp"
#include "region/mapping.hpp"

namespace farpool::region {

// Room for `count` pages in a tier, from `offset` of its port on.
struct Extent {
    Port* port;
    std::uint64_t offset;
    Page count;
    std::string tier;
    bool checked;  // keep a checksum of each page and compare it, because the bytes leave the process
};

class Lower {
public:
    // Adds room for the pages that follow the last ones.
    void append(Extent extent);
    // Drops all extents that begin at this page or later.
    void cut(Page end);
    Page pages() const noexcept;

    // Number of pages from `first` on, at most `count`, that one call can move.
    Page together(Page first, Page count) const;
    // True if moving pages is only a copy in memory.
    bool copies(Page page) const;
    std::string tier(Page page) const;
    const Port* port(Page page) const;

    // Where the bytes of pages of one extent are in this process, if nothing but a copy of them is needed; otherwise null.
    std::byte* address(Page first, Page count) const;

    // Moves pages of one extent. Blocks, and throws PortFailure. Reading compares checksums.
    void read(Page first, Page count, std::byte* into) const;
    void write(Page first, Page count, const std::byte* from);

private:
    struct Stored {
        Page first;
        Extent extent;
        std::vector<std::uint32_t> sums;  // of its pages, if they are checked
    };
    Stored& of(Page page) const;

    // Pages that move keep their extent, so transfers need the lock only to find it.
    mutable std::shared_mutex mutex_;
    std::vector<std::unique_ptr<Stored>> stored_;
};

}  // namespace farpool::region
