// The work of a turn, and the units in which it is counted.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace farpool {

// Costs in units of work. One unit is the time of sending a byte (0.2 ns, measured over loopback); the costs are rounded.
namespace work {
constexpr std::uint64_t call = 8 * 1024;            // a system call that moves bytes
constexpr std::uint64_t frame = 6 * 1024;           // a request: parsing it, finding its object, its reply
constexpr std::uint64_t publish = 16 * 1024;        // an object that is published: its place, and evictions for it
constexpr std::uint64_t key = 400;                  // a key of a lookup
constexpr std::uint64_t listed_slice = 192 * 1024;  // a slice of a list
constexpr std::uint64_t listed = 2 * 1024;          // an object in a list
// A handshake. It takes six times as long, but in a thread of the program that controls the node, next to the loop.
constexpr std::uint64_t handshake = 512 * 1024;
constexpr std::uint64_t backed_byte = 2;  // a byte of memory taken for an object, and zeroed by the system
}  // namespace work

// Work that was done for a tenant: bytes that moved in either direction, and units of all other work.
struct Work {
    std::uint64_t bytes_in = 0, bytes_out = 0, other = 0;

    std::uint64_t bytes() const noexcept { return bytes_in + bytes_out; }
    std::uint64_t units() const noexcept { return bytes() + other; }
    // What a rate in bytes a second counts: the bytes, or the other work if that is more. So a rate holds for both.
    std::uint64_t metered() const noexcept { return std::max(bytes(), other); }
};

// The work of one turn. Half of it is for reading and answering requests, so that each turn also sends replies.
class Turn {
public:
    explicit Turn(std::uint64_t units_max) : units_max_(units_max) {}

    void receive(std::uint64_t nbytes) noexcept { work_.bytes_in += nbytes; }
    void send(std::uint64_t nbytes) noexcept { work_.bytes_out += nbytes; }
    void spend(std::uint64_t units) noexcept { work_.other += units; }
    const Work& work() const noexcept { return work_; }
    bool is_over() const noexcept { return work_.units() >= units_max_; }
    bool is_read_out() const noexcept { return work_.units() >= units_max_ / 2; }
    // Bytes to receive, to check or to send at once.
    std::size_t step_nbytes() const noexcept { return static_cast<std::size_t>(units_max_ / 2); }

private:
    std::uint64_t units_max_;
    Work work_{};
};

}  // namespace farpool
