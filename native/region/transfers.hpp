// Pages on their way between memory and the lower tiers, and the room that they need.
//
// No write is lost, by these rules. A page that is mapped for writing is dirty. Before a dirty page is saved, it is protected
// or unmapped, so that the next write is a fault, which makes it dirty again. Only pages leave memory that are protected or
// unmapped, and neither dirty nor being saved. The mutex is held from the check until the page has left.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "region/parts.hpp"
#include "region/workers.hpp"

namespace farpool::region {

class Transfers {
public:
    explicit Transfers(Parts& parts);

    // Ends the threads. Idempotent.
    void close() noexcept { workers_.close(); }

    // The caller of the calls below holds the mutex.

    // Begins to load a page for which a thread waits, and for which there is room.
    void demand(Page page, bool write);
    // Begins to load absent pages from `first` on, as far as they have the same source and there is room; the number of pages.
    Page load(Page first, Page count, Job::Kind kind, const std::shared_ptr<Ticket>& ticket);
    // Makes room for at most `wanted` pages without waiting; the number of pages for which there is room. `urgent`: pages that
    // were loaded ahead may leave for it.
    Page make_room(Page wanted, bool urgent);
    // Unmaps pages that have just begun to rest, and saves the dirty ones.
    void rest(std::vector<Page> chosen);
    // Saves pages that are sorted, dirty and not being saved.
    void save(const std::vector<Page>& pages, const std::shared_ptr<Ticket>& ticket);
    // Saves pages again whose last save has failed. Each tier that refused pages is tried.
    void retry_saves();
    // Why pages do not leave memory at the moment: a tier that refuses them, if there is one.
    PortError stuck() const;
    // Why saves of a page fail at the moment, if they do.
    const PortError* failing(Page page) const;
    // Answers accesses to a page that cannot come with SIGBUS, and says why on stderr.
    void lose(Page page, const PortError& error);

private:
    void evict(Page count, bool urgent);
    void save_run(Page first, Page count, const std::shared_ptr<Ticket>& ticket);
    // The bytes of pages that are to be loaded: in `staging`, or where they are already.
    const std::byte* fetch(const Job& job, std::byte* staging) const;
    // Brings the bytes into memory.
    void show(const Job& job, const std::byte* bytes) const;
    void end_load(const Job& job, const std::optional<PortError>& error);
    void run_load(const Job& job, std::byte* staging);
    void run_save(const Job& job, std::byte* staging);

    Parts& parts_;
    std::map<const Port*, PortError> failing_;  // the tiers that refused the last save
    Workers workers_;
};

}  // namespace farpool::region
