// Ghosts: keys and sizes of objects that were evicted, oldest first, without the objects.
#pragma once

#include <cstdint>
#include <vector>

#include "policy/id_map.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class GhostList {
public:
    GhostList() : order_(links_) {}
    GhostList(const GhostList&) = delete;
    GhostList& operator=(const GhostList&) = delete;

    // Adds a ghost as the newest; its key must not be in the list.
    void push(std::uint64_t key, std::uint64_t size) {
        Slot number = static_cast<Slot>(ghosts_.size());
        if (unused_.empty()) {
            ghosts_.push_back({key, size});
        } else {
            number = unused_.back();
            unused_.pop_back();
            ghosts_[number] = {key, size};
        }
        numbers_.insert(key, number);
        order_.push(number);
        nbytes_ += size;
    }
    // Removes a ghost; true if it was in the list.
    bool remove(std::uint64_t key) {
        const std::uint32_t number = numbers_.find(key);
        if (number == IdMap::none) {
            return false;
        }
        numbers_.erase(key);
        order_.remove(number);
        nbytes_ -= ghosts_[number].size;
        unused_.push_back(number);
        return true;
    }
    void pop_oldest() { remove(ghosts_[order_.oldest()].key); }
    bool contains(std::uint64_t key) const { return numbers_.find(key) != IdMap::none; }
    bool empty() const noexcept { return order_.empty(); }
    std::uint64_t nbytes() const noexcept { return nbytes_; }

private:
    struct Ghost {
        std::uint64_t key;
        std::uint64_t size;
    };

    std::vector<Ghost> ghosts_;
    std::vector<Slot> unused_;
    Links links_;
    SlotList order_;
    IdMap numbers_;
    std::uint64_t nbytes_ = 0;
};

}  // namespace farpool::policy
