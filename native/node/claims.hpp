// A session's right to an extent of a pool lease, by a ticket that the session has shown.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "node/extents.hpp"
#include "node/loop_time.hpp"
#include "wire/frame.hpp"

namespace farpool {

// The content of a ticket, for this node. Its signature and its holder were checked before.
struct Ticket {
    PoolLease lease;
    std::uint64_t epoch;
    std::uint32_t rights;                                          // rights::read, rights::write
    double seconds;                                                // until it expires
    std::vector<std::pair<std::uint32_t, std::uint64_t>> extents;  // number and bytes of each extent here
    double age = 0;                                                // seconds since it was issued
};

// The lease that a request names, or why the session may not use it so.
struct LeaseAccess {
    std::shared_ptr<Lease> lease{};
    Status status = Status::unknown;
    std::string text{};
    std::uint64_t epoch = 0;  // of the claim; 0 for a lease of the session itself
};

struct Claim {
    PoolLease lease;
    // Only the node's table and requests own the extent, because its memory is freed with its last owner.
    std::weak_ptr<Extent> claimed;
    std::uint64_t epoch;
    std::uint32_t rights;
    Clock::time_point end;

    // Null once the extent has ended.
    std::shared_ptr<Extent> present() const {
        std::shared_ptr<Extent> extent = claimed.lock();
        return extent == nullptr || extent->over ? nullptr : extent;
    }
    // `right`: what a request needs, or 0 for the claim's own state.
    LeaseAccess access(std::uint32_t right, Clock::time_point now) const {
        std::shared_ptr<Extent> extent = present();
        if (extent == nullptr) {
            return {nullptr, Status::unknown, "an order of the pool's manager has ended the extent"};
        }
        if (epoch < extent->tenure->epoch) {
            return {nullptr, Status::lapsed,
                    "the ticket has epoch " + std::to_string(epoch) + ", and the lease has epoch " +
                        std::to_string(extent->tenure->epoch) + " now; show a ticket of this epoch"};
        }
        if (now >= end) {
            const auto late = std::chrono::duration_cast<std::chrono::milliseconds>(now - end).count();
            return {nullptr, Status::lapsed,
                    "the ticket expired " + std::to_string(late) +
                        " ms ago by this node's clock; show a later ticket. The bytes are still here"};
        }
        if ((right & ~rights) != 0) {
            return {nullptr, Status::denied, "the ticket is for reading only"};
        }
        if ((right & rights::write) != 0 && extent->tenure->read_only) {
            return {nullptr, Status::lapsed, "the pool's manager has made the lease read-only"};
        }
        return {std::move(extent), Status::done, {}, epoch};
    }
};

}  // namespace farpool
