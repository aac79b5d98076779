// A binary heap of slots that knows the place of each slot, so that a slot in the middle can be moved or removed.
#pragma once

#include <vector>

#include "policy/policy.hpp"

namespace farpool::policy {

// A heap of slots by rank, the lowest at the top. `Rank` has an operator< that is a strict total order.
template <typename Rank>
class SlotHeap {
public:
    void push(Slot slot, const Rank& rank) {
        if (slot >= places_.size()) {
            places_.resize(std::size_t{slot} + 1);
        }
        heap_.push_back({rank, slot});
        rise(heap_.size() - 1, {rank, slot});
    }
    void change(Slot slot, const Rank& rank) { settle(places_[slot], {rank, slot}); }
    void remove(Slot slot) {
        const Entry last = heap_.back();
        heap_.pop_back();
        if (last.slot != slot) {
            settle(places_[slot], last);
        }
    }
    const Rank& rank(Slot slot) const { return heap_[places_[slot]].rank; }
    Slot top() const { return heap_.empty() ? no_slot : heap_.front().slot; }
    // The slot of lowest rank that is not in use; `no_slot` if all are in use.
    Slot top_free(const InUse& in_use) {
        std::vector<Entry> aside;
        while (!heap_.empty() && in_use(heap_.front().slot)) {
            aside.push_back(heap_.front());
            remove(heap_.front().slot);
        }
        const Slot found = top();
        for (const Entry& entry : aside) {
            push(entry.slot, entry.rank);
        }
        return found;
    }

private:
    struct Entry {
        Rank rank;
        Slot slot;
    };

    void put(std::size_t at, const Entry& entry) {
        heap_[at] = entry;
        places_[entry.slot] = static_cast<std::uint32_t>(at);
    }
    void settle(std::size_t at, Entry entry) {
        if (at > 0 && entry.rank < heap_[(at - 1) / 2].rank) {
            rise(at, entry);
        } else {
            sink(at, entry);
        }
    }
    void rise(std::size_t at, Entry entry) {
        for (; at > 0 && entry.rank < heap_[(at - 1) / 2].rank; at = (at - 1) / 2) {
            put(at, heap_[(at - 1) / 2]);
        }
        put(at, entry);
    }
    void sink(std::size_t at, Entry entry) {
        for (std::size_t child = 2 * at + 1; child < heap_.size(); child = 2 * at + 1) {
            if (child + 1 < heap_.size() && heap_[child + 1].rank < heap_[child].rank) {
                ++child;
            }
            if (!(heap_[child].rank < entry.rank)) {
                break;
            }
            put(at, heap_[child]);
            at = child;
        }
        put(at, entry);
    }

    std::vector<Entry> heap_;
    std::vector<std::uint32_t> places_;
};

}  // namespace farpool::policy
