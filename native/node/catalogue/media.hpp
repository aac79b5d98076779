// The media of a catalogue, RAM and perhaps a lower one, and the objects that are moving from the first to the second.
//
// An object that moves stays where it is, and readers find it there. Its bytes count as moving and no longer as used. Only when
// the lower medium has the payload does the index say so, and only then is the memory free. So a node that is killed at any
// moment has the object in one place or in the other.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <utility>

#include "node/catalogue/index.hpp"
#include "node/catalogue/medium.hpp"
#include "node/catalogue/ram.hpp"
#include "node/catalogue/room.hpp"

namespace farpool {

class Media {
public:
    // The extents to which an object moves: for its header and key in RAM, and for its payload in the lower medium.
    struct Move {
        std::uint64_t offset;
        std::uint32_t units;
        std::uint32_t block;
        std::uint32_t blocks;
    };

    // `lower` may be null.
    Media(Room& room, Segment segment, Medium* lower) : room_(room), ram_(room, std::move(segment)), lower_(lower) {}

    Ram& ram() noexcept { return ram_; }
    const Ram& ram() const noexcept { return ram_; }
    bool has_lower() const noexcept { return lower_ != nullptr; }
    Medium& lower() const noexcept { return *lower_; }
    // Id of the lower medium's content; 0 without a lower medium.
    std::uint64_t lower_id() const noexcept { return lower_ == nullptr ? 0 : lower_->id(); }

    // Bytes that an object has for its payload.
    std::uint64_t payload_room(const Index::Entry& entry, std::size_t key_nbytes) const {
        return entry.blocks == 0 ? std::uint64_t{entry.units} * unit_nbytes - payload_at(key_nbytes)
                                 : entry.blocks * lower_->unit();
    }
    const std::byte* view(const Index::Entry& entry, std::size_t key_nbytes) const {
        return entry.blocks == 0 ? ram_.view(entry.offset + payload_at(key_nbytes)) : lower_->view(entry.block);
    }
    bool is_mapped_by_readers(const Index::Entry& entry) const {
        return entry.blocks == 0 ? ram_.is_mapped_by_readers() : lower_->is_mapped_by_readers();
    }

    // Allocates the extents of an object from an earlier start; false, and allocates nothing, if one of them is taken.
    bool adopt(const Index::Entry& entry);
    // Releases extents: in RAM, also of an object that has moved from there, and in the lower medium (none for 0 blocks).
    void release_units(std::uint64_t offset, std::uint32_t units);
    void release_blocks(std::uint32_t block, std::uint32_t blocks) {
        if (blocks != 0) {
            lower_->release(block, blocks);
        }
    }

    bool is_moving(std::uint64_t offset) const { return moves_.contains(offset); }
    const Move& move_of(std::uint64_t offset) const { return moves_.at(offset); }
    // Notes that the object at `offset` moves. The note ends when its units are released.
    void begin_move(std::uint64_t offset, std::uint32_t units, const Move& move) {
        moves_.emplace(offset, move);
        room_.begin_move(units);
    }

private:
    Room& room_;
    Ram ram_;
    Medium* lower_;
    std::unordered_map<std::uint64_t, Move> moves_;  // by the offset from which an object moves
};

}  // namespace farpool
