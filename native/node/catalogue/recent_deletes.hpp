// The keys that were deleted a short time ago, by their hashes.
//
// A catalogue refuses copies of them from other nodes: such a copy may have been read before its key was deleted there, and
// would bring the object back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <unordered_map>
#include <utility>

#include "core/clock.hpp"

namespace farpool {

class RecentDeletes {
public:
    static constexpr std::uint64_t kept_ms = 60'000;
    static constexpr std::size_t count_max = 65536;

    void add(std::uint64_t hash) {
        const std::uint64_t now = now_milliseconds();
        while (!order_.empty() && (order_.front().first <= now || order_.size() >= count_max)) {
            const auto [until, oldest] = order_.front();
            order_.pop_front();
            if (const auto known = until_.find(oldest); known != until_.end() && known->second == until) {
                until_.erase(known);
            }
        }
        order_.emplace_back(now + kept_ms, hash);
        until_.insert_or_assign(hash, now + kept_ms);
    }
    bool contains(std::uint64_t hash) const {
        const auto known = until_.find(hash);
        return known != until_.end() && known->second > now_milliseconds();
    }

private:
    std::unordered_map<std::uint64_t, std::uint64_t> until_;     // ms since 1970, by hash
    std::deque<std::pair<std::uint64_t, std::uint64_t>> order_;  // ms since 1970, and hash; the oldest first
};

}  // namespace farpool
