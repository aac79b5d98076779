// SIEVE (Zhang et al., "SIEVE is simpler than LRU", NSDI 2024): a queue in order of insertion, and a hand that moves from the
// oldest to the newest and again from the oldest, past objects used since it last passed. Unlike in CLOCK, survivors keep their
// places, so that new objects do not hide behind them. A hit writes one byte, so other processes can report it (marks.hpp).
#pragma once

#include "policy/marks.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class Sieve final : public Policy {
public:
    explicit Sieve(Marks marks = {}) : marks_(std::move(marks)) {}

private:
    void on_touch(Slot slot, std::int64_t) override { marks_.set(slot); }
    void on_insert(Slot slot, const Item&) override;
    Slot on_victim(const Item& incoming, const InUse& in_use) override;
    void on_remove(Slot slot, Leaving) override;

    Marks marks_;
    Links links_;
    SlotList queue_{links_};
    Slot hand_ = no_slot;  // at the oldest
};

}  // namespace farpool::policy
