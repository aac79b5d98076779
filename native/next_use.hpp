// Belady's rule over known next uses.
#pragma once

#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>

namespace farpool {

class NextUse {
public:
    void insert(std::int64_t block, std::int64_t next_use);
    bool remove(std::int64_t block);
    std::int64_t victim() const { return order_.begin()->second; }
    std::int64_t victim_next_use() const { return order_.empty() ? -1 : ~order_.begin()->first; }
    std::size_t size() const noexcept { return uses_.size(); }
    bool contains(std::int64_t block) const { return uses_.contains(block); }

private:
    // The complement of the next use reverses its order without overflow: farthest first, then the lower number.
    std::set<std::pair<std::int64_t, std::int64_t>> order_;
    std::unordered_map<std::int64_t, std::int64_t> uses_;
};

}  // namespace farpool
