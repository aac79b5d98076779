// A 64-bit hash of keys, fast on short ones. Seeded; not cryptographic.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace farpool {

// The finalizer of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
inline std::uint64_t mix64(std::uint64_t x) noexcept {
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

// Hash of a key. Each word is mixed into the state by a bijection, so keys of one length that differ in one word never collide.
inline std::uint64_t hash64(const void* data, std::size_t nbytes, std::uint64_t seed) noexcept {
    const auto* bytes = static_cast<const unsigned char*>(data);
    std::uint64_t state = mix64(seed ^ nbytes);
    while (nbytes > 0) {
        std::uint64_t word = 0;
        const std::size_t step = nbytes < 8 ? nbytes : 8;
        std::memcpy(&word, bytes, step);
        state = mix64(state ^ word);
        bytes += step;
        nbytes -= step;
    }
    return state;
}

}  // namespace farpool
