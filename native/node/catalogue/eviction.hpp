// Makes room for objects: evicts other objects, or moves their payloads between RAM and the lower medium.
#pragma once

#include <cstdint>
#include <optional>

#include "node/catalogue/entries.hpp"
#include "node/catalogue/media.hpp"
#include "node/catalogue/room.hpp"

namespace farpool {

class Eviction {
public:
    Eviction(Room& room, Media& media, Entries& entries) : room_(room), media_(media), entries_(entries) {}

    // Takes an extent in RAM, with memory for the first `taken` units of it; empty if there is no room.
    std::optional<std::uint64_t> alloc(std::uint32_t units, std::uint32_t taken);
    // Moves one object to the lower medium, or evicts it. `at_once`: evicts it, so that its memory is free now. False if all
    // objects are in use or kept.
    bool evict_one(bool at_once = false);
    // Evicts the object that has been in the hash's bucket for longest and may be evicted; false if there is none.
    bool evict_from_bucket(std::uint64_t hash);

    // Moves the payload of a found object to the lower medium; `done` also if it is there or moving. Otherwise nothing has
    // changed: `unknown` without a lower medium, `busy` if the object is pinned, kept or being read, `too_large` for the
    // medium, `full` if the medium has no room or as many bytes are moving as may.
    Status demote(const Found& found);
    // Copies the payload of a retained object from a lower medium into RAM. Returns the object as it is then; empty if there is
    // no room. Holders of the old extent keep it.
    std::optional<Found> promote(std::uint64_t offset, const std::byte* payload);

private:
    bool demote(std::uint32_t slot);
    void finish_demote(std::uint64_t offset, bool ok);
    void evict_around(std::uint32_t units);
    std::optional<std::uint32_t> alloc_blocks(std::uint32_t blocks, std::uint8_t priority);

    Room& room_;
    Media& media_;
    Entries& entries_;
};

}  // namespace farpool
