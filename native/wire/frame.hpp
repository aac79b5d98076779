// Frames of the wire protocol (docs/wire.md).
#pragma once

#include <cstddef>
#include <cstdint>

namespace farpool {

enum class Op : std::uint8_t {
    hello = 1,
    challenge = 2,
    proof = 3,
    welcome = 4,
    refused = 5,
    call = 6,
    get = 16,
    stat = 17,
    put = 18,
    drop = 19,
    touch = 20,
    pin = 21,
    unpin = 22,
    prepare = 23,
    commit = 24,
    abort = 25,
    rotate = 26,
    lookup = 27,
    area = 28,
    demote = 29,
    retain = 30,
    end_session = 31,
    read = 32,
    write = 33,
    ping = 48,
};

enum class Status : std::uint16_t {
    done = 0,
    missing = 1,
    present = 2,
    full = 4,
    denied = 5,
    bad_request = 6,
    too_large = 7,
    checksum = 8,
    unknown = 9,
    busy = 10,
    taken = 11,
    lapsed = 12,
};

namespace rights {
constexpr std::uint32_t read = 1;
constexpr std::uint32_t write = 2;
constexpr std::uint32_t publish = 4;
constexpr std::uint32_t admin = 8;
}  // namespace rights

// Header of a frame, laid out as on the wire: every supported machine is little-endian, and no field needs padding.
struct FrameHeader {
    char magic[4];
    std::uint8_t version;
    std::uint8_t op;
    std::uint16_t status;
    std::uint64_t request;
    std::uint32_t meta_nbytes;
    std::uint32_t payload_crc;
    std::uint64_t payload_nbytes;
    std::uint64_t serial;
    std::uint64_t lease;
    std::uint32_t epoch;
    std::uint32_t tenant;
    std::uint8_t credential;
    std::uint8_t flags;
    std::uint8_t zero[2];
    std::uint32_t crc;
};
static_assert(sizeof(FrameHeader) == 64);

// An object's attributes as its publisher gave them: at the head of meta in a put and a prepare, and returned by a get.
struct ObjectHead {
    std::uint64_t ttl_ms;  // time to live that is left; 0 for no end
    std::uint8_t copies;
    std::uint8_t kind;
    std::uint16_t parts;
    std::uint32_t recompute_us;
    std::uint64_t name_space;
    std::uint32_t flags;
    std::uint32_t epoch;  // of the tenant on the node; in a put of a copy: on the node from which it was read
};
static_assert(sizeof(ObjectHead) == 32);

// ObjectHead::flags, in replies: the object is kept, so it is never evicted.
constexpr std::uint32_t kept_object = 1;
// ObjectHead::flags, in a put: a copy of another node's object, refused if the key was just dropped or a later epoch has begun.
constexpr std::uint32_t copied_object = 2;
// ObjectHead::flags, in replies: the priority ends with a session, or at a time.
constexpr std::uint32_t priority_ends = 8;
// ObjectHead::flags, in puts and replies: the object's priority, from 0 to 7.
constexpr std::uint32_t priority_shift = 8;
constexpr std::uint32_t priority_mask = 7;
// Added to the priority in a retain request: the object keeps a higher priority, with its session.
constexpr std::uint64_t retain_raises = 256;

// Place of the next bytes of a payload in the publish area, from the end of its header.
struct AreaPart {
    std::uint32_t offset;
    std::uint32_t nbytes;
};
static_assert(sizeof(AreaPart) == 8);

constexpr char frame_magic[4] = {'F', 'P', 'W', '1'};
constexpr std::uint8_t wire_version = 2;
// FrameHeader::flags of a request: the payload's checksum follows the payload and is not in the header. So the sender can
// compute it while the payload is in the processor's cache, just after sending it.
constexpr std::uint8_t checksum_follows = 1;
// FrameHeader::flags of a put: the payload is in the connection's publish area, and AreaParts with its places follow meta.
constexpr std::uint8_t payload_in_area = 2;
constexpr std::uint32_t largest_meta = 65536;
constexpr std::size_t largest_key = 256;

// Makes a header with magic, version and operation; all other fields are zero.
FrameHeader make_header(Op op) noexcept;

// Fills in the length of meta and the checksum.
void seal(FrameHeader& header, const void* meta, std::uint32_t meta_nbytes) noexcept;

// The text of the error in a header; null if it is valid. Does not need the meta.
const char* header_fault(const FrameHeader& header) noexcept;

// True if the checksum over header and meta is right.
bool is_whole(const FrameHeader& header, const void* meta) noexcept;

}  // namespace farpool
