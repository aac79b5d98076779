// CLOCK (Corbató, "A paging experiment with the Multics system", 1968): a queue in order of insertion. An object that was used
// since the hand last passed it gets a second chance. A hit writes one byte, so other processes can report it (marks.hpp).
#pragma once

#include "policy/marks.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class Clock final : public Policy {
public:
    explicit Clock(Marks marks = {}) : marks_(std::move(marks)) {}

private:
    void on_touch(Slot slot, std::int64_t) override { marks_.set(slot); }
    void on_insert(Slot slot, const Item&) override;
    Slot on_victim(const Item& incoming, const InUse& in_use) override;
    void on_remove(Slot slot, Leaving) override { queue_.remove(slot); }

    Marks marks_;
    Links links_;
    SlotList queue_{links_};
};

}  // namespace farpool::policy
