// Claims of extents by tickets, and the orders that alone end extents.
//
// It reads no clock and takes no lock: its caller does both. Making memory takes long, so a claim has three steps: begin() and
// finish() with the node's lock, and make() between them without it.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "node/claims.hpp"
#include "node/events.hpp"
#include "node/lending.hpp"
#include "node/sessions.hpp"

namespace farpool {

class Claiming {
public:
    // A claim that is under way. Its extents are in the order of the ticket.
    struct Draft {
        std::uint64_t session;
        Quotas::Owner owner;
        Ticket ticket;
        Clock::time_point end;  // of the ticket
        std::vector<std::shared_ptr<Extent>> extents{};
        std::vector<bool> missing{};  // extents that are made for this claim, and charged
        bool makes_extents() const { return std::find(missing.begin(), missing.end(), true) != missing.end(); }
    };
    // An extent that a session may use now.
    struct Claimed {
        std::uint32_t number;  // in the pool lease
        std::uint64_t lease;   // at this node
        std::uint64_t nbytes;
        bool made;  // by this claim, so it is zero
    };
    enum class Action { end, raise, read_only };
    // A signed order of the pool's manager. `numbers`: the extents to end; if empty, all of the lease.
    struct Order {
        PoolLease lease;
        std::uint64_t epoch;
        Action action;
        std::vector<std::uint32_t> numbers;
    };
    // A lease of a session, or an extent with one claim of it or without any.
    struct Holding {
        std::uint64_t lease, nbytes, session;  // session 0: an extent that no session has claimed
        std::uint32_t tenant;
        std::string key;
        std::string pool_lease;  // 16 bytes; empty for a lease of the session itself
        std::uint32_t number;
        std::uint64_t epoch;
        std::uint32_t rights;
        double seconds;  // until the claim's ticket expires
        bool read_only;
        std::string path;
    };
    // Bytes that were freed, and claims that were ended.
    struct Ended {
        std::uint64_t nbytes;
        std::size_t claims;
    };

    Claiming(Lending& lending, Sessions& sessions, Events& events) : lending_(lending), sessions_(sessions), events_(events) {}

    // Checks the ticket against the extents that are here, and charges the missing ones. Throws Lapsed, Busy, Denied, and
    // std::system_error if there is too little memory; then nothing is charged.
    Draft begin(std::uint64_t session, std::uint32_t tenant, Ticket ticket, Clock::time_point now);
    // Makes the missing extents. Throws std::system_error; the caller then calls drop().
    void make(Draft& draft, const std::function<bool(std::uint64_t)>& return_memory) const;
    // Enters the extents and the session's claims, which replace the former ones of the lease. Throws as begin() does, because
    // an order or another claim may have come; the caller then calls drop().
    std::vector<Claimed> finish(Draft& draft, Clock::time_point now);
    // Gives up the extents that were charged and not entered.
    void drop(Draft& draft);

    // Carries out an order; returns the numbers of the extents that it has ended. Throws Lapsed; then nothing has changed.
    std::vector<std::uint32_t> carry_out(const Order& order, Clock::time_point now);

    // All leases and extents, for an administrator.
    std::vector<Holding> holdings(Clock::time_point now) const;
    // Ends a lease of any session, or all claims of an extent, which itself stays. Empty if there is no such lease.
    std::optional<Ended> end(std::uint64_t lease, const std::string& reason);

private:
    std::vector<std::shared_ptr<Extent>> present(const Quotas::Owner& owner, const Ticket& ticket) const;

    Lending& lending_;
    Sessions& sessions_;
    Events& events_;
};

}  // namespace farpool
