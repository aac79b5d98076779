// A simulated program over a pager, to measure the pager: one tier behind a link in virtual time, a quarter of the blocks in
// the arena, no bytes.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <unordered_map>

#include "pager/pager.hpp"

namespace farpool::pager {

class SimulatedProgram {
public:
    // `history`: accesses that the tape remembers.
    SimulatedProgram(std::int64_t blocks, std::int64_t history);
    SimulatedProgram(const SimulatedProgram&) = delete;
    SimulatedProgram& operator=(const SimulatedProgram&) = delete;

    // Writes each block once.
    void fill();
    // Makes `accesses` reads of one block after the other, over and over, from where the last call stopped.
    void loop(std::int64_t accesses);
    // Makes `accesses` reads of blocks picked at random.
    void shuffled(std::int64_t accesses);

private:
    struct Ending {
        double end;
        double begin;
        TransferId transfer;
    };

    void access(BlockId block, Mode mode);
    void start();
    void complete();
    double next_end() const;

    std::int64_t blocks_;
    Pager pager_;
    double now_ = 0.0;
    std::int64_t next_ = 0;
    std::mt19937_64 random_{0};
    // By direction: the time at which the link is free, and the transfers under way in the order of their ends.
    std::array<double, 2> free_{};
    std::array<std::deque<Ending>, 2> under_way_;
    std::unordered_map<TransferId, double> ends_;
};

}  // namespace farpool::pager
