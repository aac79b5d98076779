#include "policy/s3_fifo.hpp"

#include <algorithm>

namespace farpool::policy {

namespace {

constexpr std::uint8_t most_uses = 3;

std::uint64_t share(std::uint64_t capacity, double of) {
    return static_cast<std::uint64_t>(static_cast<double>(capacity) * of);
}

}  // namespace

S3Fifo::S3Fifo(std::uint64_t capacity, Marks marks)
    : small_capacity_(share(capacity, 0.1)),
      main_capacity_(capacity - small_capacity_),
      ghost_capacity_(share(capacity, 0.9)),
      uses_for_main_(marks.outside() ? 1 : 2),
      marks_(std::move(marks)) {}

void S3Fifo::on_touch(Slot slot, std::int64_t) { marks_.set(slot, std::min<std::uint8_t>(marks_.get(slot) + 1, most_uses)); }

// True if the incoming object is a ghost. It is removed from the ghosts, so that it does not push itself out of them.
bool S3Fifo::returns(std::uint64_t key) {
    if (returning_ != key && ghosts_.remove(key)) {
        returning_ = key;
    }
    return returning_ == key;
}

void S3Fifo::enter(Slot slot, bool main) {
    objects_[slot].in_main = main;
    (main ? main_ : small_).push(slot);
    (main ? main_nbytes_ : small_nbytes_) += objects_[slot].size;
    marks_.clear(slot);
}

void S3Fifo::on_insert(Slot slot, const Item& item) {
    if (slot >= objects_.size()) {
        objects_.resize(std::size_t{slot} + 1);
    }
    objects_[slot] = {item.key, item.size, false};
    const bool main = returns(item.key) || (!has_evicted_ && small_nbytes_ >= small_capacity_);
    returning_.reset();
    enter(slot, main);
}

Slot S3Fifo::on_victim(const Item& incoming, const InUse& in_use) {
    returns(incoming.key);
    has_evicted_ = true;
    Slot slot = no_slot;
    if (main_nbytes_ <= main_capacity_) {
        slot = victim_of_small(in_use);
    }
    if (slot == no_slot) {
        slot = victim_of_main(in_use);
    }
    return slot != no_slot ? slot : small_.oldest_free(in_use);
}

Slot S3Fifo::victim_of_small(const InUse& in_use) {
    for (Slot slot = small_.oldest(); slot != no_slot;) {
        const Slot newer = small_.newer(slot);
        if (!in_use(slot)) {
            if (marks_.get(slot) < uses_for_main_) {
                return slot;
            }
            small_.remove(slot);
            small_nbytes_ -= objects_[slot].size;
            enter(slot, true);
        }
        slot = newer;
    }
    return no_slot;
}

Slot S3Fifo::victim_of_main(const InUse& in_use) {
    // As many turns as a counter can reach, and one more. Other processes may set marks in between, so then any object will do.
    const std::size_t turn = main_.size();
    for (std::size_t step = 0; step < (most_uses + 2) * turn; ++step) {
        const Slot slot = main_.oldest();
        const std::uint8_t uses = marks_.get(slot);
        if (!in_use(slot)) {
            if (uses == 0 || step >= (most_uses + 1) * turn) {
                return slot;
            }
            marks_.set(slot, uses - 1);
        }
        main_.renew(slot);
    }
    return no_slot;
}

void S3Fifo::on_remove(Slot slot, Leaving why) {
    const Object& object = objects_[slot];
    (object.in_main ? main_ : small_).remove(slot);
    (object.in_main ? main_nbytes_ : small_nbytes_) -= object.size;
    // No ghost for an object evicted from the main queue, nor a second one for a ghost that its caller inserted again.
    if (why == Leaving::evicted && !object.in_main && object.size <= ghost_capacity_ && !ghosts_.contains(object.key)) {
        while (ghosts_.nbytes() + object.size > ghost_capacity_) {
            ghosts_.pop_oldest();
        }
        ghosts_.push(object.key, object.size);
    }
}

}  // namespace farpool::policy
