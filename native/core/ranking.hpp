// Rendezvous hashing: every key ranks the members, and a member that joins or leaves changes no rank among the others.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numeric>
#include <string_view>
#include <utility>
#include <vector>

#include "core/hash.hpp"

namespace farpool {

class Ranking {
public:
    // One seed and one weight for each member. A member is the first of a share of the keys that is proportional to its weight;
    // one with weight 0 comes last for all of them.
    Ranking(std::vector<std::uint64_t> seeds, std::vector<double> weights)
        : seeds_(std::move(seeds)), weights_(std::move(weights)) {
        uniform_ = std::all_of(weights_.begin(), weights_.end(), [&](double weight) { return weight == weights_.front(); });
    }

    std::size_t size() const { return seeds_.size(); }

    // The member of highest rank for a key. There must be one.
    std::size_t first(std::string_view key) const {
        std::size_t first = 0;
        Score best = score(key, 0);
        for (std::size_t member = 1; member < seeds_.size(); ++member) {
            const Score other = score(key, member);
            if (best < other) {
                first = member;
                best = other;
            }
        }
        return first;
    }

    // All members, the highest rank first.
    std::vector<std::size_t> order(std::string_view key) const {
        std::vector<Score> scores(seeds_.size());
        for (std::size_t member = 0; member < seeds_.size(); ++member) {
            scores[member] = score(key, member);
        }
        std::vector<std::size_t> order(seeds_.size());
        std::iota(order.begin(), order.end(), std::size_t{0});
        std::stable_sort(order.begin(), order.end(), [&](std::size_t a, std::size_t b) { return scores[b] < scores[a]; });
        return order;
    }

private:
    struct Score {
        double weighted;
        std::uint64_t hash;
        bool operator<(const Score& other) const {
            return weighted != other.weighted ? weighted < other.weighted : hash < other.hash;
        }
    };

    // With equal weights the hash alone decides, so the order is the one that releases without weights compute. Otherwise the
    // hash is read as a uniform number u, and log(u) / weight is highest for each member with a probability proportional to its
    // weight.
    Score score(std::string_view key, std::size_t member) const {
        const std::uint64_t hash = hash64(key.data(), key.size(), seeds_[member]);
        if (uniform_) {
            return {0.0, hash};
        }
        const double weight = weights_[member];
        const double logarithm = std::log((static_cast<double>(hash) + 0.5) * 0x1p-64);
        return {weight > 0 ? logarithm / weight : -std::numeric_limits<double>::infinity(), hash};
    }

    std::vector<std::uint64_t> seeds_;
    std::vector<double> weights_;
    bool uniform_ = true;
};

}  // namespace farpool
