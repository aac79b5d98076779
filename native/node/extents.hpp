// Extents of pool leases: private memory that a node lends by tickets of the pool's manager.
//
// Like a session's lease, an extent is a new file, and so it is zero when it is lent. Unlike a session's lease, it belongs to
// no session: it stays until an order of the manager ends it. Its terms are in the name of its file, so that it survives the
// node.
//
// An epoch numbers the agreements about one pool lease. The node keeps the highest epoch that a ticket or an order had, and
// refuses tickets of earlier epochs. This epoch is in the names of the lease's extents. An order writes it into the name of an
// empty file, too (the fence), because an order may end the last extent while tickets of earlier epochs are still valid.
#pragma once

#include <chrono>
#include <compare>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "node/leases.hpp"
#include "node/loop_time.hpp"

namespace farpool {

// Identity of a lease of the pool: 16 bytes.
struct PoolLease {
    std::uint64_t high = 0, low = 0;
    auto operator<=>(const PoolLease&) const = default;

    // Throws std::invalid_argument unless `bytes` has 16 of them.
    static PoolLease from(std::string_view bytes);
    std::string bytes() const;
    std::string hex() const;  // 32 digits
};

// The present agreement about a pool lease, as far as the node knows it.
struct Tenure {
    std::uint64_t epoch = 0;
    bool read_only = false;
    auto operator<=>(const Tenure&) const = default;
};

struct ExtentTerms {
    PoolLease lease;
    std::uint32_t number;  // of the extent in the lease
    std::uint64_t epoch;   // the highest epoch of a ticket that names the extent
    std::uint32_t tenant;
    std::uint64_t owner;  // stands for the access key that has the lease
    std::uint64_t nbytes;
};

// The terms of the node's lease have no session.
struct Extent : Lease {
    Extent(const ExtentTerms& terms, std::uint64_t id, Segment segment)
        : Lease({id, 0, terms.tenant, terms.owner, terms.nbytes}, std::move(segment)),
          pool_lease(terms.lease),
          number(terms.number),
          epoch(terms.epoch) {}

    ExtentTerms terms() const { return {pool_lease, number, epoch, tenant, owner, nbytes}; }

    PoolLease pool_lease;
    std::uint32_t number;
    std::uint64_t epoch;
    std::shared_ptr<const Tenure> tenure{};  // of its pool lease; shared by all extents of it
};

class Extents {
public:
    // A ticket is valid for at most a day. The node keeps the epoch of a lease without extents for twice as long. If it has
    // more of them than this, because a tenant makes and ends leases all the time, it forgets the oldest earlier.
    static constexpr auto fence_kept = std::chrono::hours(48);
    static constexpr std::size_t default_fences_max = 100'000;
    static constexpr auto fence_kept_least = std::chrono::minutes(5);
    // Tickets of earlier epochs may be issued for so long after a fence was made: managers' clocks differ.
    static constexpr auto fence_margin = std::chrono::minutes(1);
    static constexpr std::size_t forgotten_at_once = 4096;

    // `nameless`: extents and epochs end with the node.
    Extents(std::string folder, bool nameless, std::size_t fences_max = default_fences_max)
        : folder_(std::move(folder)), nameless_(nameless), fences_max_(fences_max) {}

    // Adopts the extents and epochs of an earlier start. Adds a line to `notes` for each damaged file, which it removes.
    void adopt(Clock::time_point now, std::chrono::milliseconds wall, std::vector<std::string>& notes);
    // Makes an extent that is not in the table yet; see Leases::make. add() enters it, and drop() removes it.
    std::shared_ptr<Extent> make(const ExtentTerms& terms, const std::function<bool(std::uint64_t)>& return_memory) const;
    void add(std::shared_ptr<Extent> extent, Clock::time_point now);
    void drop(Extent& extent) const;

    // The extent with this number of a pool lease, or with this number at the node; null if there is none.
    std::shared_ptr<Extent> find(const PoolLease& lease, std::uint32_t number) const;
    std::shared_ptr<Extent> find(std::uint64_t id) const;
    std::vector<std::shared_ptr<Extent>> of(const PoolLease& lease) const;
    std::vector<std::shared_ptr<Extent>> all() const;
    Tenure tenure(const PoolLease& lease) const;

    // Notes that a ticket of this epoch names the extent. The lease's tenure follows.
    void advance(Extent& extent, std::uint64_t epoch, Clock::time_point now);
    // Begins a later tenure of a lease by an order.
    void begin(const PoolLease& lease, const Tenure& tenure, Clock::time_point now);
    // Removes an extent. The lease's tenure stays.
    void remove(Extent& extent, Clock::time_point now);
    // Forgets tenures of leases that have had no extents for so long that no ticket of them is valid any more, and the oldest
    // of too many. `wall`: the same time as `now`, since 1970.
    void forget(Clock::time_point now, std::chrono::milliseconds wall);
    // Tickets for leases without a tenure that were issued until then may be of an epoch that was forgotten.
    Clock::time_point forgotten_until() const noexcept { return forgotten_until_; }
    std::size_t tenures() const noexcept { return tenures_.size(); }

private:
    struct Known {
        std::shared_ptr<Tenure> tenure;
        Tenure fence{};             // as in the name of its file; of epoch 0 if there is none
        Clock::time_point since{};  // of the last change
    };

    std::string fence_path(const PoolLease& lease, const Tenure& tenure) const;
    Known& known(const PoolLease& lease, Clock::time_point now);
    bool has_extents(const PoolLease& lease) const;
    // Notes a change of a lease's tenure.
    void touch(const PoolLease& lease, Known& known, Clock::time_point now);
    void write_forgotten(std::chrono::milliseconds until);
    void write_fence(const PoolLease& lease, Known& known, const Tenure& tenure) const;
    void enter(std::shared_ptr<Extent> extent, Clock::time_point now);
    void adopt_fence(const std::string& name, Clock::time_point now);
    void adopt_forgotten(const std::string& name, Clock::time_point now, std::chrono::milliseconds wall);
    void adopt_extent(const std::string& name, Clock::time_point now, std::vector<std::string>& notes);

    std::string folder_;
    bool nameless_;
    std::size_t fences_max_;
    std::map<std::pair<PoolLease, std::uint32_t>, std::shared_ptr<Extent>> extents_;
    std::map<std::uint64_t, std::shared_ptr<Extent>> by_id_;
    std::map<PoolLease, Known> tenures_;
    std::set<std::pair<Clock::time_point, PoolLease>> idle_;  // tenures of leases without extents, by their last change
    Clock::time_point forgotten_until_ = Clock::time_point::min();
    std::string forgotten_path_;
};

}  // namespace farpool
