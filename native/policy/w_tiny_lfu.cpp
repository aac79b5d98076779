#include "policy/w_tiny_lfu.hpp"

namespace farpool::policy {

namespace {

constexpr std::uint64_t sample = 32;

std::uint64_t share(std::uint64_t capacity, double of) { return static_cast<std::uint64_t>(static_cast<double>(capacity) * of); }

}  // namespace

WTinyLfu::WTinyLfu(std::uint64_t capacity) {
    const std::uint64_t main = capacity - share(capacity, 0.01);
    capacity_ = {capacity - main, share(main, 0.2), share(main, 0.8)};
}

void WTinyLfu::enter(Slot slot, Part part) {
    objects_[slot].part = part;
    queues_[part].push(slot);
    nbytes_[part] += objects_[slot].size;
}

void WTinyLfu::leave(Slot slot) {
    const Part part = objects_[slot].part;
    queues_[part].remove(slot);
    nbytes_[part] -= objects_[slot].size;
}

void WTinyLfu::on_insert(Slot slot, const Item& item) {
    if (slot >= objects_.size()) {
        objects_.resize(std::size_t{slot} + 1);
    }
    frequency_.reserve(size() + 1);
    frequency_.add(item.key);
    objects_[slot] = {item.key, item.size, window};
    enter(slot, window);
}

void WTinyLfu::on_touch(Slot slot, std::int64_t) {
    const Object& object = objects_[slot];
    if (object.part == window) {
        queues_[window].renew(slot);
        return;
    }
    if (object.part == protected_) {
        queues_[protected_].renew(slot);
    } else {
        leave(slot);
        enter(slot, protected_);
        while (nbytes_[protected_] > capacity_[protected_]) {
            const Slot oldest = queues_[protected_].oldest();
            leave(oldest);
            enter(oldest, probation);
        }
        crowded_ = nbytes_[probation] > capacity_[probation];
    }
    frequency_.add(object.key);
    if (++uses_ >= sample * (queues_[probation].size() + queues_[protected_].size())) {
        uses_ = 0;
        frequency_.halve();
    }
}

Slot WTinyLfu::on_victim(const Item&, const Held& held) {
    const std::uint64_t main_capacity = capacity_[probation] + capacity_[protected_];
    crowded_ = crowded_ && nbytes_[probation] > capacity_[probation];
    for (;;) {
        const Slot candidate = queues_[window].oldest_free(held);
        Slot victim = queues_[probation].oldest_free(held);
        if (victim == no_slot) {
            victim = queues_[protected_].oldest_free(held);
        }
        // What the main part has too much is its own affair: it has been weighed already, or nothing is left to weigh it against.
        if (candidate == no_slot || (victim != no_slot && (crowded_ || main_nbytes() > main_capacity))) {
            return victim;
        }
        const Object& object = objects_[candidate];
        const bool room = main_nbytes() + object.size <= main_capacity;
        const bool better =
            victim != no_slot && frequency_.estimate(object.key) > frequency_.estimate(objects_[victim].key);
        frequency_.add(object.key);
        if (!room && !better) {
            return candidate;
        }
        leave(candidate);
        enter(candidate, room && !fits(probation, object.size) && fits(protected_, object.size) ? protected_ : probation);
        if (!room) {
            return victim;
        }
    }
}

void WTinyLfu::on_remove(Slot slot, Leaving) { leave(slot); }

}  // namespace farpool::policy
