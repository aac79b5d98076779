// A count-min sketch (Cormode and Muthukrishnan, 2005) of the recent uses of keys: four counters a key, the smallest of which
// is the estimate. Counters stop at 255, and all are halved from time to time, so that old uses are forgotten.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "core/hash.hpp"

namespace farpool::policy {

class FrequencySketch {
public:
    explicit FrequencySketch(std::size_t counters_per_key) : counters_per_key_(counters_per_key) {}

    // Grows the sketch for `keys` keys, to at most 256 MiB; keeps all estimates.
    void reserve(std::size_t keys) {
        while (counters_.size() < std::min(counters_per_key_ * keys, most_counters)) {
            const std::size_t old = counters_.size();
            counters_.resize(2 * old);
            std::copy_n(counters_.begin(), old, counters_.begin() + static_cast<std::ptrdiff_t>(old));
        }
    }
    void add(std::uint64_t key) {
        const std::uint8_t least = estimate(key);
        if (least == most) {
            return;
        }
        // Raise only the counters with the smallest value: the others are too high already.
        for (unsigned row = 0; row < rows; ++row) {
            std::uint8_t& counter = counters_[place(key, row)];
            counter = counter == least ? static_cast<std::uint8_t>(least + 1) : counter;
        }
    }
    std::uint8_t estimate(std::uint64_t key) const {
        std::uint8_t least = most;
        for (unsigned row = 0; row < rows; ++row) {
            least = std::min(least, counters_[place(key, row)]);
        }
        return least;
    }
    void halve() {
        for (std::uint8_t& counter : counters_) {
            counter /= 2;
        }
    }

private:
    static constexpr unsigned rows = 4;
    static constexpr std::uint8_t most = 255;
    static constexpr std::size_t most_counters = std::size_t{1} << 28;

    // Index of a key's counter in a row. The low bits choose it, so that a table of twice the size holds each counter at its
    // old index and again one old size further.
    std::size_t place(std::uint64_t key, unsigned row) const {
        const std::uint64_t hash = mix64(key);
        return (hash + row * ((hash >> 32) | 1)) & (counters_.size() - 1);
    }

    std::size_t counters_per_key_;
    std::vector<std::uint8_t> counters_ = std::vector<std::uint8_t>(1024);
};

}  // namespace farpool::policy
