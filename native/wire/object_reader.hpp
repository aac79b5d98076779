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

// Reader of a tenant's objects in mapped segments; thread-safe. No offset or length found in a segment is used before it was
// compared with the mapping. If an object is not found here, ask the node.
class ObjectReader {
public:
    struct Found {
        const IndexSlot* slot;
        std::uint64_t serial;
        const std::byte* payload;
        std::size_t nbytes;
        std::uint32_t crc;
        std::uint8_t copies;
        bool shelved;  // the payload is in the NVMe file, not where it says
    };

    // Maps the files, without owning the descriptors. Throws PortFailure where a file cannot be mapped or is not what it has to
    // be. `lifeline`, unless less than 0, is a socket to the node: once the node has hung up, nothing is found any more. The
    // memory of a killed node stays mapped, but another node may serve the same address by then. Nor is anything found where
    // the node's epoch is behind `epoch`.
    ObjectReader(int index_fd, int data_fd, int visited_fd, std::string node, int lifeline = -1,
                 std::shared_ptr<TenantEpoch> epoch = nullptr);
    ~ObjectReader();
    ObjectReader(const ObjectReader&) = delete;
    ObjectReader& operator=(const ObjectReader&) = delete;

    // Sets the expected number of copies. The first object put with another number is not found here, so that the node's reply
    // tells the number.
    void expect_copies(int copies) noexcept { expected_copies_.store(copies, std::memory_order_relaxed); }

    // Finds an object and marks it as read; empty where it is not in memory, has expired or is changing.
    std::optional<Found> find(std::string_view key) const;
    // True if objects can be found here at all: not once the node has gone, has begun anew, or is behind the tenant's epoch.
    bool in_service() const noexcept { return !retired() && !outdated() && node_lives(); }
    // Size of an object in bytes, from the index. One that is not found may exist all the same: ask the node. With `visit` it
    // is marked as read.
    std::optional<std::uint64_t> size_of(std::string_view key, bool visit) const;
    // Copies an object's payload and verifies its checksum. False, with an invalid copy, if the object was removed meanwhile.
    bool copy(const Found& found, Parts into) const;

    // An object to be copied into a place, and what became of it.
    struct Wanted {
        enum class Outcome { missing, copied, too_small, late };
        std::string_view key;
        Parts into;
        std::size_t room;        // bytes of `into`
        std::size_t nbytes = 0;  // of the object, if it was copied or the place is too small
        Outcome outcome = Outcome::missing;
    };
    // Copies and verifies objects, with the help of a second thread where that pays. The node has to be asked for those that
    // are missing, a damaged one among them. None is begun after the deadline. Throws nothing.
    void copy_all(std::span<Wanted> wanted, double deadline) const noexcept;

    // Address of a range of the data file, at an offset that counts the header; throws where the range lies outside.
    const std::byte* payload(std::uint64_t offset, std::uint64_t nbytes) const;

    const Mapping& data() const noexcept { return data_; }

private:
    void copy_one(Wanted& wanted, double deadline) const noexcept;
    bool surprises(std::uint8_t copies) const noexcept;
    bool stands(const IndexSlot& slot, std::uint64_t serial) const noexcept;
    // Finds an object without checking the node; throws where the index is damaged.
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
    mutable std::atomic<int> expected_copies_{-1};    // less than 0: any number
    mutable std::atomic<std::int64_t> looked_at_{0};  // when the lifeline was last looked at, ms; the largest once it was dead
};

}  // namespace farpool
