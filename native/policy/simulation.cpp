#include "policy/simulation.hpp"

#include <algorithm>

namespace farpool::policy {

void Simulation::run(const Trace& trace, std::size_t first, std::size_t last) {
    last = std::min(last, trace.size());
    for (std::size_t at = first; at < last; ++at) {
        const Item item{trace.ids[at], trace.sizes[at], trace.next_uses[at], 1.0};
        ++counts_.requests;
        counts_.bytes += item.size;
        const Slot slot = slots_.find(item.key);
        if (slot != IdMap::none) {
            policy_->touch(slot, item.next_use);
            continue;
        }
        ++counts_.misses;
        counts_.bytes_missed += item.size;
        if (item.size <= capacity_) {
            bring_in(item);
        }
    }
}

void Simulation::bring_in(const Item& item) {
    while (used_ + item.size > capacity_) {
        const Slot victim = policy_->victim(item);
        policy_->remove(victim, Leaving::evicted);
        slots_.erase(objects_[victim].key);
        used_ -= objects_[victim].size;
        free_.push_back(victim);
    }
    Slot slot = static_cast<Slot>(objects_.size());
    if (free_.empty()) {
        objects_.push_back({item.key, item.size});
    } else {
        slot = free_.back();
        free_.pop_back();
        objects_[slot] = {item.key, item.size};
    }
    slots_.insert(item.key, slot);
    used_ += item.size;
    policy_->insert(slot, item);
}

}  // namespace farpool::policy
