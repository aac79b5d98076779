// A port whose inner port can be replaced while transfers use it, after its bytes were copied to the new one.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/port.hpp"

namespace farpool {

// A replacement has three steps: set_target(), copy_chunks() until it returns false, and replace(). Until replace() has ended
// the inner port serves all transfers and has all bytes, so a replacement may be given up at any time with drop_target(). Only
// one thread at a time may call these four.
//
// A transfer that uses several of these ports may hold one while it waits for another. So among the ports that are used
// together, copy_chunks() and replace() may run on one at a time, or two of them would wait for each other.
//
// The new port has to be of the same sort as the old one: either both only move one piece per call and do more than copy, or
// neither does. Otherwise a caller that has asked begin() would use the new port in the old one's way.
class ReplaceablePort : public Port {
public:
    // `name`: of the tier, for errors. `nbytes`: size of the port. Bytes are copied in chunks of `chunk` bytes.
    ReplaceablePort(std::string name, Port& inner, std::uint64_t nbytes, std::size_t chunk);
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    std::unique_ptr<Transfer> begin(Direction direction) override;
    unsigned concurrency() const noexcept override;
    bool serves_faults() const noexcept override { return serves_faults_; }

    // Sets the port that will replace the inner one. `same_bytes`: it reaches the same memory, so there is nothing to copy.
    void set_target(Port& target, bool same_bytes);
    // Copies a chunk that the target lacks, and one more for each chunk that was written since the last call, so that repeated
    // calls come to an end however much is written. Reads each chunk back and compares. Writes wait for the end of the call,
    // reads go on. Returns false if the target lacked nothing.
    bool copy_chunks();
    // Stops all transfers, copies the chunks that the target lacks, and puts it in the place of the inner port; or puts
    // `instead` there, a port whose bytes include the target's.
    void replace(Port* instead = nullptr);
    void drop_target();

private:
    enum class Closed { nothing, writes, all };
    class Inside;
    class Gate;
    class Guarded;

    bool keeps_out(Direction direction) const noexcept {
        return closed_ == Closed::all || (closed_ == Closed::writes && direction == Direction::write);
    }
    void note_written(std::size_t first, std::size_t end) noexcept;
    bool copy_first_lacking();

    const std::string name_;
    const std::uint64_t nbytes_;
    const std::size_t chunk_;
    const bool serves_faults_;  // of the first inner port; the others are of the same sort
    Port* inner_;               // changes only while all transfers are kept out

    mutable std::mutex mutex_;  // guards the fields below
    std::condition_variable changed_;
    Closed closed_ = Closed::nothing;
    unsigned inside_[2] = {0, 0};  // transfers under way, by direction
    unsigned waiting_ = 0;         // transfers that are kept out
    std::vector<bool> written_;    // chunks that were ever written, so that only these are copied
    std::vector<bool> lacking_;    // chunks that were written after they were copied to the target, or not copied yet
    std::size_t relapsed_ = 0;     // chunks that the target lacks again since the last call of copy_chunks()

    // Only the thread that replaces uses these.
    Port* target_ = nullptr;
    bool same_bytes_ = false;
    std::vector<std::byte> copied_;
    std::vector<std::byte> read_back_;
};

}  // namespace farpool
