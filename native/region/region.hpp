// Memory larger than its share of the machine's: a range of addresses whose pages are in memory while the program uses them,
// and otherwise in lower tiers.
//
// One thread answers the faults of the range. It never takes Python's interpreter lock, and it never uses memory of the range,
// because nobody would answer its own faults. Transfers with tiers that wait are made by other threads. One mutex guards the
// state of the pages; nobody holds it during a transfer. All answers to faults come from the fault thread, or from a transfer's
// end.
//
// No write is lost, by these rules. A page that is mapped for writing is dirty. Before a dirty page is saved, it is protected
// or unmapped, so that the next write is a fault, which makes it dirty again. Only pages that have rested, unmapped, and are
// neither dirty nor being saved leave memory.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <vector>

#include "region/lower.hpp"
#include "region/mapping.hpp"
#include "region/residency.hpp"
#include "region/streams.hpp"
#include "region/userfault.hpp"
#include "region/workers.hpp"

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
    std::uint64_t ahead_used = 0;    // of those, used
    std::uint64_t ahead_wasted = 0;  // of those, evicted unused
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

class Region {
public:
    // A region without pages. Throws PortFailure if the system does not allow it.
    explicit Region(Settings settings);
    ~Region();
    Region(const Region&) = delete;
    Region& operator=(const Region&) = delete;

    std::byte* data() const noexcept { return mapping_.at(0); }
    Page pages() const;
    // Pages for which there is room below.
    Page stored_pages() const { return lower_.pages(); }

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
    struct Parked {
        Fault fault;
        double since;
    };

    // ---- the fault thread ----
    void listen();
    void answer(const Fault& fault, Lock& lock);
    void serve(Page page, const Fault& fault, Lock& lock);
    void demand(Page page, const Fault& fault, Lock& lock);
    void use(Page page, const Fault& fault);
    void answer_mapped(Page page, const Fault& fault);
    void retry_parked(Lock& lock);
    void look_ahead(std::uint32_t thread, Page page, Page count);

    // ---- with the lock ----
    Page load(Page first, Page count, Job::Kind kind, const std::shared_ptr<Ticket>& ticket);
    Page make_room(Page wanted);
    void evict(Page count);
    void rest(std::vector<Page> chosen);
    void save(Page first, Page count, const std::shared_ptr<Ticket>& ticket);
    void save_dirty(const std::vector<Page>& pages, const std::shared_ptr<Ticket>& ticket);
    void retry_saves();
    void lose(Page page, const PortError& error);
    Advice advice_at(Page page) const;
    void set_advice(Page first, Page end, Advice advice);

    // ---- the workers ----
    void run(const Job& job, std::byte* staging);
    void run_load(const Job& job, std::byte* staging);
    void run_save(const Job& job, std::byte* staging);
    void nudge() const noexcept;

    const Settings settings_;
    const pid_t owner_;
    Userfault userfault_;
    Mapping mapping_;
    Lower lower_;
    const Staging zeros_;
    const Staging incoming_;  // of the fault thread
    const int nudged_;        // an event descriptor that wakes the fault thread

    std::shared_mutex size_;  // held alone by a call that changes the size, and by all others together; taken before the next
    mutable std::mutex mutex_;
    std::condition_variable changed_;  // a transfer has ended
    Residency pages_;
    Streams streams_;
    std::map<Page, Advice> advices_;    // from this page on
    std::vector<Parked> parked_;        // faults that wait for room
    std::vector<Run> failed_;           // pages whose last save has failed
    std::optional<PortError> failing_;  // why saves fail at the moment
    std::atomic<bool> parks_ = false;   // there are parked faults
    double next_retry_ = 0;             // of the fault thread alone
    Counters counters_;

    std::atomic<bool> closing_ = false;
    std::optional<Workers> workers_;
    std::thread listener_;
};

}  // namespace farpool::region
