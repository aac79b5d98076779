// Memory shared by a client and its node, into which the client writes payloads of puts (docs/wire.md).
#pragma once

#include <cstddef>
#include <cstdint>

#include "wire/frame.hpp"
#include "wire/parts.hpp"
#include "wire/segment.hpp"

namespace farpool {

// The client's side of a publish area: a ring, parts of which are free again when the node reports that it has copied them.
// Positions count all bytes since the beginning.
class PublishArea {
public:
    // Maps a file that the node has passed (less than 0 for none) and closes it. False if it is no publish area.
    bool open(int file) noexcept;
    bool is_open() const noexcept { return memory_.data() != nullptr; }

    // Position at which the next payload begins, and bytes that a payload of `nbytes` takes: each begins at a unit.
    std::uint64_t begin() const noexcept { return filled_; }
    static std::uint64_t taken_by(std::uint64_t nbytes) noexcept {
        return (nbytes + unit_nbytes - 1) / unit_nbytes * unit_nbytes;
    }
    // Copies the next part of a payload, from byte `done` on, and continues its checksum. Returns an empty part if there is no
    // room.
    AreaPart fill(Parts payload, std::size_t done, std::size_t nbytes, std::uint32_t& crc) noexcept;
    // Notes that the node has copied all bytes before this position.
    void taken(std::uint64_t position) noexcept;

private:
    std::uint64_t nbytes() const noexcept { return memory_.nbytes() - segment_header_nbytes; }

    Mapping memory_;
    std::uint64_t filled_ = 0;
    std::uint64_t taken_ = 0;
};

}  // namespace farpool
