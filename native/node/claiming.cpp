#include "node/claiming.hpp"

#include <cerrno>
#include <set>
#include <system_error>

#include "node/refusals.hpp"

namespace farpool {

// The extents of a ticket that are here; null for each one that is missing.
std::vector<std::shared_ptr<Extent>> Claiming::present(const Quotas::Owner& owner, const Ticket& ticket) const {
    const Tenure tenure = lending_.extents().tenure(ticket.lease);
    if (ticket.epoch < tenure.epoch) {
        throw Lapsed("the ticket has epoch " + std::to_string(ticket.epoch) + ", and the lease has epoch " +
                     std::to_string(tenure.epoch) + " on this node");
    }
    std::vector<std::shared_ptr<Extent>> found;
    for (const auto& [number, nbytes] : ticket.extents) {
        const std::shared_ptr<Extent> extent = lending_.extents().find(ticket.lease, number);
        if (extent != nullptr && (Quotas::Owner{extent->tenant, extent->owner} != owner || extent->nbytes != nbytes)) {
            throw Lapsed("extent " + std::to_string(number) + " of the lease has " + std::to_string(extent->nbytes) +
                         " bytes here, for a holder of tenant " + std::to_string(extent->tenant) +
                         "; the ticket gives it another size or another holder");
        }
        found.push_back(extent);
    }
    return found;
}

Claiming::Draft Claiming::begin(std::uint64_t session, std::uint32_t tenant, Ticket ticket, Clock::time_point now) {
    const Quotas::Owner owner = sessions_.open(session, tenant);
    if (lending_.extents().tenure(ticket.lease).epoch == 0 &&
        now - seconds(ticket.age) <= lending_.extents().forgotten_until()) {
        throw Lapsed("the ticket was issued " + std::to_string(static_cast<std::int64_t>(ticket.age)) +
                     " s ago, and this node has forgotten epochs of leases since then; ask for a new ticket");
    }
    const Clock::time_point end = now + seconds(ticket.seconds);
    Draft draft{session, owner, std::move(ticket), end};
    draft.extents = present(owner, draft.ticket);
    draft.missing.resize(draft.extents.size());
    try {
        for (std::size_t at = 0; at < draft.extents.size(); ++at) {
            const std::uint64_t nbytes = draft.ticket.extents[at].second;
            if (draft.extents[at] == nullptr && !lending_.charge(owner, nbytes)) {
                throw std::system_error(ENOSPC, std::generic_category(), "lending " + std::to_string(nbytes) + " bytes");
            }
            draft.missing[at] = draft.extents[at] == nullptr;
        }
    } catch (...) {
        drop(draft);
        throw;
    }
    return draft;
}

void Claiming::make(Draft& draft, const std::function<bool(std::uint64_t)>& return_memory) const {
    for (std::size_t at = 0; at < draft.extents.size(); ++at) {
        if (draft.missing[at]) {
            const auto [number, nbytes] = draft.ticket.extents[at];
            const auto [tenant, owner] = draft.owner;
            draft.extents[at] =
                lending_.extents().make({draft.ticket.lease, number, draft.ticket.epoch, tenant, owner, nbytes}, return_memory);
        }
    }
}

std::vector<Claiming::Claimed> Claiming::finish(Draft& draft, Clock::time_point now) {
    const Ticket& ticket = draft.ticket;
    sessions_.open(draft.session, draft.owner.first);  // it may have ended while the memory was made
    const auto here = present(draft.owner, ticket);
    for (std::size_t at = 0; at < here.size(); ++at) {
        if (here[at] == nullptr && !draft.missing[at]) {
            throw Lapsed("an order has just ended extent " + std::to_string(ticket.extents[at].first) + " of the lease");
        }
    }
    std::vector<Claimed> claimed;
    std::vector<Claim> claims;
    for (std::size_t at = 0; at < here.size(); ++at) {
        const bool made = here[at] == nullptr;
        std::shared_ptr<Extent> extent = made ? draft.extents[at] : here[at];
        if (made) {
            lending_.extents().add(extent, now);
            draft.missing[at] = false;  // entered, so drop() leaves it
        } else {
            lending_.extents().advance(*extent, ticket.epoch, now);
        }
        claimed.push_back({extent->number, extent->id, extent->nbytes, made});
        claims.push_back({ticket.lease, extent, ticket.epoch, ticket.rights, draft.end});
    }
    drop(draft);  // the extents that another session has made meanwhile
    sessions_.claim(draft.session, ticket.lease, std::move(claims));
    return claimed;
}

void Claiming::drop(Draft& draft) {
    for (std::size_t at = 0; at < draft.missing.size(); ++at) {
        if (draft.missing[at]) {
            lending_.uncharge(draft.owner, draft.ticket.extents[at].second);
            if (draft.extents[at] != nullptr) {
                lending_.extents().drop(*draft.extents[at]);
            }
            draft.missing[at] = false;
        }
    }
}

std::vector<std::uint32_t> Claiming::carry_out(const Order& order, Clock::time_point now) {
    Extents& extents = lending_.extents();
    const Tenure before = extents.tenure(order.lease);
    // An order to end an extent is judged by the extent's own epoch: it may come after tickets of later epochs, which do not
    // name the extent any more.
    if (order.action != Action::end && order.epoch < before.epoch) {
        throw Lapsed("the order has epoch " + std::to_string(order.epoch) + ", and the lease has epoch " +
                     std::to_string(before.epoch) + " on this node");
    }
    std::vector<std::shared_ptr<Extent>> ending;
    for (const auto& extent : order.action == Action::end ? extents.of(order.lease) : std::vector<std::shared_ptr<Extent>>()) {
        const auto& numbers = order.numbers;
        if (!numbers.empty() && std::find(numbers.begin(), numbers.end(), extent->number) == numbers.end()) {
            continue;
        }
        if (extent->epoch >= order.epoch) {
            throw Lapsed("a ticket of epoch " + std::to_string(extent->epoch) + " names extent " +
                         std::to_string(extent->number) + ", and the order has epoch " + std::to_string(order.epoch) +
                         "; only an order of a later epoch ends the extent");
        }
        ending.push_back(extent);
    }
    // An order of the present epoch does not lift a restriction, because orders may come twice and in another order.
    const bool is_later = order.epoch > before.epoch;
    const Tenure after{std::max(order.epoch, before.epoch),
                       order.action == Action::read_only || (!is_later && before.read_only)};
    if (after != before) {
        extents.begin(order.lease, after, now);
    }
    std::vector<std::uint32_t> ended;
    for (const auto& extent : ending) {
        lending_.end(extent);
        ended.push_back(extent->number);
    }
    return ended;
}

std::vector<Claiming::Holding> Claiming::holdings(Clock::time_point now) const {
    std::vector<Holding> found;
    for (const auto& lease : lending_.all()) {
        found.push_back({lease->id, lease->nbytes, lease->session, lease->tenant,
                         sessions_.key_of({lease->tenant, lease->owner}), "", 0, 0, 0, 0, false, lease->segment.path});
    }
    std::set<std::uint64_t> claimed;
    const auto add = [&](const Extent& extent, std::uint64_t session, std::uint64_t epoch, std::uint32_t rights, double left) {
        found.push_back({extent.id, extent.nbytes, session, extent.tenant, sessions_.key_of({extent.tenant, extent.owner}),
                         extent.pool_lease.bytes(), extent.number, epoch, rights, left, extent.tenure->read_only,
                         extent.segment.path});
    };
    sessions_.each_claim([&](std::uint64_t session, const Claim& claim) {
        if (const std::shared_ptr<Extent> extent = claim.present()) {
            claimed.insert(extent->id);
            add(*extent, session, claim.epoch, claim.rights, std::chrono::duration<double>(claim.end - now).count());
        }
    });
    for (const auto& extent : lending_.extents().all()) {
        if (!claimed.contains(extent->id)) {
            add(*extent, 0, extent->epoch, 0, 0);
        }
    }
    return found;
}

std::optional<Claiming::Ended> Claiming::end(std::uint64_t lease, const std::string& reason) {
    const auto leases = lending_.all();
    const auto at = std::find_if(leases.begin(), leases.end(), [&](const auto& one) { return one->id == lease; });
    if (at != leases.end()) {
        events_.note("ended", (*at)->session,
                     "an administrator ended a lease of " + std::to_string((*at)->nbytes) + " bytes: " + reason);
        lending_.end_on_thread(*at);
        return Ended{(*at)->nbytes, 0};
    }
    const std::shared_ptr<Extent> extent = lending_.extents().find(lease);
    if (extent == nullptr) {
        return std::nullopt;
    }
    const std::size_t claims = sessions_.end_claims(lease);
    events_.note("ended", 0,
                 "an administrator ended " + std::to_string(claims) + " claims of extent " + std::to_string(extent->number) +
                     " of the lease " + extent->pool_lease.hex() + ": " + reason);
    return Ended{0, claims};
}

}  // namespace farpool
