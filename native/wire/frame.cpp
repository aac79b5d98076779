#include "wire/frame.hpp"

#include <cstring>

#include "core/crc32c.hpp"

namespace farpool {

namespace {

std::uint32_t checksum(const FrameHeader& header, const void* meta) noexcept {
    return crc32c(meta, header.meta_nbytes, crc32c(&header, offsetof(FrameHeader, crc)));
}

}  // namespace

FrameHeader make_header(Op op) noexcept {
    FrameHeader header{};
    std::memcpy(header.magic, frame_magic, sizeof frame_magic);
    header.version = wire_version;
    header.op = static_cast<std::uint8_t>(op);
    return header;
}

void seal(FrameHeader& header, const void* meta, std::uint32_t meta_nbytes) noexcept {
    header.meta_nbytes = meta_nbytes;
    header.crc = checksum(header, meta);
}

const char* header_fault(const FrameHeader& header) noexcept {
    if (std::memcmp(header.magic, frame_magic, sizeof frame_magic) != 0) {
        return "not a frame of this protocol";
    }
    if (header.version != wire_version) {
        return "a frame of another version; this farpool speaks version 2";
    }
    if ((header.flags & ~(checksum_follows | payload_in_area)) != 0) {
        return "a frame with flags that this farpool does not know";
    }
    if (header.meta_nbytes > largest_meta) {
        return "a frame whose meta is larger than 65536 bytes";
    }
    return nullptr;
}

bool is_whole(const FrameHeader& header, const void* meta) noexcept { return checksum(header, meta) == header.crc; }

}  // namespace farpool
