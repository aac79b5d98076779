// The order in which objects are evicted: one queue for payloads in RAM and one for payloads in the lower medium.
//
// Each of the two has a queue for every priority of the objects. A queue for a priority above 0 is made with its first object.
// Kept objects are in no queue, and an object that moves to the lower medium is in none until it is there.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <new>

#include "node/catalogue/index.hpp"
#include "node/catalogue/retention.hpp"
#include "node/catalogue/visits.hpp"
#include "policy/marked_reuse.hpp"

namespace farpool {

class Queues {
public:
    // For the objects of an index, on a node that lends `capacity` bytes. Visits of an earlier start are not known any more.
    Queues(const Index& index, std::uint64_t capacity)
        : visits_(index.segment().header(), capacity),
          marks_(visits_.marks()),
          remembered_(remembered(capacity)),
          in_ram_(marks_, remembered_),
          in_lower_(marks_, remembered_) {
        do {
            if (!visits_.back(visits_.backed())) {
                throw std::bad_alloc();
            }
        } while (visits_.backed() < index.slots_used());
    }

    Visits& visits() noexcept { return visits_; }
    const Visits& visits() const noexcept { return visits_; }
    Retention& retention() noexcept { return retention_; }
    const Retention& retention() const noexcept { return retention_; }
    void visit(std::uint32_t slot) { marks_.set(slot); }
    bool was_visited(std::uint32_t slot) const { return marks_.get(slot) != 0; }

    // Enters an object with its present priority. `cost_us`: what its publisher takes to compute it again; 0 if that is not
    // known.
    void insert(std::uint32_t slot, const Index::Entry& entry, double cost_us) {
        ByPriority& queues = of_medium(entry);
        const std::uint8_t priority = retention_.priority(slot);
        if (priority > 0 && queues.retained[priority - 1] == nullptr) {
            queues.retained[priority - 1] =
                std::make_unique<policy::MarkedReuse>(marks_, remembered_ / Retention::priority_max);
        }
        queues.of(priority)->insert(slot, {entry.hash, entry.blocks == 0 ? entry.units : entry.blocks, policy::never, cost_us});
    }
    void remove(std::uint32_t slot, const Index::Entry& entry, policy::Leaving why) {
        policy::MarkedReuse* const queue = of_medium(entry).of(retention_.priority(slot));
        if (queue != nullptr && queue->contains(slot)) {
            queue->remove(slot, why);
        }
    }
    // The object to evict next, one of the lowest priority that has any; policy::no_slot if `in_use` is true for all.
    policy::Slot victim_in_ram(policy::InUse in_use) { return in_ram_.victim(in_use); }
    policy::Slot victim_in_lower(policy::InUse in_use) { return in_lower_.victim(in_use); }
    // True if the object was used lately or is worth more than most of its priority.
    bool would_pass(std::uint32_t slot, const Index::Entry& entry) const {
        const policy::MarkedReuse* const queue = of_medium(entry).of(retention_.priority(slot));
        return queue == nullptr || !queue->contains(slot) || queue->would_pass(slot);
    }
    bool has_any_in_ram() const noexcept { return in_ram_.size() > 0; }
    std::uint64_t nbytes() const noexcept { return in_ram_.nbytes() + in_lower_.nbytes() + retention_.nbytes(); }

private:
    struct ByPriority {
        ByPriority(const policy::Marks& marks, std::size_t remembered) : ordinary(marks, remembered) {}

        // Null if no object of this priority has ever been there.
        policy::MarkedReuse* of(std::uint8_t priority) { return priority == 0 ? &ordinary : retained[priority - 1].get(); }
        const policy::MarkedReuse* of(std::uint8_t priority) const {
            return priority == 0 ? &ordinary : retained[priority - 1].get();
        }
        policy::Slot victim(policy::InUse in_use) {
            policy::Slot found = ordinary.victim({}, in_use);
            for (std::size_t at = 0; found == policy::no_slot && at < retained.size(); ++at) {
                found = retained[at] == nullptr ? policy::no_slot : retained[at]->victim({}, in_use);
            }
            return found;
        }
        std::size_t size() const noexcept {
            std::size_t sum = ordinary.size();
            for (const auto& queue : retained) {
                sum += queue == nullptr ? 0 : queue->size();
            }
            return sum;
        }
        std::uint64_t nbytes() const noexcept {
            std::uint64_t sum = ordinary.nbytes();
            for (const auto& queue : retained) {
                sum += queue == nullptr ? 0 : queue->nbytes();
            }
            return sum;
        }

        policy::MarkedReuse ordinary;
        std::array<std::unique_ptr<policy::MarkedReuse>, Retention::priority_max> retained;  // from priority 1 on
    };

    // We remember one object for each 8 KiB of capacity, so that the memory for it is a hundredth of the capacity.
    static std::size_t remembered(std::uint64_t capacity) {
        return std::clamp<std::size_t>(capacity / 8192, 1024, policy::MarkedReuse::most_remembered);
    }
    ByPriority& of_medium(const Index::Entry& entry) { return entry.blocks == 0 ? in_ram_ : in_lower_; }
    const ByPriority& of_medium(const Index::Entry& entry) const { return entry.blocks == 0 ? in_ram_ : in_lower_; }

    Visits visits_;
    policy::Marks marks_;
    const std::size_t remembered_;
    Retention retention_;
    ByPriority in_ram_;
    ByPriority in_lower_;
};

}  // namespace farpool
