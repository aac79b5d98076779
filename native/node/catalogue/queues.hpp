// The order in which objects are evicted: one queue for payloads in RAM and one for payloads in the lower medium.
//
// Kept objects are in no queue, and an object that moves to the lower medium is in none until it is there.
#pragma once

#include <algorithm>
#include <cstdint>
#include <new>

#include "node/catalogue/index.hpp"
#include "node/catalogue/visits.hpp"
#include "policy/marked_reuse.hpp"

namespace farpool {

class Queues {
public:
    // For the objects of an index, on a node that lends `capacity` bytes. Visits of an earlier start are not known any more.
    Queues(const Index& index, std::uint64_t capacity)
        : visits_(index.segment().header(), capacity),
          marks_(visits_.marks()),
          in_ram_(marks_, remembered(capacity)),
          in_lower_(marks_, remembered(capacity)) {
        do {
            if (!visits_.back(visits_.backed())) {
                throw std::bad_alloc();
            }
        } while (visits_.backed() < index.slots_used());
    }

    Visits& visits() noexcept { return visits_; }
    const Visits& visits() const noexcept { return visits_; }
    void visit(std::uint32_t slot) { marks_.set(slot); }
    bool was_visited(std::uint32_t slot) const { return marks_.get(slot) != 0; }

    // Enters an object. `cost_us`: what its publisher takes to compute it again; 0 if that is not known.
    void insert(std::uint32_t slot, const Index::Entry& entry, double cost_us) {
        queue_of(entry).insert(slot, {entry.hash, entry.blocks == 0 ? entry.units : entry.blocks, policy::never, cost_us});
    }
    void remove(std::uint32_t slot, const Index::Entry& entry, policy::Leaving why) {
        if (queue_of(entry).contains(slot)) {
            queue_of(entry).remove(slot, why);
        }
    }
    // The object to evict next; policy::no_slot if `in_use` is true for all.
    policy::Slot victim_in_ram(policy::InUse in_use) { return in_ram_.victim({}, in_use); }
    policy::Slot victim_in_lower(policy::InUse in_use) { return in_lower_.victim({}, in_use); }
    // True if the object was used lately or is worth more than most.
    bool would_pass(std::uint32_t slot, const Index::Entry& entry) const {
        return (entry.blocks == 0 ? in_ram_ : in_lower_).would_pass(slot);
    }
    bool has_any_in_ram() const noexcept { return in_ram_.size() > 0; }
    std::uint64_t nbytes() const noexcept { return in_ram_.nbytes() + in_lower_.nbytes(); }

private:
    // We remember one object for each 8 KiB of capacity, so that the memory for it is a hundredth of the capacity.
    static std::size_t remembered(std::uint64_t capacity) {
        return std::clamp<std::size_t>(capacity / 8192, 1024, policy::MarkedReuse::most_remembered);
    }
    policy::MarkedReuse& queue_of(const Index::Entry& entry) { return entry.blocks == 0 ? in_ram_ : in_lower_; }

    Visits visits_;
    policy::Marks marks_;
    policy::MarkedReuse in_ram_;
    policy::MarkedReuse in_lower_;
};

}  // namespace farpool
