// How often the hand of SIEVE passes objects, by what fetching them again costs.
//
// In SIEVE an object that was used is passed once. Here a use is worth as many turns as the object costs, for each unit of its
// size, beside the mean of all that are in: so where all cost the same it is SIEVE. What costs more also begins with the turns
// that it has before those of others. Objects without a cost are passed once for a use, whatever others cost.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "policy/policy.hpp"

namespace farpool::policy {

class Credits {
public:
    static constexpr std::uint32_t most = 64;

    // A cost of 0 stands for one that is not known.
    void insert(Slot slot, const Item& item) {
        if (slot >= objects_.size()) {
            if (item.cost <= 0.0) {
                return;
            }
            objects_.resize(std::size_t{slot} + 1);
        }
        objects_[slot] = {};
        if (item.cost > 0.0) {
            const double octaves = std::log2(item.cost / static_cast<double>(std::max<std::uint64_t>(item.size, 1)));
            objects_[slot].level = static_cast<std::uint8_t>(std::clamp(std::round(steps * octaves) + 128.0, 1.0, 255.0));
            levels_ += objects_[slot].level;
            ++count_;
            objects_[slot].turns = static_cast<std::uint8_t>(turns_for_a_use(slot) - 1);
        }
    }
    void remove(Slot slot) {
        if (slot < objects_.size() && objects_[slot].level > 0) {
            levels_ -= objects_[slot].level;
            --count_;
            objects_[slot] = {};
        }
    }
    // Adds what a use is worth, if there was one, and returns the turns that the object has.
    std::uint32_t look(Slot slot, bool used) {
        if (slot >= objects_.size() || objects_[slot].level == 0) {
            return used ? 1 : 0;
        }
        std::uint8_t& turns = objects_[slot].turns;
        turns = static_cast<std::uint8_t>(std::min(turns + (used ? turns_for_a_use(slot) : 0), most));
        return turns;
    }
    // Takes turns away; returns what is left.
    std::uint32_t pay(Slot slot, std::uint32_t turns, std::uint32_t toll) {
        const std::uint32_t left = turns - std::min(turns, toll);
        if (slot < objects_.size()) {
            objects_[slot].turns = objects_[slot].level == 0 ? 0 : static_cast<std::uint8_t>(left);
        }
        return left;
    }
    // True if the object is passed although it was not used.
    bool has(Slot slot) const { return slot < objects_.size() && objects_[slot].turns > 0; }
    std::uint64_t nbytes() const noexcept { return objects_.size() * sizeof(Object); }

private:
    struct Object {
        std::uint8_t level = 0;  // logarithm of the cost of a unit of size; 0 for none
        std::uint8_t turns = 0;
    };

    std::uint32_t turns_for_a_use(Slot slot) const {
        const double mean = static_cast<double>(levels_) / static_cast<double>(count_);
        const double times = std::exp2((objects_[slot].level - mean) / steps);
        return static_cast<std::uint32_t>(std::clamp(std::round(times), 1.0, most_for_a_use));
    }

    static constexpr double steps = 3.0;  // for each doubling: 255 of them reach from 2^-42 to 2^42
    static constexpr double most_for_a_use = 16.0;

    std::vector<Object> objects_;  // by slot, up to the last that has a cost
    std::uint64_t levels_ = 0;     // sum
    std::uint64_t count_ = 0;      // of objects with a cost
};

}  // namespace farpool::policy
