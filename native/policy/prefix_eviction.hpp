// Eviction for a cache of prefixes that chooses its policy while it runs.
//
// Beside the blocks that are in, a shadow cache of each policy is run: metadata only, on a sample of blocks by hash and with
// the same share of the capacity (Waldspurger et al., "Efficient MRC construction with SHARDS", 2015). Small caches are sampled
// whole. In a sample a block's parent is the nearest block before it that is in the sample, too, so prefixes stay prefixes. A
// shadow's gain is the recomputing that its hits save. Another policy takes over, with the blocks as they are, when its gain is
// larger than that of the one in use by more than twice the standard error of the difference; then the comparison starts anew.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "policy/prefix_blocks.hpp"

namespace farpool::policy {

// Policies that are compared. The first is in use until another one is surely better.
constexpr std::array<std::string_view, 6> online_policies = {"lru", expected_reuse, "arc", "s3-fifo", "w-tiny-lfu", "gdsf"};

struct TenantCounts {
    std::uint64_t blocks = 0;  // that are in
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

    // Brings a block in; `parent` is 0 for the first of a prefix, and ids are never 0. A block that is in stays as it is. Ids
    // of blocks that had to leave are added to `evicted`. False if it was refused: its parent is not in, it does not fit beside
    // what is pinned, or what would have to leave is worth more.
    bool insert(std::uint64_t id, std::uint64_t parent, std::uint64_t size, double cost, std::uint32_t tenant,
                std::vector<Evicted>& evicted);
    // Notes a hit; false if the block is not in.
    bool touch(std::uint64_t id);
    bool remove(std::uint64_t id);
    bool pin(std::uint64_t id);
    bool unpin(std::uint64_t id);
    // Goes on with another policy and the blocks as they are; shadows may change it again.
    void use_policy(std::string_view name) { blocks_.use_policy(name); }
    bool contains(std::uint64_t id) const { return blocks_.find(id) != no_slot; }

    std::uint64_t capacity() const noexcept { return blocks_.capacity(); }
    std::uint64_t used() const noexcept { return blocks_.used(); }
    std::size_t size() const noexcept { return blocks_.size(); }
    const std::string& policy() const noexcept { return blocks_.policy(); }
    std::uint64_t switches() const noexcept { return switches_; }
    // One block in so many is in the sample.
    std::uint64_t sampled() const noexcept { return mask_ + 1; }
    const std::vector<TenantCounts>& tenants() const noexcept { return tenants_; }
    std::vector<ShadowCounts> shadows() const;

private:
    struct Shadow {
        PrefixBlocks blocks;
        std::uint64_t hits = 0;
        double saved = 0.0;
        double gain = 0.0;        // in this batch
        double difference = 0.0;  // of gains to the policy in use, recent batches counting more
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
    std::uint64_t refused_ = 0;  // the block refused last, for the sample's parent of what follows it
    std::uint64_t before_refused_ = 0;
    std::size_t shown_ = 0;  // to the shadows, in this batch
    double keep_ = 1.0;      // share of the earlier batches that counts after another one
    std::uint64_t switches_ = 0;
};

}  // namespace farpool::policy
