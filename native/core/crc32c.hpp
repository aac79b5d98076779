// CRC32C (Castagnoli, RFC 3720): hardware instructions if the processor has them, otherwise tables.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farpool {

struct Folding;

// CRC32C of a buffer, continued from `value`, the result for the bytes before it (0 at the beginning).
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value = 0) noexcept;

// Copies and returns the checksum of exactly the bytes that `to` has afterwards, even if another process changes `from` during
// the copy. The buffers must not overlap.
std::uint32_t copy_crc32c(void* to, const void* from, std::size_t nbytes, std::uint32_t value = 0) noexcept;

// The two functions above with a given one of foldings(), or with none (null); the functions above take the fastest.
std::uint32_t crc32c_by(const Folding* folding, const void* data, std::size_t nbytes, std::uint32_t value) noexcept;
std::uint32_t copy_crc32c_by(const Folding* folding, void* to, const void* from, std::size_t nbytes,
                             std::uint32_t value) noexcept;

// crc32c without special instructions, its fallback if the processor has none.
std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t value = 0) noexcept;

}  // namespace farpool
