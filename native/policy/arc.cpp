#include "policy/arc.hpp"

#include <algorithm>

namespace farpool::policy {

// The first call for a key that is a ghost adapts p and removes the ghost; the answer stays until the object is inserted.
Arc::Ghost Arc::returns(std::uint64_t key) {
    if (returning_ == key) {
        return returning_from_;
    }
    const auto b1 = static_cast<double>(b1_.nbytes());
    const auto b2 = static_cast<double>(b2_.nbytes());
    if (b1_.remove(key)) {
        p_ = std::min(p_ + std::max(b2 / b1, 1.0), static_cast<double>(capacity_));
        returning_from_ = Ghost::of_t1;
    } else if (b2_.remove(key)) {
        p_ = std::max(p_ - std::max(b1 / b2, 1.0), 0.0);
        returning_from_ = Ghost::of_t2;
    } else {
        return Ghost::none;
    }
    returning_ = key;
    return returning_from_;
}

void Arc::on_touch(Slot slot, std::int64_t) {
    Object& object = objects_[slot];
    if (object.in_t2) {
        t2_.renew(slot);
        return;
    }
    t1_.remove(slot);
    t2_.push(slot);
    t1_nbytes_ -= object.size;
    t2_nbytes_ += object.size;
    object.in_t2 = true;
}

void Arc::on_insert(Slot slot, const Item& item) {
    if (slot >= objects_.size()) {
        objects_.resize(std::size_t{slot} + 1);
    }
    const bool known = returns(item.key) != Ghost::none;
    returning_.reset();
    objects_[slot] = {item.key, item.size, known, false};
    (known ? t2_ : t1_).push(slot);
    (known ? t2_nbytes_ : t1_nbytes_) += item.size;
}

Slot Arc::on_victim(const Item& incoming, const InUse& in_use) {
    const Ghost from = returns(incoming.key);
    bool forget = false;
    if (from == Ghost::none) {
        // The paper's case IV: t1 and its ghosts together hold at most one capacity, all queues and ghosts at most two.
        if (t1_nbytes_ + b1_.nbytes() + incoming.size > capacity_) {
            forget = b1_.empty();
            if (!forget) {
                b1_.pop_oldest();
            }
        } else if (t1_nbytes_ + b1_.nbytes() + t2_nbytes_ + b2_.nbytes() >= 2 * capacity_ && !b2_.empty()) {
            b2_.pop_oldest();
        }
    }
    const auto t1 = static_cast<double>(t1_nbytes_);
    const bool first = forget || t2_.empty() || t1 > p_ || (t1 == p_ && from == Ghost::of_t2);
    Slot slot = (first && !t1_.empty() ? t1_ : t2_).oldest_free(in_use);
    if (slot == no_slot) {
        slot = (first ? t2_ : t1_).oldest_free(in_use);
    }
    if (slot != no_slot) {
        objects_[slot].forgotten = forget && !objects_[slot].in_t2;
    }
    return slot;
}

void Arc::on_remove(Slot slot, Leaving why) {
    const Object& object = objects_[slot];
    (object.in_t2 ? t2_ : t1_).remove(slot);
    (object.in_t2 ? t2_nbytes_ : t1_nbytes_) -= object.size;
    if (why == Leaving::evicted && !object.forgotten && !b1_.contains(object.key) && !b2_.contains(object.key)) {
        (object.in_t2 ? b2_ : b1_).push(object.key, object.size);
    }
}

}  // namespace farpool::policy
