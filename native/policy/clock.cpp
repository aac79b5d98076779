#include "policy/clock.hpp"

namespace farpool::policy {

void Clock::on_insert(Slot slot, const Item&) {
    marks_.clear(slot);
    queue_.push(slot);
}

Slot Clock::on_victim(const Item&, const InUse& in_use) {
    // Two turns: the first may only clear marks. Other processes may set new marks during both, so a third turn takes the first
    // object that it may evict.
    const std::size_t turn = queue_.size();
    for (std::size_t step = 0; step < 3 * turn; ++step) {
        const Slot slot = queue_.oldest();
        if (!in_use(slot) && (!marks_.take(slot) || step >= 2 * turn)) {
            return slot;
        }
        queue_.renew(slot);
    }
    return no_slot;
}

}  // namespace farpool::policy
