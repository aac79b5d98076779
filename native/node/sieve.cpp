#include "node/sieve.hpp"

namespace farpool {

void Sieve::insert(std::uint32_t slot) {
    if (slot >= links_.size()) {
        links_.resize(slot + 1);
    }
    visited_[slot].store(0, std::memory_order_relaxed);
    links_[slot] = {none, newest_};
    (newest_ == none ? oldest_ : links_[newest_].newer) = slot;
    newest_ = slot;
    ++size_;
}

void Sieve::remove(std::uint32_t slot) {
    const Link link = links_[slot];
    if (hand_ == slot) {
        hand_ = link.newer;
    }
    (link.newer == none ? newest_ : links_[link.newer].older) = link.older;
    (link.older == none ? oldest_ : links_[link.older].newer) = link.newer;
    --size_;
}

}  // namespace farpool
