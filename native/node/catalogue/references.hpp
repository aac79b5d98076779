// References of replies and pins to objects, by the offsets of the objects' extents.
//
// An object with references may be deleted or expire: readers then no longer find it. But its memory is not used again before
// the last reference is released.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "node/catalogue/index.hpp"

namespace farpool {

class References {
public:
    struct Counted {
        std::uint32_t count = 0;
        std::uint32_t pins = 0;  // part of `count`
        bool gone = false;       // no longer in the index
        std::uint32_t slot = 0;
        std::uint32_t units = 0;
        std::uint32_t block = 0;
        std::uint32_t blocks = 0;
    };

    bool contains(std::uint64_t offset) const { return counted_.contains(offset); }
    std::uint32_t count(std::uint64_t offset) const {
        const auto found = counted_.find(offset);
        return found == counted_.end() ? 0 : found->second.count;
    }
    bool is_pinned(std::uint64_t offset) const {
        const auto found = counted_.find(offset);
        return found != counted_.end() && found->second.pins > 0;
    }
    const Counted& at(std::uint64_t offset) const { return counted_.at(offset); }
    // The slot of an object with references; `Index::none` if it has none or is no longer in the index.
    std::uint32_t slot(std::uint64_t offset) const {
        const auto found = counted_.find(offset);
        return found == counted_.end() || found->second.gone ? Index::none : found->second.slot;
    }

    // Adds a reference to the object in this slot; true for the first one.
    bool add(std::uint64_t offset, std::uint32_t slot, const Index::Entry& entry) {
        return counted_.try_emplace(offset, Counted{0, 0, false, slot, entry.units, entry.block, entry.blocks})
                   .first->second.count++ == 0;
    }
    // Adds a reference to an object that has one already.
    void add_again(std::uint64_t offset) { ++counted_.at(offset).count; }
    // Releases a reference; returns the object's record if it was the last one.
    std::optional<Counted> release(std::uint64_t offset) {
        const auto found = counted_.find(offset);
        if (found == counted_.end() || --found->second.count > 0) {
            return std::nullopt;
        }
        const Counted last = found->second;
        counted_.erase(found);
        return last;
    }
    // Count pins of an object with references. remove_pin() returns true for the last one.
    void add_pin(std::uint64_t offset) { ++counted_.at(offset).pins; }
    bool remove_pin(std::uint64_t offset) { return --counted_.at(offset).pins == 0; }
    // Notes that an object has left the index; false if it has no reference, so that its memory is free now.
    bool mark_gone(std::uint64_t offset) {
        const auto found = counted_.find(offset);
        if (found == counted_.end()) {
            return false;
        }
        found->second.gone = true;
        return true;
    }

private:
    std::unordered_map<std::uint64_t, Counted> counted_;
};

}  // namespace farpool
