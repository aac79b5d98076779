#include "wire/segment.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "core/crc32c.hpp"
#include "wire/frame.hpp"

namespace farpool {

void seal(SegmentHeader& header) noexcept {
    std::memcpy(header.magic, segment_magic, sizeof segment_magic);
    header.version = segment_version;
    header.crc = crc32c(&header, offsetof(SegmentHeader, crc));
}

void seal(ObjectHeader& header, const void* key) noexcept {
    std::memcpy(header.magic, object_magic, sizeof object_magic);
    header.crc = crc32c(key, header.key_nbytes, crc32c(&header, offsetof(ObjectHeader, crc)));
}

const char* segment_fault(const SegmentHeader& header, std::uint64_t file_nbytes, SegmentKind kind) noexcept {
    if (file_nbytes < segment_header_nbytes || std::memcmp(header.magic, segment_magic, sizeof segment_magic) != 0) {
        return "is not a segment file";
    }
    if (header.version != segment_version) {
        return header.version == 1 ? "is a segment file of version 1, which this farpool reads no more: it reads version 2"
                                   : "is a segment file of another version; this farpool reads version 2";
    }
    if (header.crc != crc32c(&header, offsetof(SegmentHeader, crc))) {
        return "has a damaged header";
    }
    if (header.features != 0) {
        return "has features that this farpool does not know";
    }
    if (header.kind != static_cast<std::uint32_t>(kind) || header.capacity != file_nbytes - segment_header_nbytes) {
        return "is a segment file of another kind or size";
    }
    return nullptr;
}

bool is_whole(const ObjectHeader& header, std::uint64_t extent_nbytes, bool with_payload) noexcept {
    if (extent_nbytes < unit_nbytes || std::memcmp(header.magic, object_magic, sizeof object_magic) != 0 ||
        header.key_nbytes == 0 || header.key_nbytes > largest_key || payload_at(header.key_nbytes) > extent_nbytes ||
        (with_payload && header.nbytes > extent_nbytes - payload_at(header.key_nbytes))) {
        return false;
    }
    return header.crc == crc32c(&header + 1, header.key_nbytes, crc32c(&header, offsetof(ObjectHeader, crc)));
}

Mapping::Mapping(int fd, std::size_t nbytes, bool writable) : nbytes_(nbytes) {
    void* address = mmap(nullptr, nbytes, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) {
        throw std::system_error(errno, std::generic_category(), "mapping a segment");
    }
    data_ = static_cast<std::byte*>(address);
}

Mapping::Mapping(Mapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), nbytes_(std::exchange(other.nbytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(nbytes_, other.nbytes_);
    return *this;
}

Mapping::~Mapping() {
    if (data_ != nullptr) {
        munmap(data_, nbytes_);
    }
}

}  // namespace farpool
