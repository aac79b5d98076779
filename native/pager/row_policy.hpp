// Eviction of rows of tables, whose next uses no tape knows: by recency or by frequency.
//
// Blocks of unknown next use are evicted in the order of a time until which they are worth keeping. By recency this is the time
// of their latest access. By frequency it is later, the more often they were used since they were fetched: a block that was
// used n times is kept as if its latest access were n times as far above the floor. The floor is the time until which the
// latest victim was worth keeping, so it rises as blocks are evicted, and rows that were popular long ago are evicted too (the
// idea of dynamic aging: M. Arlitt et al., "Evaluating content management techniques for Web proxy caches", 2000).
//
// Which of the two is better is measured: each has a shadow cache, which knows sizes and no bytes, for a spatial sample of the
// blocks (the blocks whose numbers have a certain hash). The pool follows the one that misses clearly fewer bytes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <set>
#include <unordered_map>
#include <utility>

#include "pager/allocated.hpp"
#include "pager/messages.hpp"

namespace farpool::pager {

class RowPolicy {
public:
    // `room`: bytes that rows may occupy: the whole arena, because other uses are not known in advance.
    explicit RowPolicy(std::int64_t room);

    void set_room(std::int64_t room);
    // Notes the `uses`-th access to a block of `nbytes` bytes since it was fetched, with the tape at `position`. Returns the
    // time until which it is worth keeping.
    std::int64_t access(BlockId block, std::int64_t nbytes, std::int64_t uses, std::int64_t position);
    // Notes that a block was evicted that was worth keeping until `worth`.
    void left(std::int64_t worth) { floor_ = std::max(floor_, worth); }
    bool by_frequency() const noexcept { return by_frequency_; }
    // Bytes of memory that the samples hold.
    std::int64_t allocated_bytes() const { return recency_.allocated_bytes() + frequency_.allocated_bytes(); }

private:
    class Shadow {
    public:
        explicit Shadow(bool by_frequency) : by_frequency_(by_frequency) {}
        void clear(std::int64_t room);
        void access(BlockId block, std::int64_t nbytes, std::int64_t now);
        double missed() const noexcept { return missed_; }
        bool full() const noexcept { return floor_ > 0; }
        void forget(double share) { missed_ *= 1.0 - share; }
        std::int64_t allocated_bytes() const { return allocated(rows_) + allocated(order_); }

    private:
        struct Row {
            std::int64_t worth;
            std::int64_t nbytes;
            std::int64_t uses;
        };
        bool by_frequency_;
        std::int64_t room_ = 0;
        std::int64_t used_ = 0;
        std::int64_t floor_ = 0;
        double missed_ = 0.0;  // bytes that were missed recently
        std::unordered_map<BlockId, Row> rows_;
        std::set<std::pair<std::int64_t, BlockId>> order_;
    };

    static std::int64_t worth(bool by_frequency, std::int64_t uses, std::int64_t now, std::int64_t floor);
    void judge();

    std::int64_t room_;
    std::int64_t one_of_ = 0;  // the sample has one block of this many; 0 before the first access
    std::int64_t now_ = 0;
    std::int64_t floor_ = 0;
    bool by_frequency_ = false;
    int judged_ = 0;  // sampled accesses since the shadows were compared
    Shadow recency_{false};
    Shadow frequency_{true};
};

}  // namespace farpool::pager
