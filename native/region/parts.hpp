// What the parts of a region share. One mutex guards the state of the pages; no thread holds it during a transfer.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "region/lower.hpp"
#include "region/mapping.hpp"
#include "region/residency.hpp"
#include "region/streams.hpp"
#include "region/userfault.hpp"

namespace farpool::region {

struct Settings {
    std::string name;              // for messages
    Page most;                     // pages to which the region may grow
    Page budget;                   // pages in memory
    Page longest = 512;            // pages of the longest run
    unsigned workers = 2;          // threads for transfers
    double timeout = 60;           // seconds that an access waits for room
    std::string policy = "sieve";  // which pages leave
};

enum class Advice : std::uint8_t { normal, sequential, random };

struct Counters {
    std::uint64_t faults = 0;        // that the fault thread has answered
    std::uint64_t reused = 0;        // faults on resting pages, loaded earlier
    std::uint64_t write_faults = 0;  // first writes to protected pages
    std::uint64_t demand_pages = 0;  // loaded because a thread waits
    std::uint64_t ahead_pages = 0;   // loaded ahead
    std::uint64_t ahead_used = 0;    // of those, in runs to which the program came
    std::uint64_t ahead_wasted = 0;  // of those, evicted before
    std::uint64_t evicted_pages = 0;
    std::uint64_t read_bytes = 0;     // from lower tiers
    std::uint64_t written_bytes = 0;  // to lower tiers
    std::uint64_t waits_for_room = 0;
    std::uint64_t lost_pages = 0;
    std::uint64_t resident_pages = 0;
    std::uint64_t peak_pages = 0;
    std::uint64_t saved_pages = 0;   // written to lower tiers
    std::uint64_t backed_bytes = 0;  // by the operating system's count
};

// How the program reads the pages of a region.
class Advices {
public:
    Advice at(Page page) const { return std::prev(from_.upper_bound(page))->second; }
    void set(Page first, Page end, Advice advice) {
        const Advice after = at(end);
        from_.erase(from_.lower_bound(first), from_.upper_bound(end));
        from_[first] = advice;
        from_[end] = after;
    }

private:
    std::map<Page, Advice> from_{{0, Advice::normal}};  // from this page on
};

struct Parts {
    // Throws PortFailure if the system does not allow it.
    explicit Parts(Settings what);
    ~Parts();
    Parts(const Parts&) = delete;
    Parts& operator=(const Parts&) = delete;
    // Wakes the fault thread.
    void nudge() const noexcept;

    const Settings settings;
    Userfault userfault;
    Mapping mapping;
    Lower lower;
    const Zeros zeros;  // for the longest run
    const int nudged;   // an event descriptor that wakes the fault thread

    std::mutex mutex;
    std::condition_variable changed;  // a transfer has ended
    // The mutex guards these.
    Residency pages;
    Streams streams;
    Advices advices;
    Counters counters;
    std::atomic<bool> parks = false;  // faults wait for room
};

// Calls `use(first, count)` for each stretch of consecutive pages among sorted ones.
template <typename Use>
void for_runs(const std::vector<Page>& pages, const Use& use) {
    for (std::size_t begin = 0; begin < pages.size();) {
        std::size_t end = begin + 1;
        while (end < pages.size() && pages[end] == pages[end - 1] + 1) {
            ++end;
        }
        use(pages[begin], static_cast<Page>(end - begin));
        begin = end;
    }
}

}  // namespace farpool::region
