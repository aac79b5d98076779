// Moves and fills of ranges of the arena, on a stream of their own.
#pragma once

#include <memory>
#include <mutex>

#include "device/event_pool.hpp"
#include "device/owned.hpp"
#include "device/program_order.hpp"

namespace farpool::device {

class Moves {
public:
    // `bounce`: bytes of device memory for moves between ranges that overlap.
    Moves(std::shared_ptr<Device> device, std::size_t bounce);
    Moves(const Moves&) = delete;
    Moves& operator=(const Moves&) = delete;

    Stream stream() const noexcept { return stream_.get(); }
    // As in `TransferQueue`.
    void move(ProgramOrder& order, std::uintptr_t target, std::uintptr_t source, std::size_t nbytes, std::int64_t last_use);
    // Waits until all of them have ended, and the work of destroyed streams, and gives the stream and the memory back; false,
    // and nothing is given back, if that has not ended at `deadline`. Throws if the device does not tell. Later moves and
    // fills are refused.
    bool close(ProgramOrder& order, EventPool& events, double deadline);
    // Fills `count` values of two bytes, after the program's work so far.
    void fill(ProgramOrder& order, std::uintptr_t target, std::size_t count, std::uint16_t value);

private:
    template <typename Work>
    void queue(ProgramOrder& order, std::int64_t last_use, Work work);

    std::shared_ptr<Device> device_;
    OwnedStream stream_;
    std::size_t bounce_bytes_;
    OwnedMemory bounce_;
    std::uint64_t moves_ = 0;  // that the stream has waited for: its own
    std::mutex mutex_;         // keeps the stream while work is queued on it
    bool closed_ = false;
};

}  // namespace farpool::device
