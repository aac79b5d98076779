// CRC32C (Castagnoli, RFC 3720): hardware instructions where the processor has them, tables elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farpool {

struct Folding;

// Continues from `value`, the result for the bytes before (0 at the beginning).
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value = 0) noexcept;

// Copies, and returns the checksum of the very bytes that `to` then has, even if another process changes `from`
// meanwhile. The two do not overlap.
std::uint32_t copy_crc32c(void* to, const void* from, std::size_t nbytes, std::uint32_t value = 0) noexcept;

// The same by one of foldings(), or by none of them (null). What is above takes the fastest.
std::uint32_t crc32c_by(const Folding* folding, const void* data, std::size_t nbytes, std::uint32_t value) noexcept;
std::uint32_t copy_crc32c_by(const Folding* folding, void* to, const void* from, std::size_t nbytes,
                             std::uint32_t value) noexcept;

// The same as crc32c without special instructions; chosen by it where there are none.
std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t value = 0) noexcept;

}  // namespace farpool
