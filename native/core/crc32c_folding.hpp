// CRC32C by carry-less multiplication of many bytes at once, where the processor has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace farpool {

inline constexpr std::uint32_t crc32c_polynomial = 0x82f63b78u;  // bits reflected

// What `fold` and `fold_copy` take: a multiple of the step, at least the least. Below, there is nothing to win.
inline constexpr std::size_t folding_step = 64;
inline constexpr std::size_t folding_least = 256;

struct Folding {
    const char* name;
    // The register (not inverted) after `nbytes` more.
    std::uint32_t (*fold)(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) noexcept;
    // The same, and stores the bytes: each is loaded once, so what is stored is what is summed.
    std::uint32_t (*fold_copy)(std::uint32_t crc, unsigned char* to, const unsigned char* from,
                               std::size_t nbytes) noexcept;
};

// Those that this processor has instructions for, the fastest first.
std::span<const Folding> foldings() noexcept;

}  // namespace farpool
