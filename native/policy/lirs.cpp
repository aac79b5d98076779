#include "policy/lirs.hpp"

#include <algorithm>

namespace farpool::policy {

Lirs::Lirs(std::uint64_t capacity)
    : capacity_(capacity),
      lir_capacity_(capacity - std::max<std::uint64_t>(1, static_cast<std::uint64_t>(static_cast<double>(capacity) * 0.01))) {}

Slot Lirs::create(const Entry& entry) {
    if (unused_.empty()) {
        entries_.push_back(entry);
        return static_cast<Slot>(entries_.size() - 1);
    }
    const Slot number = unused_.back();
    unused_.pop_back();
    entries_[number] = entry;
    return number;
}

void Lirs::enter_s(Slot number) {
    s_.push(number);
    s_nbytes_ += entries_[number].size;
    entries_[number].in_s = true;
}

void Lirs::leave_s(Slot number) {
    s_.remove(number);
    s_nbytes_ -= entries_[number].size;
    entries_[number].in_s = false;
}

void Lirs::forget(Slot ghost) {
    leave_s(ghost);
    ghosts_.remove(ghost);
    ghost_numbers_.erase(entries_[ghost].key);
    unused_.push_back(ghost);
}

// Removes entries from the bottom of S up to a LIR object: entries below it cannot become LIR, because their uses are too far
// apart.
void Lirs::prune() {
    while (s_.oldest() != s_.newest() && entries_[s_.oldest()].state != State::lir) {
        const Slot bottom = s_.oldest();
        if (entries_[bottom].state == State::ghost) {
            forget(bottom);
        } else {
            leave_s(bottom);
        }
    }
}

// Turns LIR objects from the bottom of S into HIR ones until the LIR part has this much room.
void Lirs::demote_to(std::uint64_t room) {
    while (lir_nbytes_ > 0 && lir_nbytes_ + room > lir_capacity_) {
        prune();  // a HIR object that was alone in S may be at the bottom
        const Slot bottom = s_.oldest();
        leave_s(bottom);
        lir_nbytes_ -= entries_[bottom].size;
        entries_[bottom].state = State::hir;
        q_.push(bottom);
    }
    prune();
}

void Lirs::become_lir(Slot number) {
    demote_to(entries_[number].size);
    entries_[number].state = State::lir;
    lir_nbytes_ += entries_[number].size;
}

// Limits S to twice the capacity in bytes, its resident objects included.
void Lirs::limit_s() {
    while (s_nbytes_ > 2 * capacity_ && !ghosts_.empty()) {
        forget(ghosts_.oldest());
    }
}

void Lirs::on_touch(Slot slot, std::int64_t) {
    const Slot number = numbers_[slot];
    Entry& entry = entries_[number];
    if (entry.state == State::lir) {
        s_.renew(number);
        prune();
    } else if (entry.in_s) {
        s_.renew(number);
        q_.remove(number);
        become_lir(number);
    } else {
        q_.renew(number);
        demote_to(entry.size);
        enter_s(number);
    }
    limit_s();
}

void Lirs::on_insert(Slot slot, const Item& item) {
    if (slot >= numbers_.size()) {
        numbers_.resize(std::size_t{slot} + 1);
    }
    const std::uint32_t ghost = ghost_numbers_.find(item.key);
    if (ghost != IdMap::none) {
        forget(ghost);
    }
    const Slot number = create({item.key, item.size, slot, State::hir, false});
    numbers_[slot] = number;
    enter_s(number);
    // While the LIR part has room, every object becomes LIR.
    if (ghost != IdMap::none || lir_nbytes_ + item.size <= lir_capacity_) {
        become_lir(number);
    } else {
        q_.push(number);
    }
    limit_s();
}

Slot Lirs::on_victim(const Item&, const InUse& in_use) {
    Slot number = q_.oldest();
    while (number != no_slot && in_use(entries_[number].slot)) {
        number = q_.newer(number);
    }
    if (number == no_slot) {
        number = s_.oldest();
        while (number != no_slot && (entries_[number].state != State::lir || in_use(entries_[number].slot))) {
            number = s_.newer(number);
        }
    }
    return number == no_slot ? no_slot : entries_[number].slot;
}

void Lirs::on_remove(Slot slot, Leaving why) {
    const Slot number = numbers_[slot];
    Entry& entry = entries_[number];
    if (entry.state == State::lir) {
        lir_nbytes_ -= entry.size;
    } else {
        q_.remove(number);
        if (why == Leaving::evicted && entry.in_s && ghost_numbers_.find(entry.key) == IdMap::none) {
            entry.state = State::ghost;
            ghosts_.push(number);
            ghost_numbers_.insert(entry.key, number);
            return;
        }
    }
    if (entry.in_s) {
        leave_s(number);
    }
    unused_.push_back(number);
    prune();
}

}  // namespace farpool::policy
