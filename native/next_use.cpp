#include "next_use.hpp"

namespace farpool {

void NextUse::insert(std::int64_t block, std::int64_t next_use) {
    const auto [found, added] = uses_.try_emplace(block, next_use);
    if (!added) {
        order_.erase({~found->second, block});
        found->second = next_use;
    }
    order_.emplace(~next_use, block);
}

bool NextUse::remove(std::int64_t block) {
    const auto found = uses_.find(block);
    if (found == uses_.end()) {
        return false;
    }
    order_.erase({~found->second, block});
    uses_.erase(found);
    return true;
}

}  // namespace farpool
