// A cache of blocks that form prefixes: a block is of use only while the block before it, its parent, is in the cache. Blocks
// are evicted from the ends of prefixes, never from the middle.
//
// A policy of the library chooses any block, and the ends of the prefixes that continue it are evicted first. Expected reuse
// chooses among ends drawn at random the one that saves least for each byte and unit of time. It may also refuse a block, if
// the blocks that it would have to evict are worth more. A block whose parent was removed is an orphan; orphans and the blocks
// after them are evicted before all others.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "policy/id_map.hpp"
#include "policy/policy.hpp"
#include "policy/reuse_model.hpp"

namespace farpool::policy {

constexpr std::string_view expected_reuse = "expected-reuse";

struct NewBlock {
    std::uint64_t id = 0;
    Slot parent = no_slot;
    std::uint64_t size = 0;
    double cost = 0.0;       // seconds of computing it again
    std::uint32_t uses = 0;  // known uses before this one
    std::uint32_t tenant = 0;
    std::uint64_t sampled_before = 0;  // id of the nearest block before it that is in the sample for shadow caches
};

// A block that was evicted.
struct Evicted {
    std::uint64_t id;
    std::uint64_t size;
    std::uint32_t tenant;
};

class PrefixBlocks {
public:
    // `policy`: the name of a policy that works online, or `expected_reuse`. The model must outlive the blocks.
    PrefixBlocks(std::string_view policy, std::uint64_t capacity, const ReuseModel& model);

    // The slot of a block; `no_slot` if it is not in the cache.
    Slot find(std::uint64_t id) const { return slots_.find(id); }
    // Notes a use of a block in the cache; `uses` uses were known before.
    void touch(Slot slot, std::uint32_t uses);
    // Inserts a block. Blocks that it replaces are added to `evicted`. Returns its slot, `no_slot` if it was refused.
    Slot insert(const NewBlock& block, std::vector<Evicted>& evicted);
    // Removes a block; its children become orphans.
    void remove(Slot slot);
    // Gives an orphan its parent again.
    void adopt(Slot orphan, Slot parent);
    void pin(Slot slot);
    void unpin(Slot slot);
    // Replaces the policy; the new one receives all blocks in the order of their last uses.
    void use_policy(std::string_view name);

    std::uint64_t id(Slot slot) const { return blocks_[slot].id; }
    std::uint64_t nbytes(Slot slot) const { return blocks_[slot].size; }
    double cost(Slot slot) const { return blocks_[slot].cost; }
    std::uint32_t tenant(Slot slot) const { return blocks_[slot].tenant; }
    std::uint64_t sampled_before(Slot slot) const { return blocks_[slot].sampled_before; }
    bool is_orphan(Slot slot) const { return blocks_[slot].orphan; }
    std::uint32_t pins(Slot slot) const { return blocks_[slot].pins; }
    const std::string& policy() const noexcept { return name_; }
    std::uint64_t capacity() const noexcept { return capacity_; }
    std::uint64_t used() const noexcept { return used_; }
    std::size_t size() const noexcept { return slots_.size(); }

private:
    static constexpr std::uint32_t nowhere = 0xffffffffu;

    struct Block {
        std::uint64_t id = 0;
        std::uint64_t size = 0;
        std::uint64_t used = 0;  // time of the last use
        double cost = 0.0;
        std::uint64_t sampled_before = 0;
        std::uint32_t tenant = 0;
        std::uint32_t uses = 0;
        std::uint32_t pins = 0;
        std::uint32_t locks = 0;  // 1 if pinned, and 1 for each child that is locked
        Slot parent = no_slot;
        Slot first_child = no_slot;  // the oldest
        Slot last_child = no_slot;
        Slot next = no_slot;  // child of the same parent
        Slot previous = no_slot;
        std::uint32_t place = nowhere;  // index in `ends_`
        bool orphan = false;
    };

    Slot take_slot();
    void leave(Slot slot, Leaving why);
    void link(Slot slot, Slot parent);
    void unlink(Slot slot);
    void lock(Slot slot);
    void unlock(Slot slot);
    void update_end(Slot slot);
    double worth(const Block& block) const;
    Slot victim(const Item& incoming, double worth_of_incoming);
    Slot end_behind(Slot slot);
    Slot end_of_an_orphan() const;
    Slot least_worth(double worth_of_incoming);
    bool by_expected_reuse() const noexcept { return policy_ == nullptr; }

    const ReuseModel* model_;
    std::uint64_t capacity_;
    std::uint64_t used_ = 0;
    std::uint64_t locked_nbytes_ = 0;  // of blocks that are pinned or have a pinned block after them
    std::string name_;
    std::unique_ptr<Policy> policy_;  // null: expected reuse
    std::vector<Block> blocks_;       // by slot
    std::vector<Slot> free_;
    std::vector<Slot> ends_;  // blocks without children and pins, which may be evicted
    std::vector<Slot> orphans_;
    IdMap slots_;
    Slot leaving_ = no_slot;  // the block that the policy chose last; the ends after it are evicted first
    Slot reached_ = no_slot;  // block after it at which the search for the next end begins
    std::uint64_t dice_ = 0;
};

}  // namespace farpool::policy
