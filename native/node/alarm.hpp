// Wakes the loop of a node from any thread.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <system_error>

#include "node/files.hpp"

namespace farpool {

class Alarm {
public:
    Alarm() : file_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
        if (file_.fd() < 0) {
            throw std::system_error(errno, std::generic_category(), "eventfd");
        }
    }
    // Readable after wake(), until clear().
    int fd() const noexcept { return file_.fd(); }
    void wake() const noexcept {
        const std::uint64_t one = 1;
        static_cast<void>(!write(file_.fd(), &one, sizeof one));  // a full counter wakes as well
    }
    void clear() const noexcept {
        std::uint64_t times = 0;
        static_cast<void>(!read(file_.fd(), &times, sizeof times));
    }

private:
    File file_;
};

}  // namespace farpool
