// How soon blocks are used again, learnt from earlier uses: the worth of keeping a block, by its uses and its age.
//
// The worth is the Gittins index of the block (Gittins, "Bandit processes and dynamic allocation indices", 1979): over all
// spans of time for which the block could be kept, the largest ratio of the probability of a use in the span to the time for
// which it would take up room, which ends with the use. Times of reuse are counted separately for blocks with 0, 1, 2, 3 and
// more earlier uses, like life tables: among blocks that have reached an age, the share that is used before the next age.
// Evicted blocks are remembered too, so the policy's evictions do not distort the model. Time is counted in uses.
//
// A block is expected to be used again as soon as a block with one use less, unless that is significantly wrong, by more than
// twice the standard error. A few chance uses are no rule, and a prefix begins with its most used blocks: without them the rest
// is worthless.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <utility>
#include <vector>

#include "policy/id_map.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class ReuseModel {
public:
    ReuseModel() = default;
    ReuseModel(const ReuseModel&) = delete;
    ReuseModel& operator=(const ReuseModel&) = delete;

    // Sets the number of blocks to remember, which must not decrease; the least recently used block is forgotten first.
    void remember(std::size_t most) { most_ = most; }
    // Notes a use; returns the number of known uses of the block before it.
    std::uint32_t use(std::uint64_t id);
    // Advances the time by one use of a block that is not remembered.
    void pass() { ++clock_; }
    // Expected uses per unit of time that the block takes up room, if it is kept for as long as that pays.
    double worth(std::uint32_t uses, std::uint64_t used) const { return worth_[class_of(uses)][age_of(clock_ - used)]; }
    // Number of uses so far, which is the time.
    std::uint64_t now() const noexcept { return clock_; }
    // Bytes for the remembered blocks.
    std::uint64_t nbytes() const noexcept { return known_.size() * (sizeof(Known) + sizeof(Link)) + numbers_.nbytes(); }

private:
    static constexpr std::size_t classes = 5;
    static constexpr std::size_t ages = 160;  // four for each doubling
    using Table = std::array<std::array<double, ages>, classes>;
    using Kind = std::pair<std::size_t, std::size_t>;  // class and age of a repeated use
    static constexpr Kind none{classes, 0};            // of a first use

    struct Known {
        std::uint64_t id;
        std::uint64_t used;
        std::uint32_t uses;
    };

    static std::size_t class_of(std::uint32_t uses) { return std::min<std::size_t>(uses, classes - 1); }
    static std::size_t age_of(std::uint64_t age) {
        if (age < 4) {
            return age;
        }
        const auto octave = static_cast<std::size_t>(std::bit_width(age)) - 1;
        return std::min(4 * (octave - 1) + ((age >> (octave - 2)) & 3), ages - 1);
    }
    // The first age of a number of `age_of`.
    static double age_at(std::size_t number) {
        return number < 4 ? static_cast<double>(number)
                          : static_cast<double>((4 + number % 4) * (std::uint64_t{1} << (number / 4 - 1)));
    }
    void learn();

    std::size_t most_ = 1024;
    std::uint64_t clock_ = 0;
    std::uint64_t learnt_ = 0;  // when the worth was computed
    IdMap numbers_;
    std::vector<Known> known_;
    Links links_;
    SlotList order_{links_};
    Table used_{};       // by class and age: repeated uses
    Table forgotten_{};  // blocks that were at this age when they were forgotten
    Table worth_{};
    std::uint64_t bursts_ = 0;  // series of repeated uses, all of one class and age
    Kind last_ = none;          // of the last use
};

}  // namespace farpool::policy
