// GDSF (Cherkasova, "Improving WWW proxies performance with Greedy-Dual-Size-Frequency caching policy", 1998): the worth of an
// object is its uses times its cost of fetching, per byte. The object of least worth is evicted, and its worth is added to
// objects that are inserted or used later, so that earlier uses count less and less.
#pragma once

#include "policy/slot_heap.hpp"

namespace farpool::policy {

class Gdsf final : public Policy {
private:
    struct Rank {
        double worth;
        std::uint64_t used;  // the least recently used among equals
        bool operator<(const Rank& other) const { return worth != other.worth ? worth < other.worth : used < other.used; }
    };
    struct Object {
        double value;  // cost of a byte
        std::uint64_t uses;
    };

    void on_touch(Slot slot, std::int64_t next_use) override;
    void on_insert(Slot slot, const Item& item) override;
    Slot on_victim(const Item&, const InUse& in_use) override { return order_.top_free(in_use); }
    void on_remove(Slot slot, Leaving why) override;
    Rank rank(const Object& object) { return {start_ + static_cast<double>(object.uses) * object.value, ++clock_}; }

    SlotHeap<Rank> order_;
    std::vector<Object> objects_;
    double start_ = 0.0;  // worth of the object evicted last
    std::uint64_t clock_ = 0;
};

}  // namespace farpool::policy
