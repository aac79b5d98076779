#include "pager/row_policy.hpp"

#include <algorithm>

#include "pager/tape.hpp"

namespace farpool::pager {

namespace {

constexpr std::int64_t sampled = 256;   // approximate number of blocks that a shadow has room for
constexpr int period = 1024;            // sampled accesses between two judgements
constexpr double clearly = 1.0 / 16.0;  // the other policy must miss this share fewer bytes to be chosen
constexpr double forgotten = 0.5;       // share of the missed bytes that is dropped at each judgement
constexpr std::int64_t most_uses = 16;  // uses that count: rows that were popular must be evicted in the end

bool in_sample(BlockId block, std::int64_t one_of) {
    const auto hash = static_cast<std::uint64_t>(block) * 0x9E3779B97F4A7C15u;
    return static_cast<std::int64_t>(hash >> 33) % one_of == 0;
}

}  // namespace

RowPolicy::RowPolicy(std::int64_t room) : room_(room) {}

void RowPolicy::set_room(std::int64_t room) {
    room_ = room;
    one_of_ = 0;
}

std::int64_t RowPolicy::worth(bool by_frequency, std::int64_t uses, std::int64_t now, std::int64_t floor) {
    return by_frequency ? floor + std::min(uses, most_uses) * (now - floor) : now;
}

std::int64_t RowPolicy::access(BlockId block, std::int64_t nbytes, std::int64_t uses, std::int64_t position) {
    // Accesses to rows of one table in a row share a position.
    now_ = std::max(now_ + 1, moment(position));
    if (one_of_ == 0) {
        one_of_ = std::max(std::int64_t{1}, room_ / std::max(std::int64_t{1}, nbytes) / sampled);
        recency_.clear(room_ / one_of_);
        frequency_.clear(room_ / one_of_);
    }
    if (in_sample(block, one_of_)) {
        recency_.access(block, nbytes, now_);
        frequency_.access(block, nbytes, now_);
        if (++judged_ >= period) {
            judge();
        }
    }
    return worth(by_frequency_, uses, now_, std::min(floor_, now_));
}

void RowPolicy::judge() {
    judged_ = 0;
    if (!recency_.full() || !frequency_.full()) {
        return;
    }
    const double ours = by_frequency_ ? frequency_.missed() : recency_.missed();
    const double other = by_frequency_ ? recency_.missed() : frequency_.missed();
    if (other * (1.0 + clearly) < ours) {
        by_frequency_ = !by_frequency_;
    }
    recency_.forget(forgotten);
    frequency_.forget(forgotten);
}

void RowPolicy::Shadow::clear(std::int64_t room) {
    room_ = room;
    used_ = floor_ = 0;
    missed_ = 0.0;
    rows_.clear();
    order_.clear();
}

void RowPolicy::Shadow::access(BlockId block, std::int64_t nbytes, std::int64_t now) {
    const auto [found, fresh] = rows_.try_emplace(block, Row{0, nbytes, 0});
    Row& row = found->second;
    if (fresh) {
        missed_ += static_cast<double>(nbytes);
        used_ += nbytes;
    } else {
        order_.erase({row.worth, block});
    }
    while (used_ > room_ && !order_.empty()) {
        const auto [worth, victim] = *order_.begin();
        order_.erase(order_.begin());
        floor_ = std::max(floor_, worth);
        const auto left = rows_.find(victim);
        used_ -= left->second.nbytes;
        rows_.erase(left);
    }
    ++row.uses;
    row.worth = RowPolicy::worth(by_frequency_, row.uses, now, std::min(floor_, now));
    order_.emplace(row.worth, block);
}

}  // namespace farpool::pager
