#include "policy/w_tiny_lfu.hpp"

namespace farpool::policy {

namespace {

constexpr std::uint64_t sample = 32;

std::uint64_t share(std::uint64_t capacity, double of) {
    return static_cast<std::uint64_t>(static_cast<double>(capacity) * of);
}

}  // namespace

WTinyLfu::WTinyLfu(std::uint64_t capacity, std::size_t counters) : frequency_(counters) {
    const std::uint64_t main = capacity - share(capacity, 0.01);
    capacity_ = {capacity - main, share(main, 0.2), share(main, 0.8), capacity};
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

void WTinyLfu::move(Slot slot, Part part) {
    leave(slot);
    enter(slot, part);
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
    frequency_.add(object.key);
    if (object.part == leaving) {
        move(slot, window);
        return;
    }
    move(slot, protected_);
    while (nbytes_[protected_] > capacity_[protected_]) {
        move(queues_[protected_].oldest(), probation);
        while (nbytes_[probation] > capacity_[probation]) {
            move(queues_[probation].oldest(), leaving);
        }
    }
    if (++uses_ >= sample * (queues_[probation].size() + queues_[protected_].size())) {
        uses_ = 0;
        frequency_.halve();
    }
}

Slot WTinyLfu::main_victim(const InUse& in_use) const {
    const Slot slot = queues_[probation].oldest_free(in_use);
    return slot != no_slot ? slot : queues_[protected_].oldest_free(in_use);
}

Slot WTinyLfu::on_victim(const Item&, const InUse& in_use) {
    const std::uint64_t main_capacity = capacity_[probation] + capacity_[protected_];
    for (;;) {
        if (const Slot slot = queues_[leaving].oldest_free(in_use); slot != no_slot) {
            return slot;
        }
        const Slot candidate = queues_[window].oldest_free(in_use);
        const Slot victim = main_victim(in_use);
        if (candidate == no_slot) {
            return victim;
        }
        const Object& object = objects_[candidate];
        const bool room = main_nbytes() + object.size <= main_capacity;
        const bool better = victim != no_slot && frequency_.estimate(object.key) > frequency_.estimate(objects_[victim].key);
        frequency_.add(object.key);
        if (!room && !better) {
            return candidate;
        }
        if (!room) {
            move(victim, leaving);
        }
        if (fits(probation, object.size) || !fits(protected_, object.size)) {
            while (main_nbytes() + object.size > main_capacity && main_victim(in_use) != no_slot) {
                move(main_victim(in_use), leaving);
            }
            move(candidate, probation);
        } else {
            move(candidate, protected_);
        }
    }
}

void WTinyLfu::on_remove(Slot slot, Leaving) { leave(slot); }

}  // namespace farpool::policy
