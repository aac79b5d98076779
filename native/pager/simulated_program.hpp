// A pager under a program on simulated hardware, to measure the pager: one tier behind a link in virtual time, a quarter of
// the blocks in the arena, no bytes.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <unordered_map>

#include "pager.hpp"

namespace farpool::pager {

class SimulatedProgram {
public:
    // `history`: accesses that the tape remembers.
    SimulatedProgram(std::int64_t blocks, std::int64_t history);
    SimulatedProgram(const SimulatedProgram&) = delete;
    SimulatedProgram& operator=(const SimulatedProgram&) = delete;

    // Writes each block.
    void fill();
    // Reads so many blocks one after the other, from where it stopped the last time, and over and over.
    void loop(std::int64_t accesses);
    // Reads so many blocks picked at random.
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
    // By direction: when the link is free, and what is under way, in the order of the ends.
    std::array<double, 2> free_{};
    std::array<std::deque<Ending>, 2> under_way_;
    std::unordered_map<TransferId, double> ends_;
};

}  // namespace farpool::pager
