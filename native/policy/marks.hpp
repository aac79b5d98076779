// Marks of use: one byte an object, set at each use and cleared by the policy when it checks the object.
//
// The policy or its caller owns the marks. In addition there may be areas that other processes write: the readers of a node map
// objects and mark their uses without a message. Such a mark may be set at any moment, so all accesses are atomic; nothing else
// depends on their order.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <vector>

#include "policy/policy.hpp"

namespace farpool::policy {

class Marks {
public:
    // Marks written by one other process. Their number is a power of two; slots whose numbers have the same low bits share one.
    struct Area {
        std::uint8_t* bytes;
        std::uint64_t mask;  // the bytes, less 1
    };

    Marks() = default;
    // Marks in the caller's memory, which has a byte for each slot that will ever be inserted. Areas may be added and removed.
    Marks(std::uint8_t* outside, const std::vector<Area>* areas) : bytes_(outside), areas_(areas) {}

    bool outside() const noexcept { return areas_ != nullptr; }
    // Number of areas that other processes write.
    std::size_t areas() const noexcept { return outside() ? areas_->size() : 0; }
    // Clears the mark of an object that is inserted. Marks in areas stay: they may belong to another object; if not, the new
    // object stays a turn longer.
    void clear(Slot slot) {
        if (!outside() && slot >= own_.size()) {
            own_.resize(std::size_t{slot} + 1);
            bytes_ = own_.data();
        }
        take(bytes_[slot]);
    }
    void set(Slot slot, std::uint8_t value = 1) { at(bytes_[slot]).store(value, std::memory_order_relaxed); }
    std::uint8_t get(Slot slot) const {
        std::uint8_t value = at(bytes_[slot]).load(std::memory_order_relaxed);
        for (std::size_t area = 0; outside() && area < areas_->size(); ++area) {
            const Area& one = (*areas_)[area];
            value = std::max(value, at(one.bytes[slot & one.mask]).load(std::memory_order_relaxed));
        }
        return value;
    }
    // Clears the mark; true if it was set. A mark set between the check and the clearing is lost, as if it had been set before.
    bool take(Slot slot) {
        bool was_set = take(bytes_[slot]);
        for (std::size_t area = 0; outside() && area < areas_->size(); ++area) {
            const Area& one = (*areas_)[area];
            was_set = take(one.bytes[slot & one.mask]) || was_set;
        }
        return was_set;
    }

private:
    static std::atomic_ref<std::uint8_t> at(std::uint8_t& byte) { return std::atomic_ref<std::uint8_t>(byte); }
    // Clears one byte. It is written only if it is set: otherwise its cache line would move between cores for no reason.
    static bool take(std::uint8_t& byte) {
        if (at(byte).load(std::memory_order_relaxed) == 0) {
            return false;
        }
        at(byte).store(0, std::memory_order_relaxed);
        return true;
    }

    std::vector<std::uint8_t> own_;
    std::uint8_t* bytes_ = nullptr;
    const std::vector<Area>* areas_ = nullptr;
};

}  // namespace farpool::policy
