#include "policy/sieve.hpp"

#include <algorithm>

namespace farpool::policy {

void Sieve::on_insert(Slot slot, const Item& item) {
    marks_.clear(slot);
    if (by_costs_) {
        credits_.insert(slot, item);
    }
    queue_.push(slot);
}

Slot Sieve::on_victim(const Item&, const Held& held) {
    // Two turns: the first may only clear marks, and finds out how many turns the least object has, all of which the second
    // takes away at once. Others may set new marks meanwhile, so a third turn takes what it finds.
    const std::size_t turn = queue_.size();
    std::uint32_t toll = 1;
    std::uint32_t least = Credits::most;
    for (std::size_t step = 0; step < 3 * turn; ++step) {
        if (hand_ == no_slot) {
            hand_ = queue_.oldest();
        }
        if (step == turn) {
            toll = least + 1;
        }
        const bool free = !held(hand_);
        const std::uint32_t turns = credits_.look(hand_, marks_.take(hand_));
        if (free && (turns < toll || step >= 2 * turn)) {
            return hand_;
        }
        const std::uint32_t left = credits_.pay(hand_, turns, toll);
        if (free) {
            least = std::min(least, left);
        }
        hand_ = queue_.newer(hand_);
    }
    return no_slot;
}

void Sieve::on_remove(Slot slot, Leaving) {
    credits_.remove(slot);
    if (hand_ == slot) {
        hand_ = queue_.newer(slot);
    }
    queue_.remove(slot);
}

}  // namespace farpool::policy
