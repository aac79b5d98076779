// The work of a turn, and the units in which it is counted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace farpool {

// Costs in units of work. One unit is the time of sending a byte (0.2 ns, measured over loopback); the costs are rounded.
namespace work {
constexpr std::uint64_t call = 8 * 1024;      // a system call that moves bytes
constexpr std::uint64_t frame = 6 * 1024;     // a request: parsing it, finding its object, its reply
constexpr std::uint64_t publish = 16 * 1024;  // an object that is published: its place, and evictions for it
constexpr std::uint64_t key = 400;            // a key of a lookup
constexpr std::uint64_t backed_byte = 2;      // a byte of memory taken for an object, and zeroed by the system
}  // namespace work

// The work of one turn. Half of it is for reading and answering requests, so that each turn also sends replies.
class Turn {
public:
    explicit Turn(std::uint64_t units_max) : units_max_(units_max) {}

    void spend(std::uint64_t units) noexcept { spent_ += units; }
    std::uint64_t spent() const noexcept { return spent_; }
    bool is_over() const noexcept { return spent_ >= units_max_; }
    bool is_read_out() const noexcept { return spent_ >= units_max_ / 2; }
    // Bytes to receive, to check or to send at once.
    std::size_t step_nbytes() const noexcept { return static_cast<std::size_t>(units_max_ / 2); }

private:
    std::uint64_t units_max_;
    std::uint64_t spent_ = 0;
};

}  // namespace farpool
