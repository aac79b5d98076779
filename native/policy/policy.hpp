// Eviction policies, which choose the object in a cache that makes room for the next one. One interface, one file a policy.
//
// A policy keeps no objects. Its caller keeps them, numbers them densely (a pager its blocks, a node the slots of its index)
// and reports to the policy:
//
// - A hit: `touch`.
// - A miss: while there is no room, `victim` and, after that object was evicted, `remove`; then `insert`. The caller alone
//   decides that room is needed, by counting bytes; a policy refuses nothing and evicts nothing by itself.
// - An object that ends for another reason (deleted, expired): `remove` with `Leaving::deleted`, at any time.
//
// Policies that remember evicted objects (ARC, LIRS, S3-FIFO) recognize them by their keys, because the slots are used for
// other objects in between. So `victim` already receives the incoming object: these policies choose differently if it returns.
//
// Everything is deterministic: the same calls give the same answers. A call that contradicts the contents (a touch of an object
// that is not in the cache, a second insert) throws and changes nothing.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "core/error.hpp"

namespace farpool::policy {

// The number that the caller has given to an object. A policy takes memory for all numbers up to the largest.
using Slot = std::uint32_t;
constexpr Slot no_slot = 0xffffffffu;

constexpr std::int64_t never = std::numeric_limits<std::int64_t>::max();

struct Item {
    std::uint64_t key = 0;          // of the object, the same at each insertion
    std::uint64_t size = 1;         // in the unit of the capacity: bytes, or 1 if all objects count alike
    std::int64_t next_use = never;  // position in time of its next use; only Belady reads it
    double cost = 1.0;              // of fetching it again; only GDSF and the nodes' policy read it
};

enum class Leaving {
    evicted,  // made room for another object; it may be remembered
    deleted,  // was deleted or has expired
};

// A predicate for objects that must not be evicted now because they are pinned or in transfer. Refers to the callable it is
// made from.
class InUse {
public:
    InUse() = default;
    template <typename Ask>
    InUse(const Ask& ask)  // NOLINT(google-explicit-constructor): callers pass a lambda directly
        : object_(&ask), ask_([](const void* object, Slot slot) { return (*static_cast<const Ask*>(object))(slot); }) {}
    bool operator()(Slot slot) const { return ask_ != nullptr && ask_(object_, slot); }

private:
    const void* object_ = nullptr;
    bool (*ask_)(const void*, Slot) = nullptr;
};

class Policy {
public:
    virtual ~Policy() = default;
    Policy() = default;
    Policy(const Policy&) = delete;
    Policy& operator=(const Policy&) = delete;

    // Notes another use of the object.
    void touch(Slot slot, std::int64_t next_use = never) {
        require(slot, true);
        on_touch(slot, next_use);
    }
    // Notes that the object was inserted.
    void insert(Slot slot, const Item& item) {
        require(slot, false);
        if (slot >= inside_.size()) {
            inside_.resize(std::size_t{slot} + 1);
        }
        on_insert(slot, item);
        inside_[slot] = true;
        ++size_;
    }
    // The object to evict next for `incoming`; it stays until it is removed. `no_slot` if all objects are in use.
    Slot victim(const Item& incoming, InUse in_use = {}) { return size_ == 0 ? no_slot : on_victim(incoming, in_use); }
    void remove(Slot slot, Leaving why) {
        require(slot, true);
        on_remove(slot, why);
        inside_[slot] = false;
        --size_;
    }
    bool contains(Slot slot) const { return slot < inside_.size() && inside_[slot]; }
    // Number of objects in the cache.
    std::size_t size() const noexcept { return size_; }

private:
    virtual void on_touch(Slot slot, std::int64_t next_use) = 0;
    virtual void on_insert(Slot slot, const Item& item) = 0;
    virtual Slot on_victim(const Item& incoming, const InUse& in_use) = 0;
    virtual void on_remove(Slot slot, Leaving why) = 0;

    void require(Slot slot, bool inside) const {
        if (contains(slot) != inside || slot == no_slot) {
            fail_value("slot " + std::to_string(slot) + (inside ? " is not in the policy" : " is in the policy already"));
        }
    }

    std::vector<bool> inside_;
    std::size_t size_ = 0;
};

}  // namespace farpool::policy
