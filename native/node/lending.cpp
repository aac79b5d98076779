#include "node/lending.hpp"

#include <cerrno>
#include <system_error>

#include "node/refusals.hpp"

namespace farpool {

Lending::Lending(std::string folder, bool ephemeral, Budget& budget, Quotas& quotas, Events& events)
    : folder_(std::move(folder)),
      ephemeral_(ephemeral),
      leases_(folder_, ephemeral),
      extents_(folder_, ephemeral),
      budget_(budget),
      quotas_(quotas),
      events_(events) {}

std::vector<std::shared_ptr<Lease>> Lending::adopt() {
    std::vector<std::string> notes;
    leases_.adopt(notes);
    extents_.adopt(Clock::now(), since_1970(), notes);
    for (std::string& text : notes) {
        events_.note("removed", 0, std::move(text));
    }
    remove_files();
    const auto adopted = leases_.all();
    for (const auto& lease : adopted) {
        lent_ += lease->nbytes;
        budget_.lend(lease->tenant, lease->nbytes);
        quotas_.lend({lease->tenant, lease->owner}, lease->nbytes);
    }
    for (const auto& extent : extents_.all()) {
        lent_ += extent->nbytes;
        budget_.lend(extent->tenant, extent->nbytes);
        quotas_.lend({extent->tenant, extent->owner}, extent->nbytes);
    }
    return adopted;
}

bool Lending::charge(std::uint64_t session, const Quotas::Owner& owner, std::uint64_t nbytes) {
    const std::uint32_t tenant = owner.first;
    if (nbytes > budget_.limit()) {
        return false;
    }
    if (const std::string refusal = quotas_.lease_refusal(owner, leases_.of(session).size(), nbytes); !refusal.empty()) {
        throw Busy(refusal);
    }
    if (!budget_.may_fix(tenant, nbytes)) {
        throw Busy("the tenant's objects and leases that cannot be evicted would be more than its share of " +
                   std::to_string(budget_.share_of_fixed(tenant)) + " bytes");
    }
    return take(owner, nbytes, false);
}

bool Lending::charge(const Quotas::Owner& owner, std::uint64_t nbytes) {
    if (nbytes > budget_.limit()) {
        return false;
    }
    if (const std::string refusal = quotas_.lease_refusal(owner, 0, nbytes); !refusal.empty()) {
        throw Busy(refusal);
    }
    return take(owner, nbytes, true);
}

bool Lending::take(const Quotas::Owner& owner, std::uint64_t nbytes, bool granted) {
    const std::uint32_t tenant = owner.first;
    if (!budget_.can_be_backed(tenant, segment_header_nbytes + nbytes)) {
        throw std::system_error(ENOSPC, std::generic_category(), folder_);
    }
    if (!budget_.make_room(tenant, nbytes, granted) || !budget_.make_backing_room(tenant, nbytes)) {
        return false;
    }
    lent_ += nbytes;
    quotas_.lend(owner, nbytes);
    budget_.lend(tenant, nbytes);
    return true;
}

void Lending::uncharge(const Quotas::Owner& owner, std::uint64_t nbytes) {
    lent_ -= nbytes;
    quotas_.take_back(owner, nbytes);
    budget_.take_back(owner.first, nbytes);
}

std::shared_ptr<Lease> Lending::make(std::uint64_t session, const Quotas::Owner& owner, std::uint64_t nbytes,
                                     const std::function<bool(std::uint64_t)>& return_memory) const {
    return leases_.make(session, owner.first, owner.second, nbytes, return_memory);
}

std::shared_ptr<Lease> Lending::find(std::uint64_t session, const Quotas::Owner& owner, std::uint64_t lease) const {
    return leases_.find(session, owner.first, owner.second, lease);
}

void Lending::end(Lease& lease) {
    uncharge({lease.tenant, lease.owner}, lease.nbytes);
    leases_.remove(lease);
}

void Lending::end_on_thread(const std::shared_ptr<Lease>& lease) {
    end(*lease);
    freeing_->release(lease);
}

void Lending::end(const std::shared_ptr<Extent>& extent) {
    extents_.remove(*extent, Clock::now());
    uncharge({extent->tenant, extent->owner}, extent->nbytes);
    freeing_->release(extent);
}

std::size_t Lending::end_all(std::uint64_t session) {
    auto leases = leases_.of(session);
    for (auto& lease : leases) {
        end(*lease);
        freeing_->release(std::move(lease));
    }
    return leases.size();
}

void Lending::check() {
    for (auto& lease : leases_.all()) {
        if (!lease->is_as_lent()) {
            events_.note("taken_back", lease->session,
                         "the file of a lease of " + std::to_string(lease->nbytes) +
                             " bytes was made longer or cut off, so the lease has ended");
            end(*lease);
            freeing_->release(std::move(lease));
        }
    }
    for (const auto& extent : extents_.all()) {
        if (!extent->is_as_lent()) {
            events_.note("taken_back", 0,
                         "the file of an extent of the lease " + extent->pool_lease.hex() +
                             " was made longer or cut off, so the extent has ended");
            end(extent);
        }
    }
}

void Lending::remove_files() {
    if (ephemeral_) {
        for (const auto& lease : leases_.all()) {
            leases_.remove(*lease);
        }
        for (const auto& extent : extents_.all()) {
            extents_.remove(*extent, Clock::now());
        }
    }
}

}  // namespace farpool
