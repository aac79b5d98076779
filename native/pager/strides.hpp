// Strides: predicts the next accesses without a tape, by majority vote over the latest steps from access to access.
//
// A program that walks through its blocks at a steady pace, with a few other accesses in between, has one step that occurs in
// more than half of the latest accesses. The vote is over the shortest stretch of the latest steps that has a majority, so that
// a new pace is found soon and an old one survives a few other accesses (the idea comes from Leap: Al Maruf and Chowdhury,
// "Effectively Prefetching Remote Memory with Leap", USENIX ATC 2020).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace farpool::pager {

class Strides {
public:
    // Notes an access to `count` blocks from `name` on.
    void record(std::int64_t name, std::int32_t count);
    // Names of the next `count` blocks at the same pace; empty if there is no pace.
    std::vector<std::int64_t> coming(int count) const;
    // True if the latest access was expected.
    bool foretold() const noexcept { return foretold_; }

private:
    static constexpr std::array<std::size_t, 3> lengths{4, 8, 16};

    // The latest `length` steps, and the step that has the majority among them.
    class Stretch {
    public:
        explicit Stretch(std::size_t length) : length_(length) {}
        void add(std::int64_t step);
        std::int64_t majority() const noexcept { return majority_; }  // 0 if there is none

    private:
        std::size_t count(std::int64_t step) const { return static_cast<std::size_t>(std::ranges::count(steps_, step)); }

        std::size_t length_;
        std::size_t oldest_ = 0;
        std::vector<std::int64_t> steps_;  // a ring once it is full
        std::int64_t majority_ = 0;
    };

    std::array<Stretch, 3> stretches_{Stretch(lengths[0]), Stretch(lengths[1]), Stretch(lengths[2])};
    std::int64_t last_ = 0;
    std::int64_t stride_ = 0;
    bool foretold_ = false;
};

}  // namespace farpool::pager
