#include "policy/sieve.hpp"

namespace farpool::policy {

void Sieve::on_insert(Slot slot, const Item&) {
    marks_.clear(slot);
    queue_.push(slot);
}

Slot Sieve::on_victim(const Item&, const InUse& in_use) {
    // Two turns: the first may only clear marks. Other processes may set new marks during both, so a third turn takes the first
    // object that it may evict.
    const std::size_t turn = queue_.size();
    for (std::size_t step = 0; step < 3 * turn; ++step) {
        if (hand_ == no_slot) {
            hand_ = queue_.oldest();
        }
        const bool used = marks_.take(hand_);
        if (!in_use(hand_) && (!used || step >= 2 * turn)) {
            return hand_;
        }
        hand_ = queue_.newer(hand_);
    }
    return no_slot;
}

void Sieve::on_remove(Slot slot, Leaving) {
    if (hand_ == slot) {
        hand_ = queue_.newer(slot);
    }
    queue_.remove(slot);
}

}  // namespace farpool::policy
