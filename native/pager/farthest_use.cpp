#include "pager/farthest_use.hpp"

namespace farpool::pager {

void FarthestUse::put(std::size_t slot, Entry entry) {
    heap_[slot] = entry;
    blocks_[entry.block].heap_slot = static_cast<std::int32_t>(slot);
}

void FarthestUse::rise(std::size_t slot, Entry entry) {
    while (slot > 0) {
        const std::size_t parent = (slot - 1) / 2;
        if (!entry.before(heap_[parent])) {
            break;
        }
        put(slot, heap_[parent]);
        slot = parent;
    }
    put(slot, entry);
}

void FarthestUse::sink(std::size_t slot, Entry entry) {
    for (;;) {
        std::size_t child = 2 * slot + 1;
        if (child >= heap_.size()) {
            break;
        }
        if (child + 1 < heap_.size() && heap_[child + 1].before(heap_[child])) {
            ++child;
        }
        if (!heap_[child].before(entry)) {
            break;
        }
        put(slot, heap_[child]);
        slot = child;
    }
    put(slot, entry);
}

void FarthestUse::insert(BlockId block) {
    const Entry entry{blocks_[block].next_use, block};
    const std::int32_t at = blocks_[block].heap_slot;
    if (at < 0) {
        heap_.push_back(entry);
        rise(heap_.size() - 1, entry);
        return;
    }
    const auto slot = static_cast<std::size_t>(at);
    if (entry.before(heap_[slot])) {
        rise(slot, entry);
    } else {
        sink(slot, entry);
    }
}

void FarthestUse::remove(BlockId block) {
    const std::int32_t at = blocks_[block].heap_slot;
    if (at < 0) {
        return;
    }
    blocks_[block].heap_slot = -1;
    const Entry last = heap_.back();
    heap_.pop_back();
    if (last.block == block) {
        return;
    }
    const auto slot = static_cast<std::size_t>(at);
    if (slot > 0 && last.before(heap_[(slot - 1) / 2])) {
        rise(slot, last);
    } else {
        sink(slot, last);
    }
}

}  // namespace farpool::pager
