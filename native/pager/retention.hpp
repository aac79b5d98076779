// Retention: chooses which blocks stay, of a loop that does not fit, and which make room for those that are fetched.
//
// Belady's rule says how many bytes a loop has to fetch in each turn, but evicting the farthest next use keeps one stretch of
// the loop: the link idles while the program runs through it, and the program waits in the rest. Any other choice of as many
// blocks among equally distant ones needs as few bytes. So of the accesses whose next use lies too far away for all of them
// to be kept, every n-th is: what is fetched is then spread evenly over the loop, and so is the work of the link.
//
// Distances are measured in bytes accessed. If a share s(d) of the accesses with distance d is kept, the kept blocks cover on
// average the mean over all bytes accessed of s(d) d. For distances shorter than the room there is, s is 1. For the long
// ones s(d) d falls with a power of the distance, as Belady prefers the nearer ones, and is scaled such that the room is
// filled.
#pragma once

#include <cstdint>

namespace farpool::pager {

class Retention {
public:
    // `room`: bytes that blocks may be kept in.
    explicit Retention(std::int64_t room) : room_(room), distance_(static_cast<double>(room)) {}

    std::int64_t room() const noexcept { return room_; }
    void set_room(std::int64_t room) { room_ = room; }
    // True if the `nbytes` bytes of an access, which are used again after `distance` bytes of others, are to stay. `turn`:
    // bytes of one turn of the loop.
    bool keeps(std::int64_t nbytes, std::int64_t distance, std::int64_t turn);

private:
    // A moving mean over about one turn of the loop.
    struct Mean {
        double value;
        void note(double next, double weight) { value += weight * (next - value); }
    };

    std::int64_t room_;
    Mean covered_{0.0};  // bytes of the room that the short distances cover
    Mean long_{1.0};     // share of the bytes accessed whose distance is long
    Mean distance_;      // of the long ones
    Mean scale_{1.0};
    double owed_ = 0.0;  // bytes that should have been kept by now and have not, up to two accesses'
    double largest_ = 0.0;
};

}  // namespace farpool::pager
