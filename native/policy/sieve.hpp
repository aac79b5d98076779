// SIEVE (Zhang et al., "SIEVE is simpler than LRU", NSDI 2024): a queue in order of insertion, and a hand that goes from the
// oldest to the newest and round again, past objects used since it last came by. Unlike in CLOCK, survivors stay where they
// are, so that new objects do not hide behind them. A hit is one byte written, so it can come from outside (marks.hpp). By
// costs, the hand passes what is costly more often (credits.hpp).
#pragma once

#include "policy/credits.hpp"
#include "policy/marks.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class Sieve final : public Policy {
public:
    enum class By { uses, costs };
    explicit Sieve(Marks marks = {}, By by = By::uses) : marks_(std::move(marks)), by_costs_(by == By::costs) {}

    // True if the hand would pass the object, had it come to it now.
    bool would_pass(Slot slot) const { return marks_.get(slot) != 0 || credits_.has(slot); }
    std::uint64_t credits_nbytes() const noexcept { return credits_.nbytes(); }

private:
    void on_touch(Slot slot, std::int64_t) override { marks_.set(slot); }
    void on_insert(Slot slot, const Item&) override;
    Slot on_victim(const Item& incoming, const Held& held) override;
    void on_remove(Slot slot, Leaving) override;

    Marks marks_;
    bool by_costs_;
    Credits credits_;
    Links links_;
    SlotList queue_{links_};
    Slot hand_ = no_slot;  // at the oldest
};

}  // namespace farpool::policy
