// Messages into and out of the pager: runs, transfers, moves, refusals.
#pragma once

#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "core/error.hpp"

namespace farpool::pager {

using BlockId = std::int32_t;
using TransferId = std::int64_t;

inline constexpr std::int64_t nowhere = -1;

enum class Mode : std::int8_t {
    read = 0,
    write = 1,      // reads and changes the bytes, or changes only some
    overwrite = 2,  // writes each byte without reading the old ones, which therefore need not be fetched
};

// Consecutive blocks of one storage, wanted contiguous in the arena.
struct Run {
    BlockId first = 0;
    std::int32_t count = 0;
    Mode mode = Mode::read;
    // First block of the table if the run is a row picked by data, else -1. Such an access does not predict the rows of the
    // next pass, so the tape only records the table.
    BlockId table = -1;

    BlockId stop() const noexcept { return first + count; }
    bool operator==(const Run&) const = default;
};

enum class Kind : std::int8_t { fetch = 0, write_back = 1 };

// One contiguous part of a transfer.
struct Piece {
    std::int32_t tier;    // index of the tier (or source) that holds the other end
    std::int64_t offset;  // offset in that tier
    std::int64_t place;   // in the arena
    std::int64_t nbytes;
};

// A transfer of bytes between the arena and a tier. Without pieces it only waits for `after`: a barrier.
//
// `last_use`, here and below: accesses up to this ordinal may have used the bytes and, on a device, which runs behind the
// program, may still be using them; -1 if none has.
struct Transfer {
    TransferId id;
    Kind kind;
    BlockId block;
    bool demand;  // an access waits for it now
    std::vector<Piece> pieces;
    std::vector<TransferId> after;  // transfers that must have completed first, because they still use the arena bytes
    std::int64_t last_use;          // of its bytes in the arena, by this block or the one before
};

// A copy inside the arena, to make at once and before any transfer that follows; source and target may overlap.
struct Move {
    std::int64_t source;
    std::int64_t target;
    std::int64_t nbytes;
    std::int64_t last_use;  // of source and target
};

using Command = std::variant<std::shared_ptr<const Transfer>, Move>;

// Reason why a transfer failed, for the accesses that needed the bytes or the room. The pager only passes it on.
struct TransferFailure {
    PortError error;
    std::int32_t tier;  // -1 if it is not known
    BlockId block;
};
using Failure = std::shared_ptr<const TransferFailure>;

// Refusal: the runs of one access together exceed the arena.
struct TooLarge {
    std::int64_t needed;
};

// Refusal: no lower tier takes a block that has to be evicted.
struct NoRoom {
    BlockId block;
    std::int64_t nbytes;
};

// Reason why an access is not granted; empty while there is none.
using Refusal = std::variant<std::monostate, TooLarge, NoRoom, Failure>;

// The part of a lower tier's bookkeeping that the pager needs. Reservation is quick and does no I/O.
class Space {
public:
    virtual ~Space() = default;
    // Offset of a new extent for a block of this class; `nowhere` when there is no room.
    virtual std::int64_t reserve(std::int64_t nbytes, int cls) = 0;
    virtual void free(std::int64_t offset, std::int64_t nbytes, int cls) = 0;
};

}  // namespace farpool::pager
