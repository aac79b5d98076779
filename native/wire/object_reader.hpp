// A tenant's published objects, read from shared memory that the node changes at the same time (docs/segment-file.md).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "core/error.hpp"
#include "wire/parts.hpp"
#include "wire/segment.hpp"
#include "wire/tenant_epoch.hpp"

namespace farpool {

// Reads a tenant's objects in mapped segments; thread-safe. No offset or length in a segment is used before it was compared
// with the mapping. If an object is not found here, ask the node.
class ObjectReader {
public:
    struct Found {
        const IndexSlot* slot;
        std::uint64_t serial;
        const std::byte* payload;
        std::size_t nbytes;
        std::uint32_t crc;
        std::uint8_t copies;
        bool shelved;  // the payload is in the NVMe file, not at `payload`
    };

    // Maps the files, without owning the descriptors. Throws PortFailure if a file cannot be mapped or is not a valid segment.
    // `lifeline`, unless less than 0, is a socket to the node: once the node has closed it, no object is found any more,
    // because the memory of a killed node stays mapped while another node may serve the same address. No object is found either
    // while the node's epoch is older than `epoch`.
    ObjectReader(int index_fd, int data_fd, int visited_fd, std::string node, int lifeline = -1,
                 std::shared_ptr<TenantEpoch> epoch = nullptr);
    ~ObjectReader();
    ObjectReader(const ObjectReader&) = delete;
    ObjectReader& operator=(const ObjectReader&) = delete;

    // Sets the expected number of copies. The first object put with another number is not found here, so that the caller learns
    // the number from the node's reply.
    void expect_copies(int copies) noexcept { expected_copies_.store(copies, std::memory_order_relaxed); }

    // Finds an object and marks it as read; empty if it is not in memory, has expired or is changing.
    std::optional<Found> find(std::string_view key) const;
    // True if objects can be found here at all: not after the node has ended or restarted, or while its epoch is out of date.
    bool in_service() const noexcept { return !retired() && !outdated() && node_lives(); }
    // Size of an object in bytes, from the index. An object that is not found may still exist: ask the node. With `visit` it is
    // marked as read.
    std::optional<std::uint64_t> size_of(std::string_view key, bool visit) const;
    // Copies an object's payload and verifies its checksum. False, with an invalid copy, if the object was removed during the
    // copy.
    bool copy(const Found& found, Parts into) const;

    // An object to be copied into a place, and the result.
    struct Wanted {
        enum class Outcome { missing, copied, too_small, late };
        std::string_view key;
        Parts into;
        std::size_t room;        // bytes of `into`
        std::size_t nbytes = 0;  // of the object, if it was copied or the place is too small
        Outcome outcome = Outcome::missing;
    };
    // Copies and verifies objects, with the help of a second thread if that pays. The caller must ask the node for missing
    // objects; a damaged object counts as missing. No copy begins after the deadline. Throws nothing.
    void copy_all(std::span<Wanted> wanted, double deadline) const noexcept;

    // Address of a range of the data file, at an offset that includes the header; throws if the range is outside the file.
    const std::byte* payload(std::uint64_t offset, std::uint64_t nbytes) const;

    const Mapping& data() const noexcept { return data_; }

private:
    void copy_one(Wanted& wanted, double deadline) const noexcept;
    bool surprises(std::uint8_t copies) const noexcept;
    bool stands(const IndexSlot& slot, std::uint64_t serial) const noexcept;
    // Finds an object without checking the node; throws if the index is damaged.
    std::optional<Found> probe(std::string_view key, bool visit) const;
    bool outdated() const noexcept;
    bool node_lives() const noexcept;
    bool retired() const noexcept { return header().retired.load(std::memory_order_acquire) != 0; }
    const SegmentHeader& header() const noexcept { return *index_.at<SegmentHeader>(0); }
    [[noreturn]] void fail_damaged(std::string_view key, const char* what) const;

    const std::string node_;
    Mapping index_;
    Mapping data_;
    Mapping visited_;
    std::uint64_t seed_;
    std::uint64_t slot_limit_;
    std::uint64_t buckets_at_;
    std::uint64_t slots_at_;
    std::uint64_t visited_mask_;
    int lifeline_ = -1;
    std::shared_ptr<TenantEpoch> epoch_;
    mutable std::atomic<int> expected_copies_{-1};  // less than 0: any number
    mutable std::atomic<std::int64_t> looked_at_{
        0};  // time of the last check of the lifeline, ms; the maximum after it was closed
};

}  // namespace farpool
