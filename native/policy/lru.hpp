// LRU: evicts the least recently used object.
#pragma once

#include "policy/slot_list.hpp"

namespace farpool::policy {

class Lru final : public Policy {
private:
    void on_touch(Slot slot, std::int64_t) override { queue_.renew(slot); }
    void on_insert(Slot slot, const Item&) override { queue_.push(slot); }
    Slot on_victim(const Item&, const InUse& in_use) override { return queue_.oldest_free(in_use); }
    void on_remove(Slot slot, Leaving) override { queue_.remove(slot); }

    Links links_;
    SlotList queue_{links_};
};

}  // namespace farpool::policy
