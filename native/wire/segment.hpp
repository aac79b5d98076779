// Layout of segment files (docs/segment-file.md), and mappings of them.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string_view>

#include "core/clock.hpp"
#include "core/hash.hpp"

namespace farpool {

constexpr char segment_magic[8] = {'F', 'A', 'R', 'P', 'S', 'E', 'G', '\0'};
constexpr std::uint32_t segment_version = 2;
constexpr std::size_t segment_header_nbytes = 4096;
constexpr std::uint64_t unit_nbytes = 64;

enum class SegmentKind : std::uint32_t { objects = 1, index = 2, visited = 3, lease = 4, shelf = 5, area = 6 };

struct SegmentHeader {
    char magic[8];
    std::uint32_t version;
    std::uint32_t kind;
    std::uint64_t features;
    std::uint64_t capacity;
    unsigned char id[16];
    std::uint64_t session;
    std::uint64_t lease;
    std::uint32_t tenant;
    std::uint32_t zero0;
    std::uint64_t hash_seed;
    std::uint64_t slot_limit;
    std::uint64_t buckets_at;
    std::uint64_t slots_at;
    std::uint64_t owner;
    std::uint64_t zero1;
    std::uint32_t zero2;
    std::uint32_t crc;
    // Fields that change, outside the checksum.
    std::atomic<std::uint64_t> level_and_split;
    std::atomic<std::uint64_t> slots_used;
    std::atomic<std::uint64_t> retired;
    std::atomic<std::uint64_t> lent_out;
    std::atomic<std::uint64_t> next_serial;
    std::atomic<std::uint64_t> first_serial;
    std::atomic<std::uint64_t> epoch;
};
static_assert(offsetof(SegmentHeader, crc) == 124 && offsetof(SegmentHeader, level_and_split) == 128);

struct ObjectHeader {
    char magic[4];
    std::uint16_t key_nbytes;
    std::uint16_t zero;
    std::uint64_t serial;
    std::uint64_t nbytes;
    std::uint32_t payload_crc;
    std::uint32_t units;
    std::uint32_t slot;
    std::uint32_t tenant;
    std::uint32_t epoch;
    std::uint32_t recompute_us;
    std::uint64_t name_space;
    std::uint16_t parts;
    std::uint8_t copies;
    std::uint8_t kind;
    std::uint32_t crc;
};
static_assert(sizeof(ObjectHeader) == 64);

constexpr char object_magic[4] = {'F', 'O', 'B', 'J'};

struct IndexSlot {
    std::atomic<std::uint64_t> serial;
    std::atomic<std::uint64_t> offset;
    std::atomic<std::uint64_t> expiry;
    std::atomic<std::uint64_t> hash;
    std::atomic<std::uint32_t> units;
    std::atomic<std::uint32_t> next;
    std::atomic<std::uint32_t> block;
    std::atomic<std::uint32_t> blocks;
};
static_assert(sizeof(IndexSlot) == 48);

// Flag in IndexSlot::expiry of a kept object, which is never evicted and does not expire, because the word is later than all
// times.
constexpr std::uint64_t kept_flag = std::uint64_t{1} << 63;
// Flag of an object without an end. The bits of the end are then a random number.
constexpr std::uint64_t numbered_flag = std::uint64_t{1} << 62;
// The bits below count how often the object was kept or released; the lowest 50 are the end of its time to live, in ms since
// 1970. An object without an end that was never kept or released has the word 0.
constexpr std::uint64_t end_mask = (std::uint64_t{1} << 50) - 1;
constexpr std::uint64_t change_unit = end_mask + 1;
constexpr std::uint64_t change_mask = numbered_flag - change_unit;

// The end in an expiry word; 0 for none.
constexpr std::uint64_t end_in(std::uint64_t word) noexcept { return (word & numbered_flag) != 0 ? 0 : word & end_mask; }

inline bool has_expired(std::uint64_t word) noexcept {
    return (word & kept_flag) == 0 && end_in(word) != 0 && end_in(word) <= now_milliseconds();
}
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

// Word of SegmentHeader::epoch: the epoch below its complement, so that damage shows; 0 for the first one.
constexpr std::uint64_t epoch_word(std::uint32_t epoch) noexcept {
    return epoch == 0 ? 0 : std::uint64_t{~epoch} << 32 | epoch;
}
constexpr std::optional<std::uint32_t> epoch_in(std::uint64_t word) noexcept {
    const auto epoch = static_cast<std::uint32_t>(word);
    return word == epoch_word(epoch) ? std::optional(epoch) : std::nullopt;
}

// Bytes from the beginning of an extent to its payload.
constexpr std::uint64_t payload_at(std::size_t key_nbytes) noexcept {
    return (sizeof(ObjectHeader) + key_nbytes + unit_nbytes - 1) / unit_nbytes * unit_nbytes;
}

constexpr std::uint64_t units_for(std::size_t key_nbytes, std::uint64_t payload_nbytes) noexcept {
    return (payload_at(key_nbytes) + payload_nbytes + unit_nbytes - 1) / unit_nbytes;
}

// The bucket of a hash in the linear hash table.
constexpr std::uint64_t bucket_of(std::uint64_t hash, std::uint64_t level_and_split) noexcept {
    const std::uint64_t level = level_and_split >> 32;
    const std::uint64_t split = level_and_split & 0xffffffffu;
    const std::uint64_t bucket = hash & ((std::uint64_t{1} << level) - 1);
    return bucket < split ? hash & ((std::uint64_t{2} << level) - 1) : bucket;
}

void seal(SegmentHeader& header) noexcept;
void seal(ObjectHeader& header, const void* key) noexcept;

// The text of the error in a segment's header; null if it is valid.
const char* segment_fault(const SegmentHeader& header, std::uint64_t file_nbytes, SegmentKind kind) noexcept;
// True if the header is intact and fits, with its key and (`with_payload`) its payload, into `extent_nbytes`.
bool is_whole(const ObjectHeader& header, std::uint64_t extent_nbytes, bool with_payload = true) noexcept;

inline std::string_view key_of(const ObjectHeader& header) noexcept {
    return {reinterpret_cast<const char*>(&header + 1), header.key_nbytes};
}

// A memory mapping of a file. Does not own the descriptor.
class Mapping {
public:
    Mapping() = default;
    Mapping(int fd, std::size_t nbytes, bool writable);  // throws std::system_error
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    ~Mapping();

    std::byte* data() const noexcept { return data_; }
    std::size_t nbytes() const noexcept { return nbytes_; }
    template <typename T>
    T* at(std::uint64_t offset) const noexcept {
        return reinterpret_cast<T*>(data_ + offset);
    }

private:
    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0;
};

}  // namespace farpool
