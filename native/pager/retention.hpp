// Retention: chooses which blocks of a loop that does not fit are kept, and which make room for fetched blocks.
//
// Belady's rule gives the number of bytes that a loop has to fetch in each turn. But evicting the farthest next use keeps one
// stretch of the loop: the link idles while the program runs through it, and the program waits in the rest. Any other choice of
// as many blocks among equally distant ones needs as few bytes. So if the arena cannot keep the blocks of all accesses with a
// distant next use, it keeps every n-th. The fetched bytes are then spread evenly over the loop, and so is the work of the
// link.
//
// Distances are measured in bytes accessed. If a share s(d) of the accesses with distance d is kept, the kept blocks cover on
// average the mean over all bytes accessed of s(d) d. For distances shorter than the available room, s is 1. For long distances
// s(d) d falls with a power of the distance, because Belady prefers the nearer ones, and is scaled such that the room is
// filled.
#pragma once

#include <cstdint>

namespace farpool::pager {

class Retention {
public:
    // `room`: bytes of the arena for blocks that are kept.
    explicit Retention(std::int64_t room) : room_(room), distance_(static_cast<double>(room)) {}

    std::int64_t room() const noexcept { return room_; }
    void set_room(std::int64_t room) { room_ = room; }
    // True if the `nbytes` bytes of an access are to be kept; they are used again after `distance` bytes of other accesses.
    // `turn`: bytes of one turn of the loop.
    bool keeps(std::int64_t nbytes, std::int64_t distance, std::int64_t turn);

private:
    // A moving mean over about one turn of the loop.
    struct Mean {
        double value;
        void note(double next, double weight) { value += weight * (next - value); }
    };

    std::int64_t room_;
    Mean covered_{0.0};  // bytes of the room that blocks with a short distance take
    Mean long_{1.0};     // share of the bytes accessed whose distance is long
    Mean distance_;      // mean of the long distances
    Mean scale_{1.0};
    double owed_ = 0.0;  // bytes still to be kept to reach the share, at most the bytes of two accesses
    double largest_ = 0.0;
};

}  // namespace farpool::pager
