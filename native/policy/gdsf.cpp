#include "policy/gdsf.hpp"

#include <algorithm>

namespace farpool::policy {

void Gdsf::on_touch(Slot slot, std::int64_t) {
    ++objects_[slot].uses;
    order_.change(slot, rank(objects_[slot]));
}

void Gdsf::on_insert(Slot slot, const Item& item) {
    if (slot >= objects_.size()) {
        objects_.resize(std::size_t{slot} + 1);
    }
    objects_[slot] = {item.cost / static_cast<double>(std::max<std::uint64_t>(item.size, 1)), 1};
    order_.push(slot, rank(objects_[slot]));
}

void Gdsf::on_remove(Slot slot, Leaving why) {
    // An object that was evicted because others were in use is worth more than these; start_ must not exceed the worth of any
    // object in the cache.
    if (why == Leaving::evicted && slot == order_.top()) {
        start_ = order_.rank(slot).worth;
    }
    order_.remove(slot);
}

}  // namespace farpool::policy
