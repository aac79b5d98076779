// CRC32C by carry-less multiplication of many bytes at once, if the processor has it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace farpool {

inline constexpr std::uint32_t crc32c_polynomial = 0x82f63b78u;  // bits reflected

// Lengths that `fold` and `fold_copy` accept: multiples of the step, from the minimum on, below which folding gains nothing.
inline constexpr std::size_t folding_step = 64;
inline constexpr std::size_t folding_least = 256;

struct Folding {
    const char* name;
    // Returns the CRC register (not inverted) after `nbytes` more bytes.
    std::uint32_t (*fold)(std::uint32_t crc, const unsigned char* data, std::size_t nbytes) noexcept;
    // Folds and copies: each byte is loaded once, so the checksum is of the stored bytes.
    std::uint32_t (*fold_copy)(std::uint32_t crc, unsigned char* to, const unsigned char* from, std::size_t nbytes) noexcept;
};

// Foldings that this processor supports, fastest first.
std::span<const Folding> foldings() noexcept;

}  // namespace farpool
