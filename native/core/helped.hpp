// Work that a second thread of the process may help with while its caller continues it.
#pragma once

#include <atomic>
#include <cstddef>

namespace farpool {

class HelperThread;

// One piece of work. The process has one thread for all of them, which takes one at a time; a caller that finds it busy works
// alone.
class Helped {
public:
    // Below this many bytes to checksum or copy, waking a thread costs about as much as it saves.
    static constexpr std::size_t worth_it = std::size_t{256} << 10;

    // `work` is called on the other thread with `self`, if it is called at all.
    Helped(void (*work)(void* self) noexcept, void* self) noexcept : work_(work), self_(self) {}
    ~Helped() { end(); }
    Helped(const Helped&) = delete;
    Helped& operator=(const Helped&) = delete;

    // Offers the work, once; false if the other thread is busy, or if there is none.
    bool offer() noexcept;
    // Withdraws the offer, or waits until the other thread has left the work: ask it to leave before this call.
    void end() noexcept;

private:
    friend class HelperThread;

    void (*const work_)(void*) noexcept;
    void* const self_;
    HelperThread* helper_ = nullptr;  // the thread that may have taken the work
    std::atomic<bool> left_ = false;
};

}  // namespace farpool
