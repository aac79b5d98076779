// The interface of what runs a pager's transfers: threads for host memory (`QueueCore`), streams for a device (`DeviceQueue`).
//
// A device runs behind the program. What the program does with its operands is queued on one of the program's streams, so the
// bytes are in use until long after the access was released. The last group of calls tells the queue about the program's
// streams, so that transfers wait for the work that they must follow, and for no more. The host needs none of these calls.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/port.hpp"

namespace farpool {

// A reference that the submitter holds until it receives the entry's result.
using Keepalive = PyObject*;

// Least priority of a transfer for which a thread of the program waits. Less urgent ones must not keep it waiting.
constexpr std::int64_t urgent_priority = 2;

// One transfer to queue. With a null `port` or without pieces it is a barrier.
struct Submission {
    std::int64_t id = 0;
    Port* port = nullptr;
    Direction direction = Direction::read;
    std::span<const Piece> pieces = {};
    // Entries that must have ended before this one changes or reads bytes in the arena. It may use its tier before that.
    std::span<const std::int64_t> after = {};
    std::int64_t priority = 0;
    Keepalive keepalive = nullptr;
    // Accesses up to this ordinal may still use the bytes at the pieces' addresses on a device; -1 if none does.
    std::int64_t last_use = -1;
};

struct Result {
    std::int64_t id = 0;
    std::optional<PortError> error;
    bool cancelled = false;
    double start = 0;
    double end = 0;
    Keepalive keepalive = nullptr;
};

// A stream of the program, as the device's driver numbers it. 0 is the default stream, and the host's only one.
using ProgramStream = std::uintptr_t;

// Access `ordinal` computed from `start` to `end`, in seconds on the monotonic clock.
struct Ran {
    std::int64_t ordinal = -1;
    double start = 0;
    double end = 0;
};

class TransferQueue {
public:
    TransferQueue() = default;
    TransferQueue(const TransferQueue&) = delete;
    TransferQueue& operator=(const TransferQueue&) = delete;
    virtual ~TransferQueue() = default;

    // Submits a batch in order, and takes the keepalive out of each submission. On failure, the submissions that still have a
    // keepalive were not submitted. `waits`: the caller goes on to `wait_past` or to another submission, and small copies may
    // stay unstarted until then. Otherwise they are started, including copies left unstarted by earlier calls.
    virtual void submit(std::span<Submission> batch, bool waits = false) = 0;
    // Copies bytes inside the arena, before all transfers that are submitted from now on. The ranges may overlap. `last_use`:
    // of both ranges, as in `Submission`.
    virtual void move(std::uintptr_t target, std::uintptr_t source, std::size_t nbytes, std::int64_t last_use) = 0;
    virtual void reprioritize(std::int64_t id, std::int64_t priority) = 0;
    virtual std::vector<Result> poll() = 0;
    // Waits at most `seconds` for a result to poll; true if there is one.
    virtual bool wait(double seconds) = 0;

    // Counts of results and nudges so far. A thread that waits for counts beyond these misses no event, not even a result
    // that another thread polls.
    struct Seen {
        std::uint64_t results;
        std::uint64_t nudges;
    };
    virtual Seen seen() const = 0;
    // Waits until `results` more results or a nudge have come since `seen`, at most `seconds`.
    virtual void wait_past(const Seen& seen, std::uint64_t results, double seconds) = 0;
    virtual void nudge() = 0;
    virtual std::size_t pending() const = 0;
    // Lets running transfers end and drops the others; false if one still ran after `seconds`.
    virtual bool close(double seconds) = 0;
    // True in the process that made the queue. In a child forked from it the queue must not be touched: its threads do not
    // exist there and its locks may never be released.
    virtual bool ours() const noexcept = 0;

    // ---- the program's work on a device ----

    // Prepares for an access on a stream. Throws if the stream cannot have one; nothing was changed.
    virtual void begin_use(ProgramStream) {}
    // Makes later work on the stream wait for the accesses up to `last_use`, of which the access overwrites the bytes.
    virtual void order_use(ProgramStream, std::int64_t /*last_use*/) {}
    // Notes that all work of access `ordinal` is queued on the stream.
    virtual void end_use(ProgramStream, std::int64_t /*ordinal*/) {}
    // Asks a thread of the queue to find work of the device that has ended; `take_ran` returns its times soon after.
    virtual void look() {}
    // When the device computed, since the last call, in the order of the ends.
    virtual std::vector<Ran> take_ran() { return {}; }
    // The error that keeps the queue from finding out if transfers have ended; empty if there is none.
    virtual std::optional<PortError> trouble() const { return std::nullopt; }
    // True after an error that the queue cannot make good: the arena may hold other bytes than its users know of, or a range
    // may be given away while work still uses it. From then on, `trouble` is this error, and no access may have its operands.
    virtual bool broken() const noexcept { return false; }
};

}  // namespace farpool
