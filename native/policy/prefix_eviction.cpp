#include "policy/prefix_eviction.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/error.hpp"
#include "core/hash.hpp"

namespace farpool::policy {

namespace {

// Blocks in a shadow cache. Fewer make the comparison rough, more make it slow.
constexpr std::uint64_t shadow_blocks = 2048;
// Blocks that the model remembers for each block that fits into the cache.
constexpr std::uint64_t remembered = 8;
// The mean size of this many blocks counts as the mean size of all.
constexpr std::size_t typical_blocks = 64;
// Sampled uses after which gains are compared: more than most prefixes have blocks, because these are used together.
constexpr std::size_t batch = 64;

}  // namespace

PrefixEviction::PrefixEviction(std::uint64_t capacity, std::string_view policy)
    : blocks_(policy.empty() ? online_policies.front() : policy, capacity, model_), choosing_(policy.empty()) {}

bool PrefixEviction::insert(std::uint64_t id, std::uint64_t parent, std::uint64_t size, double cost, std::uint32_t tenant,
                            std::vector<Evicted>& evicted) {
    if (id == 0 || id == parent) {
        fail_value("block " + std::to_string(id) + " with parent " + std::to_string(parent) + " is no block of a prefix");
    }
    if (size == 0 || !(cost >= 0.0) || !std::isfinite(cost)) {
        fail_value("block of " + std::to_string(size) + " bytes and a cost of " + std::to_string(cost) +
                   " s, expected 1 byte or more and a cost that is not negative");
    }
    const Slot before = parent == 0 ? no_slot : blocks_.find(parent);
    if (const Slot slot = blocks_.find(id); slot != no_slot) {
        if (blocks_.is_orphan(slot) && before != no_slot) {
            blocks_.adopt(slot, before);
        }
        return true;
    }
    // Not by the first block alone: caches of KV begin with a small block that describes the others.
    if (!started_ &&
        (blocks_.size() + 1 >= typical_blocks || size > capacity() / 2 || blocks_.used() > capacity() / 2 - size)) {
        start((blocks_.used() + size) / (blocks_.size() + 1));
    }
    NewBlock block{.id = id, .parent = before, .size = size, .cost = cost, .uses = model_.use(id), .tenant = tenant};
    if (parent != 0) {
        const std::uint64_t further = before != no_slot    ? blocks_.sampled_before(before)
                                      : parent == refused_ ? before_refused_
                                                           : 0;
        block.sampled_before = in_sample(parent) ? parent : further;
    }
    show(block);
    TenantCounts& counts = of_tenant(tenant);
    const std::size_t gone = evicted.size();
    const bool admitted = (parent == 0 || before != no_slot) && blocks_.insert(block, evicted) != no_slot;
    for (std::size_t number = gone; number < evicted.size(); ++number) {
        TenantCounts& lost = of_tenant(evicted[number].tenant);
        --lost.blocks;
        lost.nbytes -= evicted[number].size;
        ++lost.evicted;
    }
    if (!admitted) {
        refused_ = id;
        before_refused_ = block.sampled_before;
        ++counts.refused;
        return false;
    }
    ++counts.blocks;
    counts.nbytes += size;
    ++counts.inserted;
    return true;
}

bool PrefixEviction::touch(std::uint64_t id) {
    const Slot slot = blocks_.find(id);
    if (slot == no_slot) {
        return false;
    }
    const std::uint32_t uses = model_.use(id);
    TenantCounts& counts = of_tenant(blocks_.tenant(slot));
    ++counts.hits;
    counts.hit_nbytes += blocks_.nbytes(slot);
    counts.saved += blocks_.cost(slot);
    blocks_.touch(slot, uses);
    show({.id = id,
          .size = blocks_.nbytes(slot),
          .cost = blocks_.cost(slot),
          .uses = uses,
          .sampled_before = blocks_.sampled_before(slot)});
    return true;
}

bool PrefixEviction::remove(std::uint64_t id) {
    const Slot slot = blocks_.find(id);
    if (slot == no_slot) {
        return false;
    }
    TenantCounts& counts = of_tenant(blocks_.tenant(slot));
    --counts.blocks;
    counts.nbytes -= blocks_.nbytes(slot);
    blocks_.remove(slot);
    for (Shadow& shadow : shadows_) {
        if (const Slot other = shadow.blocks.find(id); other != no_slot) {
            shadow.blocks.remove(other);
        }
    }
    return true;
}

bool PrefixEviction::pin(std::uint64_t id) {
    const Slot slot = blocks_.find(id);
    if (slot != no_slot) {
        blocks_.pin(slot);
    }
    return slot != no_slot;
}

bool PrefixEviction::unpin(std::uint64_t id) {
    const Slot slot = blocks_.find(id);
    if (slot != no_slot) {
        blocks_.unpin(slot);
    }
    return slot != no_slot;
}

std::vector<ShadowCounts> PrefixEviction::shadows() const {
    std::vector<ShadowCounts> counts;
    for (const Shadow& shadow : shadows_) {
        counts.push_back({shadow.blocks.policy(), shadow.hits, shadow.saved});
    }
    return counts;
}

bool PrefixEviction::in_sample(std::uint64_t id) const { return (mix64(id) >> 32 & mask_) == 0; }

TenantCounts& PrefixEviction::of_tenant(std::uint32_t tenant) {
    if (tenant >= tenants_.size()) {
        tenants_.resize(std::size_t{tenant} + 1);
    }
    return tenants_[tenant];
}

// Makes the model and the shadows, whose sizes depend on the number of blocks of about this size that the cache holds.
void PrefixEviction::start(std::uint64_t size) {
    started_ = true;
    const std::uint64_t blocks = std::max<std::uint64_t>(1, capacity() / size);
    model_.remember(remembered * std::max(blocks, shadow_blocks / 2));
    if (!choosing_) {
        return;
    }
    mask_ = std::bit_floor(std::max<std::uint64_t>(1, blocks / shadow_blocks)) - 1;
    for (const std::string_view policy : online_policies) {
        shadows_.push_back({.blocks = PrefixBlocks(policy, std::max<std::uint64_t>(1, capacity() / sampled()), model_)});
    }
    // Gains from before the last two fillings of a shadow count about a third.
    const double batches = 2.0 * static_cast<double>(blocks / sampled()) / static_cast<double>(batch);
    keep_ = 1.0 - 1.0 / std::max(8.0, batches);
}

// Reports a use to the shadows.
void PrefixEviction::show(const NewBlock& block) {
    if (shadows_.empty() || !in_sample(block.id)) {
        return;
    }
    std::vector<Evicted> unused;
    for (Shadow& shadow : shadows_) {
        if (const Slot slot = shadow.blocks.find(block.id); slot != no_slot) {
            ++shadow.hits;
            shadow.saved += block.cost;
            shadow.gain += block.cost;
            shadow.blocks.touch(slot, block.uses);
            continue;
        }
        NewBlock inside = block;
        inside.parent = block.sampled_before == 0 ? no_slot : shadow.blocks.find(block.sampled_before);
        if (block.sampled_before == 0 || inside.parent != no_slot) {
            shadow.blocks.insert(inside, unused);
        }
    }
    if (++shown_ == batch) {
        shown_ = 0;
        compare();
    }
}

// Compares the gains of a batch, and changes the policy if another one is significantly better.
void PrefixEviction::compare() {
    const auto current = std::ranges::find(shadows_, policy(), [](const Shadow& shadow) { return shadow.blocks.policy(); });
    const double gain = current->gain;
    const Shadow* best = nullptr;
    for (Shadow& shadow : shadows_) {
        const double difference = shadow.gain - gain;
        shadow.gain = 0.0;
        shadow.difference = keep_ * shadow.difference + difference;
        shadow.squares = keep_ * keep_ * shadow.squares + difference * difference;
        const bool surely = shadow.difference > 2.0 * std::sqrt(shadow.squares);
        if (surely && (best == nullptr || shadow.difference > best->difference)) {
            best = &shadow;
        }
    }
    if (best != nullptr) {
        blocks_.use_policy(best->blocks.policy());
        ++switches_;
        for (Shadow& shadow : shadows_) {
            shadow.difference = shadow.squares = 0.0;
        }
    }
}

}  // namespace farpool::policy
