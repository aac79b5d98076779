// The interface through which native threads read from and write to a tier.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "core/error.hpp"

namespace farpool {

enum class Direction : int { read = 0, write = 1 };

// Bytes at an offset of a port, and the memory that they are read into or written from.
struct Piece {
    std::uint64_t offset;
    std::uintptr_t address;
    std::size_t nbytes;
};

// Pieces in one direction that a caller starts and finishes one by one, so that several ports work at the same time. For one
// thread at a time.
class Transfer {
public:
    virtual ~Transfer() = default;
    // Starts a piece. Its memory must stay valid until it is finished or the transfer is abandoned or destroyed.
    virtual void start(const Piece& piece) = 0;
    // Finishes the oldest piece that was started and not finished.
    virtual void finish(const Piece& piece) = 0;
    // After a failure: true if all pieces may succeed if they are started again, once the transfer was abandoned.
    virtual bool may_retry() const noexcept = 0;
    // Gives up all pieces that were started.
    virtual void abandon() = 0;
};

// Reads and writes bytes of one tier. Both calls block, may run on any thread, are entered without the interpreter lock and
// throw PortFailure.
class Port {
public:
    virtual ~Port() = default;
    virtual void read(std::uint64_t offset, void* into, std::size_t nbytes) = 0;
    virtual void write(std::uint64_t offset, const void* from, std::size_t nbytes) = 0;
    // Begins a transfer of pieces; null if this port can only move one piece per call.
    virtual std::unique_ptr<Transfer> begin(Direction) { return nullptr; }
    // Number of transfers in one direction that are worth running at the same time.
    virtual unsigned concurrency() const noexcept { return 1; }
    // True if a transfer is only a copy in memory, which never waits. A small copy takes less time than handing it to another
    // thread, so the thread that waits for it may make it itself.
    virtual bool copies() const noexcept { return false; }
    // Where the bytes are in this process, for a port whose transfers are plain copies of them; null for others. Saves a copy.
    virtual std::byte* address(std::uint64_t, std::size_t) const { return nullptr; }
    // True if the port moves any part of the written bytes, and never waits for the interpreter lock. The answer to a page
    // fault depends on both: the thread with the fault may hold that lock, and waits for one page.
    virtual bool serves_faults() const noexcept { return true; }

    void move(Direction direction, const Piece& piece) {
        if (direction == Direction::read) {
            read(piece.offset, reinterpret_cast<void*>(piece.address), piece.nbytes);
        } else {
            write(piece.offset, reinterpret_cast<const void*>(piece.address), piece.nbytes);
        }
    }
};

}  // namespace farpool
