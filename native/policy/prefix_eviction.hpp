// Eviction for a cache of prefixes that chooses its policy while it runs.
//
// For each policy there is a shadow cache: metadata only, on a sample of blocks by hash and with the same share of the capacity
// (Waldspurger et al., "Efficient MRC construction with SHARDS", 2015). Small caches are sampled whole. In a sample, a block's
// parent is the nearest block before it that is in the sample too, so prefixes stay prefixes. A shadow's gain is the
// recomputing that its hits save. Another policy takes over, with the blocks in the cache, if its gain exceeds the gain of the
// present policy by more than twice the standard error of the difference; then the comparison starts again.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "policy/prefix_blocks.hpp"

namespace farpool::policy {

// Policies that are compared. The first is in use until another one is significantly better.
constexpr std::array<std::string_view, 6> online_policies = {"lru", expected_reuse, "arc", "s3-fifo", "w-tiny-lfu", "gdsf"};

struct TenantCounts {
    std::uint64_t blocks = 0;  // in the cache
    std::uint64_t nbytes = 0;
    std::uint64_t hits = 0;
    std::uint64_t hit_nbytes = 0;
    double saved = 0.0;  // seconds of recomputing
    std::uint64_t inserted = 0;
    std::uint64_t refused = 0;
    std::uint64_t evicted = 0;
};

struct ShadowCounts {
    std::string policy;
    std::uint64_t hits = 0;
    double saved = 0.0;
};

class PrefixEviction {
public:
    // `policy`: the one to use, without shadows; empty to choose.
    PrefixEviction(std::uint64_t capacity, std::string_view policy);

    // Inserts a block; `parent` is 0 for the first block of a prefix, and ids are never 0. A block in the cache stays
    // unchanged. Ids of evicted blocks are added to `evicted`. False if the block was refused: its parent is not in the cache,
    // it does not fit next to the pinned blocks, or the blocks that it would replace are worth more.
    bool insert(std::uint64_t id, std::uint64_t parent, std::uint64_t size, double cost, std::uint32_t tenant,
                std::vector<Evicted>& evicted);
    // Notes a hit; false if the block is not in the cache.
    bool touch(std::uint64_t id);
    bool remove(std::uint64_t id);
    bool pin(std::uint64_t id);
    bool unpin(std::uint64_t id);
    // Replaces the policy and keeps the blocks; the shadows may change it again.
    void use_policy(std::string_view name) { blocks_.use_policy(name); }
    bool contains(std::uint64_t id) const { return blocks_.find(id) != no_slot; }

    std::uint64_t capacity() const noexcept { return blocks_.capacity(); }
    std::uint64_t used() const noexcept { return blocks_.used(); }
    std::size_t size() const noexcept { return blocks_.size(); }
    const std::string& policy() const noexcept { return blocks_.policy(); }
    std::uint64_t switches() const noexcept { return switches_; }
    // One block of this many is in the sample.
    std::uint64_t sampled() const noexcept { return mask_ + 1; }
    const std::vector<TenantCounts>& tenants() const noexcept { return tenants_; }
    std::vector<ShadowCounts> shadows() const;

private:
    struct Shadow {
        PrefixBlocks blocks;
        std::uint64_t hits = 0;
        double saved = 0.0;
        double gain = 0.0;        // in this batch
        double difference = 0.0;  // between its gains and the present policy's; recent batches count more
        double squares = 0.0;
    };
    bool in_sample(std::uint64_t id) const;
    void start(std::uint64_t size);
    void show(const NewBlock& block);
    void compare();
    TenantCounts& of_tenant(std::uint32_t tenant);

    ReuseModel model_;
    PrefixBlocks blocks_;
    bool choosing_;
    bool started_ = false;
    std::uint64_t mask_ = 0;
    std::vector<Shadow> shadows_;
    std::vector<TenantCounts> tenants_;
    std::uint64_t refused_ = 0;  // the block refused last, to find the parent in the sample of the blocks after it
    std::uint64_t before_refused_ = 0;
    std::size_t shown_ = 0;  // uses that the shadows received in this batch
    double keep_ = 1.0;      // share of the earlier batches that counts after another one
    std::uint64_t switches_ = 0;
};

}  // namespace farpool::policy
