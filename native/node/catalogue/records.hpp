// The records of objects in the data segment: a header and a key at the start of each extent.
//
// Publishers may write the segment at any time, so the lengths of keys and payloads are also stored here, where only the node
// writes. A header is copied before it is checked, because it may change between two reads.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>
#include <vector>

#include "node/catalogue/index.hpp"
#include "node/catalogue/media.hpp"
#include "wire/frame.hpp"
#include "wire/segment.hpp"

namespace farpool {

// A copy of an extent's header and key.
struct Head {
    ObjectHeader header;
    std::byte key[largest_key];
};

inline Head copy_head(const std::byte* extent, std::uint64_t nbytes) {
    Head head;
    std::memcpy(static_cast<void*>(&head.header), extent, sizeof head.header);
    const std::size_t key_nbytes = head.header.key_nbytes;
    if (key_nbytes <= largest_key && payload_at(key_nbytes) <= nbytes) {
        std::memcpy(head.key, extent + sizeof head.header, key_nbytes);
    }
    return head;
}

class Records {
public:
    Records(const Index& index, const Media& media) : index_(index), media_(media) {}

    // Notes the lengths in the header of an object that has entered the index; forgets one that is about to leave it.
    void add(std::uint32_t slot, const ObjectHeader& header);
    void remove(std::uint32_t slot) { overhead_nbytes_ -= overhead_of(slot); }

    std::size_t key_nbytes(std::uint32_t slot) const { return std::size_t{shapes_[slot].last_of_key} + 1; }
    std::uint64_t payload_nbytes(std::uint32_t slot) const;
    const ObjectHeader& header(std::uint32_t slot) const { return media_.ram().header_at(index_.at(slot).offset); }
    // The key as it is in the segment. Copy it before you check it.
    std::string_view key(std::uint32_t slot) const;
    // False if a program has damaged the header or the key.
    bool is_intact(std::uint32_t slot) const;
    // The slot of a key; `Index::none` if there is no such slot.
    std::uint32_t find(std::string_view key, std::uint64_t hash) const;
    // A slot with this hash whose record is damaged; `Index::none` if there is no such slot.
    std::uint32_t find_damaged(std::uint64_t hash) const;
    // Bytes of headers and padding in RAM, and bytes that each slot takes here.
    std::uint64_t overhead_nbytes() const noexcept { return overhead_nbytes_; }
    std::uint64_t slot_nbytes() const noexcept { return sizeof(Shape) + (media_.has_lower() ? 1 : 0); }

private:
    struct Shape {
        std::uint16_t last_of_key : 8;  // bytes of the key, less 1
        std::uint16_t padding : 6;      // bytes after the payload, without whole units
    };
    std::uint64_t overhead_of(std::uint32_t slot) const;

    const Index& index_;
    const Media& media_;
    std::vector<Shape> shapes_;             // by slot
    std::vector<std::uint8_t> free_units_;  // by slot: whole units after the payload; empty without a lower medium
    std::uint64_t overhead_nbytes_ = 0;
};

}  // namespace farpool
