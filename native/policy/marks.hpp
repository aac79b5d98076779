// Marks of use: one byte an object, which whoever uses it sets and the policy clears when it comes by.
//
// They lie in the policy, or in memory outside that others write as well: a node's readers map objects and leave a mark without
// a message. Such a mark may be set at any moment, so all accesses are atomic; nothing else depends on their order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "policy/policy.hpp"

namespace farpool::policy {

class Marks {
public:
    Marks() = default;
    // The memory has a byte for each slot that will ever be inserted.
    explicit Marks(std::atomic<std::uint8_t>* outside) : bytes_(reinterpret_cast<std::uint8_t*>(outside)), outside_(true) {}

    bool outside() const noexcept { return outside_; }
    void clear(Slot slot) {
        if (!outside_ && slot >= own_.size()) {
            own_.resize(std::size_t{slot} + 1);
            bytes_ = own_.data();
        }
        at(slot).store(0, std::memory_order_relaxed);
    }
    void set(Slot slot, std::uint8_t value = 1) { at(slot).store(value, std::memory_order_relaxed); }
    std::uint8_t get(Slot slot) const { return at(slot).load(std::memory_order_relaxed); }
    // Clears the mark; whether it was set. One that is set between the two is lost, as it would be just before.
    bool take(Slot slot) {
        if (get(slot) == 0) {
            return false;
        }
        set(slot, 0);
        return true;
    }

private:
    std::atomic_ref<std::uint8_t> at(Slot slot) const { return std::atomic_ref<std::uint8_t>(bytes_[slot]); }

    std::vector<std::uint8_t> own_;
    std::uint8_t* bytes_ = nullptr;
    bool outside_ = false;
};

}  // namespace farpool::policy
