#include "policy/prefix_blocks.hpp"

#include <algorithm>

#include "core/error.hpp"
#include "core/hash.hpp"
#include "policy/policies.hpp"
#include "policy/w_tiny_lfu.hpp"

namespace farpool::policy {

namespace {

// Ends drawn to find the one worth least: on average, it is then among the lowest 1/64 of all.
constexpr std::size_t drawn = 64;

std::unique_ptr<Policy> make_online(std::string_view name, std::uint64_t capacity) {
    if (name == expected_reuse) {
        return nullptr;
    }
    if (name == "belady") {
        fail_value("policy 'belady' needs to know the future");
    }
    if (name == "w-tiny-lfu") {
        return std::make_unique<WTinyLfu>(capacity);  // with the small sketch
    }
    return make(name, capacity);
}

}  // namespace

PrefixBlocks::PrefixBlocks(std::string_view policy, std::uint64_t capacity, const ReuseModel& model)
    : model_(&model), capacity_(capacity), name_(policy), policy_(make_online(policy, capacity)) {}

void PrefixBlocks::touch(Slot slot, std::uint32_t uses) {
    Block& block = blocks_[slot];
    block.uses = uses;
    block.used = model_->now();
    if (policy_) {
        policy_->touch(slot);
    }
}

Slot PrefixBlocks::insert(const NewBlock& block, std::vector<Evicted>& evicted) {
    // While its parent is locked, all blocks that are not locked can be evicted, one end after the other.
    if (block.parent != no_slot) {
        lock(block.parent);
    }
    const Item item{block.id, block.size, never, block.cost};
    const Block made{.id = block.id,
                     .size = block.size,
                     .used = model_->now(),
                     .cost = block.cost,
                     .sampled_before = block.sampled_before,
                     .tenant = block.tenant,
                     .uses = block.uses};
    bool fits = block.size <= capacity_ - locked_nbytes_;
    while (fits && block.size > capacity_ - used_) {
        const Slot slot = victim(item, worth(made));
        fits = slot != no_slot;
        if (fits) {
            evicted.push_back({blocks_[slot].id, blocks_[slot].size, blocks_[slot].tenant});
            leave(slot, Leaving::evicted);
        }
    }
    if (block.parent != no_slot) {
        unlock(block.parent);
    }
    if (!fits) {
        return no_slot;
    }
    const Slot slot = take_slot();
    blocks_[slot] = made;
    used_ += block.size;
    slots_.insert(block.id, slot);
    if (policy_) {
        policy_->insert(slot, item);
    }
    link(slot, block.parent);
    update_end(slot);
    return slot;
}

void PrefixBlocks::remove(Slot slot) {
    for (Slot child = blocks_[slot].first_child; child != no_slot; child = blocks_[slot].first_child) {
        unlink(child);
        blocks_[child].orphan = true;
        orphans_.push_back(child);
    }
    while (blocks_[slot].pins > 0) {
        unpin(slot);
    }
    leave(slot, Leaving::deleted);
}

void PrefixBlocks::adopt(Slot orphan, Slot parent) {
    std::erase(orphans_, orphan);
    blocks_[orphan].orphan = false;
    link(orphan, parent);
}

void PrefixBlocks::pin(Slot slot) {
    if (blocks_[slot].pins++ == 0) {
        lock(slot);
    }
}

void PrefixBlocks::unpin(Slot slot) {
    if (blocks_[slot].pins > 0 && --blocks_[slot].pins == 0) {
        unlock(slot);
    }
}

void PrefixBlocks::use_policy(std::string_view name) {
    auto policy = make_online(name, capacity_);
    if (policy) {
        std::vector<Slot> slots;
        for (Slot slot = 0; slot < blocks_.size(); ++slot) {
            if (blocks_[slot].size > 0) {
                slots.push_back(slot);
            }
        }
        std::ranges::stable_sort(slots, {}, [&](Slot slot) { return blocks_[slot].used; });
        for (const Slot slot : slots) {
            const Block& block = blocks_[slot];
            policy->insert(slot, {block.id, block.size, never, block.cost});
            if (block.uses > 0) {
                policy->touch(slot);
            }
        }
    }
    policy_ = std::move(policy);
    name_ = name;
}

Slot PrefixBlocks::take_slot() {
    if (free_.empty()) {
        blocks_.emplace_back();
        return static_cast<Slot>(blocks_.size() - 1);
    }
    const Slot slot = free_.back();
    free_.pop_back();
    return slot;
}

// Removes an unpinned block without children.
void PrefixBlocks::leave(Slot slot, Leaving why) {
    if (policy_) {
        policy_->remove(slot, why);
    }
    if (blocks_[slot].orphan) {
        std::erase(orphans_, slot);
    }
    if (slot == leaving_) {
        leaving_ = reached_ = no_slot;
    } else if (slot == reached_) {
        reached_ = blocks_[slot].parent;
    }
    unlink(slot);
    const std::uint32_t place = blocks_[slot].place;
    if (place != nowhere) {
        ends_[place] = ends_.back();
        blocks_[ends_[place]].place = place;
        ends_.pop_back();
    }
    used_ -= blocks_[slot].size;
    slots_.erase(blocks_[slot].id);
    blocks_[slot] = {};
    free_.push_back(slot);
}

void PrefixBlocks::link(Slot slot, Slot parent) {
    Block& block = blocks_[slot];
    block.parent = parent;
    if (parent == no_slot) {
        return;
    }
    Block& before = blocks_[parent];
    block.previous = before.last_child;
    (block.previous == no_slot ? before.first_child : blocks_[block.previous].next) = slot;
    before.last_child = slot;
    if (block.locks > 0) {
        lock(parent);
    }
    update_end(parent);
}

void PrefixBlocks::unlink(Slot slot) {
    Block& block = blocks_[slot];
    const Slot parent = block.parent;
    if (parent == no_slot) {
        return;
    }
    if (block.locks > 0) {
        unlock(parent);
    }
    (block.previous == no_slot ? blocks_[parent].first_child : blocks_[block.previous].next) = block.next;
    (block.next == no_slot ? blocks_[parent].last_child : blocks_[block.next].previous) = block.previous;
    block.parent = block.next = block.previous = no_slot;
    update_end(parent);
}

// Counts one more reason not to evict a block, and so the blocks before it.
void PrefixBlocks::lock(Slot slot) {
    for (; slot != no_slot; slot = blocks_[slot].parent) {
        if (blocks_[slot].locks++ > 0) {
            return;
        }
        locked_nbytes_ += blocks_[slot].size;
        update_end(slot);
    }
}

void PrefixBlocks::unlock(Slot slot) {
    for (; slot != no_slot; slot = blocks_[slot].parent) {
        if (--blocks_[slot].locks > 0) {
            return;
        }
        locked_nbytes_ -= blocks_[slot].size;
        update_end(slot);
    }
}

// Adds a block to the ends that may be evicted, or removes it from them.
void PrefixBlocks::update_end(Slot slot) {
    Block& block = blocks_[slot];
    const bool is_end = block.first_child == no_slot && block.locks == 0;
    if (is_end && block.place == nowhere) {
        block.place = static_cast<std::uint32_t>(ends_.size());
        ends_.push_back(slot);
    } else if (!is_end && block.place != nowhere) {
        ends_[block.place] = ends_.back();
        blocks_[ends_.back()].place = block.place;
        ends_.pop_back();
        block.place = nowhere;
    }
}

double PrefixBlocks::worth(const Block& block) const {
    return model_->worth(block.uses, block.used) * block.cost / static_cast<double>(block.size);
}

Slot PrefixBlocks::victim(const Item& incoming, double worth_of_incoming) {
    if (const Slot slot = end_of_an_orphan(); slot != no_slot) {
        return slot;
    }
    if (by_expected_reuse()) {
        return least_worth(worth_of_incoming);
    }
    const Slot slot = policy_->victim(incoming, [&](Slot one) { return blocks_[one].locks > 0; });
    return slot == no_slot ? no_slot : end_behind(slot);
}

// The end of a prefix that continues a block that is not locked; so no block after it is locked.
Slot PrefixBlocks::end_behind(Slot slot) {
    if (leaving_ != slot) {
        leaving_ = reached_ = slot;
    }
    while (blocks_[reached_].first_child != no_slot) {
        reached_ = blocks_[reached_].first_child;
    }
    return reached_;
}

// The end of a prefix whose beginning was removed; `no_slot` if none may be evicted.
Slot PrefixBlocks::end_of_an_orphan() const {
    std::vector<Slot> behind = orphans_;
    while (!behind.empty()) {
        const Slot slot = behind.back();
        behind.pop_back();
        if (blocks_[slot].place != nowhere) {
            return slot;
        }
        for (Slot child = blocks_[slot].first_child; child != no_slot; child = blocks_[child].next) {
            behind.push_back(child);
        }
    }
    return no_slot;
}

Slot PrefixBlocks::least_worth(double worth_of_incoming) {
    Slot found = no_slot;
    double least = 0.0;
    const bool all = ends_.size() <= drawn;
    for (std::size_t number = 0; number < std::min(drawn, ends_.size()); ++number) {
        const Slot slot = ends_[all ? number : (dice_ = mix64(dice_)) % ends_.size()];
        const double of_slot = worth(blocks_[slot]);
        if (found == no_slot || of_slot < least || (of_slot == least && blocks_[slot].used < blocks_[found].used)) {
            found = slot;
            least = of_slot;
        }
    }
    return least > worth_of_incoming ? no_slot : found;
}

}  // namespace farpool::policy
