// CRC32C (Castagnoli, RFC 3720): hardware instructions where the processor has them, tables elsewhere.
#pragma once

#include <cstddef>
#include <cstdint>

namespace farpool {

// Continues from `value`, the result for the bytes before (0 at the beginning).
std::uint32_t crc32c(const void* data, std::size_t nbytes, std::uint32_t value = 0) noexcept;

// The same without special instructions; chosen by crc32c where there are none.
std::uint32_t crc32c_portable(const void* data, std::size_t nbytes, std::uint32_t value = 0) noexcept;

}  // namespace farpool
