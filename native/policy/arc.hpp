// ARC (Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST 2003): one queue of objects used once, one
// of objects used more often, both in order of use, and the ghosts of objects evicted from either. When an object returns whose
// ghost is remembered, the target size of the first queue moves towards the queue that would still hold the object.
//
// Names follow the paper: t1, t2 the queues, b1, b2 their ghosts, p the target size of t1. p is a fraction because the steps by
// which it moves are fractions; sizes are sums of bytes.
#pragma once

#include <optional>

#include "policy/ghost_list.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class Arc final : public Policy {
public:
    explicit Arc(std::uint64_t capacity) : capacity_(capacity) {}

private:
    struct Object {
        std::uint64_t key;
        std::uint64_t size;
        bool in_t2;
        bool forgotten;  // leaves no ghost when it is evicted
    };
    enum class Ghost { none, of_t1, of_t2 };

    void on_touch(Slot slot, std::int64_t next_use) override;
    void on_insert(Slot slot, const Item& item) override;
    Slot on_victim(const Item& incoming, const InUse& in_use) override;
    void on_remove(Slot slot, Leaving why) override;
    Ghost returns(std::uint64_t key);

    std::uint64_t capacity_;
    double p_ = 0.0;
    Links links_;
    SlotList t1_{links_};
    SlotList t2_{links_};
    std::uint64_t t1_nbytes_ = 0;
    std::uint64_t t2_nbytes_ = 0;
    GhostList b1_;
    GhostList b2_;
    std::vector<Object> objects_;
    std::optional<std::uint64_t> returning_;  // the key that was a ghost until room was made for it
    Ghost returning_from_ = Ghost::none;
};

}  // namespace farpool::policy
