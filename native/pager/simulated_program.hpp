// A simulated program over a pager, to measure the pager: one tier behind a link in virtual time, and no bytes.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/transfer_queue.hpp"
#include "pager/pager.hpp"

namespace farpool::pager {

// What things cost, in virtual seconds.
struct SimulatedHardware {
    double seconds_per_byte;  // of the link, each way
    double access_seconds;    // of the program's thread, for an access
    double transfer_seconds;  // of the program's thread, for a transfer that it starts
    bool computes_on_device;  // the program's thread goes on while the device computes, one access after the other
};

class SimulatedProgram {
public:
    // A quarter of `blocks` blocks of 4 KiB in the arena, where a block takes a microsecond on the link and the program
    // computes for as long, on the host. `history`: accesses that the tape remembers.
    SimulatedProgram(std::int64_t blocks, std::int64_t history);
    // One storage for each entry of `storages`, cut into blocks of `block_bytes`, of which `capacity` bytes fit into the arena.
    SimulatedProgram(std::int64_t capacity, std::span<const std::int64_t> storages, std::int64_t block_bytes,
                     std::int64_t history, SimulatedHardware hardware);
    SimulatedProgram(const SimulatedProgram&) = delete;
    SimulatedProgram& operator=(const SimulatedProgram&) = delete;

    // Writes each block once.
    void fill();
    // Makes `accesses` reads of one block after the other, over and over, from where the last call stopped.
    void loop(std::int64_t accesses);
    // Makes `accesses` reads of blocks picked at random.
    void shuffled(std::int64_t accesses);
    // Makes an access, for which the device computes `seconds`.
    void access(std::vector<Run> runs, double seconds);
    // When the program has done all that it has begun.
    double finished() const { return std::max(now_, computed_); }
    // Bytes that were moved so far, by direction.
    const std::array<std::int64_t, 2>& moved() const { return moved_; }

private:
    struct Ending {
        double end;
        double begin;
        TransferId transfer;
    };
    using Waiting = std::pair<std::shared_ptr<const Transfer>, bool>;  // and whether an access waits for it

    void access(BlockId block, Mode mode) { access({{block, 1, mode, -1}}, 0.0); }
    void start();
    void raise();
    void dispatch(double time);
    std::size_t most_urgent(const std::vector<Waiting>& waiting) const;
    void progress(double until);
    void complete();
    double next_end() const;
    double computed(std::int64_t ordinal) const;

    SimulatedHardware hardware_;
    std::int64_t blocks_;
    Pager pager_;
    double now_ = 0.0;
    double computed_ = 0.0;  // when the device will have done all that it was given
    std::int64_t next_ = 0;
    std::mt19937_64 random_{0};
    // The link moves one transfer at a time in each direction, the most urgent of those that wait for no other one.
    std::array<std::vector<Waiting>, 2> waiting_;
    std::array<std::optional<Ending>, 2> moving_;
    std::unordered_set<TransferId> open_;  // transfers that have not ended
    std::vector<Ending> ended_;            // that the pager does not know yet
    std::array<std::int64_t, 2> moved_{};
    std::deque<Ran> computing_;  // on the device, as far as the host does not know yet that they have ended
};

}  // namespace farpool::pager
