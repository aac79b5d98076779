// The header and key at the beginning of an extent, and the room for its payload.
#pragma once

#include <cstring>

#include "node/index.hpp"
#include "node/shelf.hpp"
#include "wire/frame.hpp"

namespace farpool {

// A copy of an extent's header and key, as publishers may change the originals between any two looks at them.
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

// Bytes that an extent, or its blocks in the NVMe file, have for the payload.
inline std::uint64_t payload_room(const Index::Entry& entry, std::size_t key_nbytes) {
    return entry.blocks == 0 ? std::uint64_t{entry.units} * unit_nbytes - payload_at(key_nbytes) : entry.blocks * shelf_block;
}

}  // namespace farpool
