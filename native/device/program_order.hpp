// The order between the program's work and copies: which work on the program's streams has used a range of the arena.
//
// After each access an event is recorded on the access's stream, with the access's ordinal. A copy that needs all work up to an
// ordinal waits, on each stream, for the oldest event that is behind this work; later work may still run. The same events tell
// when the device computed.
//
// A driver may give a new stream the handle of a destroyed one, whose work may still run. The two are told apart by their
// numbers, if the driver has them (`Device::stream_id`); otherwise they count as one, so the new stream has not the waits that
// it would need.
//
// A capture of a CUDA graph must not get events or waits into the graph, so a stream that is being captured can have no access.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "core/transfer_queue.hpp"
#include "device/device_clock.hpp"
#include "device/event_pool.hpp"

namespace farpool::device {

class ProgramOrder {
public:
    // `allocating`: the stream on which the arena was allocated. Earlier work on it may still use the same memory.
    ProgramOrder(std::shared_ptr<Device> device, EventPool& events, DeviceClock& clock, ProgramStream allocating);
    ProgramOrder(const ProgramOrder&) = delete;
    ProgramOrder& operator=(const ProgramOrder&) = delete;

    // Notes which stream has this handle, and checks that it can have an access now. Throws if it is being captured.
    void begin(ProgramStream stream);
    // Makes later work on the stream wait for moves, and for accesses up to `last_use` on the program's other streams.
    void order(ProgramStream stream, std::int64_t last_use);
    // Notes that the work of access `ordinal` is queued. True if so many events are kept that `retire` is worth calling.
    bool end(ProgramStream stream, std::int64_t ordinal);

    // Makes a stream of copies wait for accesses up to `last_use`, and for moves up to now. `moves`: count of the moves that
    // the stream has waited for, which the caller keeps.
    void follow(Stream stream, std::int64_t last_use, std::uint64_t& moves);
    // Makes a stream wait for the work of destroyed streams, which `streams` leaves out.
    void follow_destroyed(Stream stream);
    // Makes all later work wait for the work that is queued on this stream, where moves are made: copies at once, accesses
    // before they begin.
    void moved(Stream stream);
    // Gives events back that have passed. For a thread of the queue only: during a capture a program's thread must not ask.
    void retire();
    // When the device computed, in the order of the ends.
    std::vector<Ran> take_ran();
    std::vector<ProgramStream> streams() const;
    std::int64_t newest() const;

private:
    struct Use {
        std::int64_t low;      // least ordinal of this use and those after it
        std::int64_t ordinal;  // highest ordinal of this use, and of uses before it whose events were given back
        double since;          // when the host queued the work
        Event event;
        double ended = 0.0;  // when the device had done the work
    };
    struct Program {
        Stream stream;
        std::uint64_t id;
        bool destroyed = false;     // another stream has the handle
        std::vector<Use> uses;      // has room for as many as are kept
        std::uint64_t thinned = 0;  // how often events were given back that may not have passed
        double queued_at = 0.0;     // when the host began to queue the latest access
        double ended_at = 0.0;      // when the device had done the latest work that is known to have ended
        bool began = false;         // the stream has had an access
        std::uint64_t moves = 0;    // that the stream has waited for
    };

    Program& program(Stream stream);
    void note_stream(Stream stream, std::uint64_t id);
    void wait_for(Stream stream, std::int64_t last_use, const Program* except);
    void wait_for_moves(Stream stream, std::uint64_t& moves);
    void thin(Program& program);
    void note_ends(std::span<Use> uses, double began);
    void take_times(Program& program, std::span<Use> uses, std::vector<Ran>& ran);

    std::shared_ptr<Device> device_;
    EventPool& events_;
    DeviceClock& clock_;
    mutable std::mutex mutex_;
    std::mutex retiring_;  // one thread retires at a time; locked before `mutex_`, and guards `Program::ended_at`
    std::vector<std::unique_ptr<Program>> programs_;
    Event moved_;
    std::uint64_t moves_ = 0;
    std::int64_t newest_ = -1;
    std::vector<Ran> ran_;
};

}  // namespace farpool::device
