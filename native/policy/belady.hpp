// Belady's MIN ("A study of replacement algorithms for a virtual-storage computer", 1966): evicts the object used farthest in
// the future. Offline: the caller must know all next uses. Optimal if all objects have one size; otherwise a reference to
// compare with.
#pragma once

#include "policy/slot_heap.hpp"

namespace farpool::policy {

class Belady final : public Policy {
private:
    struct Rank {
        std::int64_t next_use;
        Slot slot;  // the lowest among equals
        bool operator<(const Rank& other) const {
            return next_use != other.next_use ? next_use > other.next_use : slot < other.slot;
        }
    };

    void on_touch(Slot slot, std::int64_t next_use) override { order_.change(slot, {next_use, slot}); }
    void on_insert(Slot slot, const Item& item) override { order_.push(slot, {item.next_use, slot}); }
    Slot on_victim(const Item&, const InUse& in_use) override { return order_.top_free(in_use); }
    void on_remove(Slot slot, Leaving) override { order_.remove(slot); }

    SlotHeap<Rank> order_;
};

}  // namespace farpool::policy
