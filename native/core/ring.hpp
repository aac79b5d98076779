// One io_uring, used through the system calls.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace farpool {

class Ring {
public:
    static constexpr unsigned depth = 16;

    // Opens a ring; null if the kernel has no io_uring or forbids this process to use it.
    static std::unique_ptr<Ring> open();
    ~Ring();
    Ring(const Ring&) = delete;
    Ring& operator=(const Ring&) = delete;

    // Queues one request. The caller keeps at most `depth` of them under way.
    void push(bool write, int fd, void* address, unsigned nbytes, std::uint64_t offset, std::uint64_t tag);
    // Passes queued requests to the kernel and waits for at least one completion. 0, or an errno of the call itself: requests
    // that the kernel has taken are then still under way.
    int enter();
    // Takes the next completion; false if there is none yet. `result` is a number of bytes, or a negative errno.
    bool pop(std::uint64_t& tag, int& result);
    // Withdraws the requests that the kernel has not taken, and returns their number.
    unsigned withdraw();

private:
    struct Mapping {
        void* address = nullptr;
        std::size_t nbytes = 0;
        ~Mapping();
    };

    Ring() = default;
    bool setup();

    int fd_ = -1;
    Mapping submissions_;
    Mapping completions_;
    Mapping entries_;
    unsigned* sq_head_ = nullptr;
    unsigned* sq_tail_ = nullptr;
    unsigned* sq_array_ = nullptr;
    unsigned sq_mask_ = 0;
    unsigned* cq_head_ = nullptr;
    unsigned* cq_tail_ = nullptr;
    unsigned cq_mask_ = 0;
    void* cqes_ = nullptr;
};

}  // namespace farpool
