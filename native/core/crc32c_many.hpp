// Checksums of many buffers at once, such as objects of a node on this host that a program has just mapped.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace farpool {

struct Summed {
    const std::byte* data;
    std::size_t nbytes;
    std::uint32_t crc = 0;
};

// Computes the CRC32C of each buffer. If they are large together, a second thread of the process helps, even with a single
// large buffer.
void crc32c_many(std::span<Summed> buffers);

// CRC32C of two buffers that follow each other, from the checksum of each and the size of the second.
std::uint32_t joined_crc32c(std::uint32_t first, std::uint32_t second, std::size_t second_nbytes) noexcept;

}  // namespace farpool
