// Seeded random numbers, so that a failed trial can be repeated exactly.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "core/hash.hpp"

namespace farpool::fuzz {

class Dice {
public:
    explicit Dice(std::uint64_t seed) : state_(seed) {}

    std::uint64_t word() { return mix64(state_++); }
    // A number from 0 to limit - 1.
    std::uint64_t below(std::uint64_t limit) { return word() % limit; }
    bool one_in(std::uint64_t times) { return below(times) == 0; }
    template <typename T>
    const T& of(const std::vector<T>& choices) {
        return choices[static_cast<std::size_t>(below(choices.size()))];
    }
    // A number from edge cases: 0, small ones, ones close to the maximum, powers of two and one less, or any.
    std::uint64_t any() {
        switch (below(6)) {
            case 0:
                return 0;
            case 1:
                return below(300);
            case 2:
                return ~below(300);
            case 3:
                return std::uint64_t{1} << below(64);
            case 4:
                return (std::uint64_t{1} << below(64)) - 1;
            default:
                return word();
        }
    }
    std::string bytes(std::size_t nbytes) {
        std::string made(nbytes, '\0');
        std::uint64_t now = word();
        for (std::size_t at = 0; at < nbytes; ++at) {
            now = at % 8 == 0 ? mix64(now) : now >> 8;
            made[at] = static_cast<char>(now);
        }
        return made;
    }
    void flip(void* data, std::size_t nbytes, std::uint64_t flips) {
        for (std::uint64_t flip = 0; nbytes > 0 && flip < flips; ++flip) {
            static_cast<unsigned char*>(data)[below(nbytes)] ^= static_cast<unsigned char>(1u << below(8));
        }
    }

private:
    std::uint64_t state_;
};

}  // namespace farpool::fuzz
