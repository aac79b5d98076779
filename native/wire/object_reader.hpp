// A tenant's published objects, read from shared memory that the node changes at the same time (docs/segment-file.md).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

#include "wire/segment.hpp"

namespace farpool {

// Safe to use from several threads. No offset and no length found in a segment is used before it was compared with the
// mapping. Whoever does not find an object here has to ask the node.
class ObjectReader {
public:
    struct Found {
        const IndexSlot* slot;
        std::uint64_t generation;
        const std::byte* payload;
        std::size_t nbytes;
        std::uint32_t crc;
    };

    // Does not own the descriptors. Throws PortFailure where a file cannot be mapped or is not what it has to be.
    // `lifeline`, if it is none less than 0, is a socket to the node: when that has hung up, nothing is found any more. The
    // memory of a node that was killed stays mapped, but another node may serve the same address by then.
    ObjectReader(int index_fd, int data_fd, int visited_fd, std::string node, bool writable, int lifeline = -1);
    ~ObjectReader();
    ObjectReader(const ObjectReader&) = delete;
    ObjectReader& operator=(const ObjectReader&) = delete;

    // Where the object lies, and that somebody read it; none where it is not here, a tombstone, expired or changing.
    std::optional<Found> find(std::string_view key) const;
    // Copies and verifies. False if the object went while it was copied: what was copied is worth nothing.
    bool copy(const Found& found, void* into) const;

    // A range of the data file, header included; fails where it lies outside.
    const std::byte* payload(std::uint64_t offset, std::uint64_t nbytes) const;
    // Copies into the data file and returns the CRC32C.
    std::uint32_t write(std::uint64_t offset, const void* from, std::size_t nbytes);

    const Mapping& data() const noexcept { return data_; }

private:
    bool stands(const IndexSlot& slot, std::uint64_t generation) const noexcept;
    bool node_lives() const noexcept;
    bool retired() const noexcept { return header().retired.load(std::memory_order_acquire) != 0; }
    const SegmentHeader& header() const noexcept { return *index_.at<SegmentHeader>(0); }
    [[noreturn]] void fail_damaged(std::string_view key, const char* what) const;

    const std::string node_;
    const bool writable_;
    Mapping index_;
    Mapping data_;
    Mapping visited_;
    std::uint64_t seed_;
    std::uint64_t slot_limit_;
    std::uint64_t buckets_at_;
    std::uint64_t slots_at_;
    int lifeline_ = -1;
    mutable std::atomic<std::int64_t> looked_at_{0};  // when the lifeline was last looked at, ms; the largest once it was dead
};

}  // namespace farpool
