// The leases of a node: what they cost its budget and its quotas, and how they end.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "node/budget.hpp"
#include "node/events.hpp"
#include "node/extents.hpp"
#include "node/freeing.hpp"
#include "node/leases.hpp"
#include "node/quotas.hpp"

namespace farpool {

class Lending {
public:
    Lending(std::string folder, bool ephemeral, Budget& budget, Quotas& quotas, Events& events);

    // Adopts the leases and extents of an earlier start, and returns the leases. An ephemeral node ends them.
    std::vector<std::shared_ptr<Lease>> adopt();
    // Charges a lease that is to be made. False if there is no room. Throws Busy, and std::system_error if the system has too
    // little memory.
    bool charge(std::uint64_t session, const Quotas::Owner& owner, std::uint64_t nbytes);
    // Charges an extent that is to be made, in the same way. A manager has granted it within the limits that the tenant has in
    // the whole pool, so it may be more than the tenant's part of this node; only the shares of other tenants are kept.
    bool charge(const Quotas::Owner& owner, std::uint64_t nbytes);
    void uncharge(const Quotas::Owner& owner, std::uint64_t nbytes);
    // Makes a charged lease and backs it with memory, which takes long. Changes no state, so the node can serve others until
    // it is done. `return_memory`: as in Leases. Throws std::system_error.
    std::shared_ptr<Lease> make(std::uint64_t session, const Quotas::Owner& owner, std::uint64_t nbytes,
                                const std::function<bool(std::uint64_t)>& return_memory) const;
    void add(std::shared_ptr<Lease> lease) { leases_.add(std::move(lease)); }
    // The session's lease with this id; null if there is none.
    std::shared_ptr<Lease> find(std::uint64_t session, const Quotas::Owner& owner, std::uint64_t lease) const;
    std::vector<std::shared_ptr<Lease>> of(std::uint64_t session) const { return leases_.of(session); }
    std::vector<std::shared_ptr<Lease>> all() const { return leases_.all(); }
    std::uint64_t lent() const noexcept { return lent_; }
    const Extents& extents() const noexcept { return extents_; }
    Extents& extents() noexcept { return extents_; }
    // Ends an extent, and frees its memory on a thread.
    void end(const std::shared_ptr<Extent>& extent);

    // Ends a lease. Its memory is freed with its last user: for gigabytes that takes seconds.
    void end(Lease& lease);
    // Gives up a share in a lease, or null. If the lease has ended, its memory is freed on a thread.
    void give_back(std::shared_ptr<Lease> lease) const {
        if (lease != nullptr && lease->over) {
            freeing_->release(std::move(lease));
        }
    }
    void end_on_thread(const std::shared_ptr<Lease>& lease);
    // Ends all leases of a session, and frees their memory on a thread; returns how many there were.
    std::size_t end_all(std::uint64_t session);
    // Ends leases and extents whose files were extended or truncated: a program may write them.
    void check();
    // Waits until all memory is freed.
    void finish() { freeing_->finish(); }
    // Removes all leases of an ephemeral node.
    void remove_files();
    // Lets the thread that frees memory alone, in a child forked from the process that has it.
    void abandon() { static_cast<void>(freeing_.release()); }

private:
    bool take(const Quotas::Owner& owner, std::uint64_t nbytes, bool granted);

    std::string folder_;
    bool ephemeral_;
    Leases leases_;
    Extents extents_;
    std::unique_ptr<Freeing> freeing_ = std::make_unique<Freeing>();
    std::uint64_t lent_ = 0;
    Budget& budget_;
    Quotas& quotas_;
    Events& events_;
};

}  // namespace farpool
