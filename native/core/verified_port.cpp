#include "core/verified_port.hpp"

#include <cstdio>

#include "core/crc32c.hpp"

namespace farpool {

namespace {

std::string hex(std::uint32_t value) {
    char text[11];
    std::snprintf(text, sizeof text, "0x%08x", value);
    return text;
}

}  // namespace

void VerifiedPort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    Sum expected{};
    {
        const std::lock_guard lock(mutex_);
        const auto found = sums_.find(offset);
        if (found == sums_.end()) {
            fail_checksum(name_, "the extent at offset " + std::to_string(offset) + " (" + std::to_string(nbytes) +
                                     " bytes) has no checksum: it was never written, or its last write failed");
        }
        expected = found->second;
    }
    if (expected.nbytes != nbytes) {
        fail_checksum(name_, "the extent at offset " + std::to_string(offset) + " was written with " +
                                 std::to_string(expected.nbytes) + " bytes and cannot be verified by a read of " +
                                 std::to_string(nbytes));
    }
    inner_.read(offset, into, nbytes);
    const std::uint32_t found = crc32c(into, nbytes);
    if (found != expected.crc) {
        fail_checksum(name_, "the " + std::to_string(nbytes) + " bytes read at offset " + std::to_string(offset) +
                                 " are not those that were written: CRC32C " + hex(found) + ", expected " + hex(expected.crc));
    }
}

void VerifiedPort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    const std::uint32_t crc = crc32c(from, nbytes);
    forget(offset);  // so that a failed write leaves no checksum
    inner_.write(offset, from, nbytes);
    const std::lock_guard lock(mutex_);
    sums_.insert_or_assign(offset, Sum{nbytes, crc});
}

void VerifiedPort::forget(std::uint64_t offset) {
    const std::lock_guard lock(mutex_);
    sums_.erase(offset);
}

std::size_t VerifiedPort::tracked() const {
    const std::lock_guard lock(mutex_);
    return sums_.size();
}

}  // namespace farpool
