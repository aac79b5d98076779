// The objects that replies and pins use, by the offsets of their extents.
//
// An object that is held may be deleted or expire: readers then no longer find it. But its memory is not used again before the
// last holder has released it.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>

#include "node/catalogue/index.hpp"

namespace farpool {

class Holds {
public:
    struct Held {
        std::uint32_t count = 0;
        std::uint32_t pins = 0;  // part of `count`
        bool gone = false;       // no longer in the index
        std::uint32_t slot = 0;
        std::uint32_t units = 0;
        std::uint32_t block = 0;
        std::uint32_t blocks = 0;
    };

    bool contains(std::uint64_t offset) const { return held_.contains(offset); }
    std::uint32_t count(std::uint64_t offset) const {
        const auto found = held_.find(offset);
        return found == held_.end() ? 0 : found->second.count;
    }
    bool is_pinned(std::uint64_t offset) const {
        const auto found = held_.find(offset);
        return found != held_.end() && found->second.pins > 0;
    }
    const Held& at(std::uint64_t offset) const { return held_.at(offset); }
    // The slot of a held object; `Index::none` if it is not held or no longer in the index.
    std::uint32_t slot(std::uint64_t offset) const {
        const auto found = held_.find(offset);
        return found == held_.end() || found->second.gone ? Index::none : found->second.slot;
    }

    // Holds an object in this slot once more; true for the first holder.
    bool add(std::uint64_t offset, std::uint32_t slot, const Index::Entry& entry) {
        return held_.try_emplace(offset, Held{0, 0, false, slot, entry.units, entry.block, entry.blocks})
                   .first->second.count++ == 0;
    }
    // Holds an object again that is held already.
    void add_again(std::uint64_t offset) { ++held_.at(offset).count; }
    // Releases an object; returns its record if that was the last holder.
    std::optional<Held> release(std::uint64_t offset) {
        const auto found = held_.find(offset);
        if (found == held_.end() || --found->second.count > 0) {
            return std::nullopt;
        }
        const Held held = found->second;
        held_.erase(found);
        return held;
    }
    // Count pins of a held object. remove_pin() returns true for the last one.
    void add_pin(std::uint64_t offset) { ++held_.at(offset).pins; }
    bool remove_pin(std::uint64_t offset) { return --held_.at(offset).pins == 0; }
    // Notes that an object has left the index; false if it is not held, so that its memory is free now.
    bool mark_gone(std::uint64_t offset) {
        const auto found = held_.find(offset);
        if (found == held_.end()) {
            return false;
        }
        found->second.gone = true;
        return true;
    }

private:
    std::unordered_map<std::uint64_t, Held> held_;
};

}  // namespace farpool
