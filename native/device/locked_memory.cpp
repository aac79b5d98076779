#include "device/locked_memory.hpp"

#include <sys/mman.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "core/error.hpp"

namespace farpool::device {

void lock_memory(Device& device, void* memory, std::size_t nbytes) {
    device.lock_pages(memory, nbytes);
    // Without this, on Linux kernels before 5.12, the parent's next write to a page after a fork could go to a copy of the page
    // while the device still uses the old page. A child never uses that memory, because its pool is closed.
    if (madvise(memory, nbytes, MADV_DONTFORK) != 0) {
        const int code = errno;
        device.unlock_pages(memory);
        fail_tier({}, "cannot keep it from forked processes: " + std::generic_category().message(code), code);
    }
}

void unlock_memory(Device& device, void* memory, std::size_t nbytes) noexcept {
    device.unlock_pages(memory);
    madvise(memory, nbytes, MADV_DOFORK);
}

LockedMemory::LockedMemory(std::shared_ptr<Device> device, std::size_t nbytes) : device_(std::move(device)), memory_(nbytes) {
    memory_.touch(0, nbytes);  // here, so that the device does not have to make the pages one by one
    lock_memory(*device_, memory_.data(), nbytes);
}

void LockedMemory::release() noexcept {
    if (memory_.data() != nullptr && memory_.ours()) {
        unlock_memory(*device_, memory_.data(), memory_.nbytes());
    }
    memory_.release();
}

}  // namespace farpool::device
