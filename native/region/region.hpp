// Memory larger than its share of the machine's: a range of addresses whose pages are in memory while the program uses them,
// and otherwise in lower tiers.
#pragma once

#include <sys/types.h>

#include <shared_mutex>
#include <vector>

#include "region/fault_thread.hpp"
#include "region/parts.hpp"
#include "region/transfers.hpp"

namespace farpool::region {

class Region {
public:
    // A region without pages. Throws PortFailure if the system does not allow it.
    explicit Region(Settings settings);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    std::byte* data() const noexcept { return parts_.mapping.at(0); }
    Page pages() const;

    // Grows to `pages`. `extents` are added to the room below, which must then be enough.
    void grow(Page pages, std::vector<Extent> extents);
    // Shrinks to `pages`. No thread may use the pages beyond. Returns the number of pages for which there is still room below.
    Page shrink(Page pages);

    // The calls below take `count` pages from `first` on.

    // Returns when all bytes written before the call are below. Throws the error of a tier.
    void sync(Page first, Page count);
    void advise(Page first, Page count, Advice advice);
    // Begins to load pages, as far as there is room without waiting.
    void will_need(Page first, Page count);
    // Lets pages leave memory, the dirty ones after they are saved.
    void dont_need(Page first, Page count);
    // Loads pages and keeps them in memory. False, with nothing changed, if more than half of the budget would be pinned.
    bool pin(Page first, Page count);
    void unpin(Page first, Page count);

    Counters counters() const;
    // Ends all threads. No thread of the program may use the memory any more.
    void close() noexcept;
    // True in the process that made it.
    bool ours() const noexcept;

private:
    using Lock = std::unique_lock<std::mutex>;

    const pid_t owner_;
    std::shared_mutex size_;  // held alone by a call that changes the size, by others together; taken before the other mutex
    mutable Parts parts_;
    Transfers transfers_;
    FaultThread faults_;
};

}  // namespace farpool::region
