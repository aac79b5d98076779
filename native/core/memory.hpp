// Anonymous memory, mapped at a 2 MiB boundary so that the kernel can back it with huge pages.
//
// A forked child leaves it as it is: page-locked parts are missing in the child, and other memory may be mapped in their place.
#pragma once

#include <sys/types.h>

#include <cstddef>

namespace farpool {

class Memory {
public:
    explicit Memory(std::size_t nbytes);
    ~Memory();
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;

    std::byte* data() const noexcept { return data_; }
    std::size_t nbytes() const noexcept { return nbytes_; }
    void touch(std::size_t offset, std::size_t nbytes);
    void discard(std::size_t offset, std::size_t nbytes);
    void release() noexcept;
    // True in the process that mapped it.
    bool ours() const noexcept;

private:
    pid_t owner_;
    std::byte* data_ = nullptr;
    std::size_t nbytes_ = 0;
    std::size_t mapped_ = 0;
};

}  // namespace farpool
