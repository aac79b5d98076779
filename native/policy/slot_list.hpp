// Queues of slots: doubly linked lists in one vector of links. Several lists share it, because a slot is in one list at a time.
#pragma once

#include <cstdint>
#include <vector>

#include "policy/policy.hpp"

namespace farpool::policy {

struct Link {
    Slot newer = no_slot;
    Slot older = no_slot;
};

using Links = std::vector<Link>;

class SlotList {
public:
    explicit SlotList(Links& links) : links_(&links) {}

    // Puts the slot behind all others, as the newest.
    void push(Slot slot) {
        if (slot >= links_->size()) {
            links_->resize(std::size_t{slot} + 1);
        }
        (*links_)[slot] = {no_slot, newest_};
        (newest_ == no_slot ? oldest_ : (*links_)[newest_].newer) = slot;
        newest_ = slot;
        ++size_;
    }
    void remove(Slot slot) {
        const Link link = (*links_)[slot];
        (link.newer == no_slot ? newest_ : (*links_)[link.newer].older) = link.older;
        (link.older == no_slot ? oldest_ : (*links_)[link.older].newer) = link.newer;
        --size_;
    }
    // Moves the slot to the end, as the newest.
    void renew(Slot slot) {
        if (slot != newest_) {
            remove(slot);
            push(slot);
        }
    }
    Slot newest() const noexcept { return newest_; }
    Slot oldest() const noexcept { return oldest_; }
    Slot newer(Slot slot) const { return (*links_)[slot].newer; }
    bool empty() const noexcept { return size_ == 0; }
    std::size_t size() const noexcept { return size_; }
    // The oldest slot that is not in use; `no_slot` if all are in use.
    Slot oldest_free(const InUse& in_use) const {
        Slot slot = oldest_;
        while (slot != no_slot && in_use(slot)) {
            slot = newer(slot);
        }
        return slot;
    }

private:
    Links* links_;
    Slot newest_ = no_slot;
    Slot oldest_ = no_slot;
    std::size_t size_ = 0;
};

}  // namespace farpool::policy
