#include "region/userfault.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "core/error.hpp"
#include "core/relax.hpp"

namespace farpool::region {

namespace {

// The kernel's interface as of Linux 6.6, spelled out: the headers of the machine that builds farpool may be older than the
// kernel that runs it.
struct Api {
    std::uint64_t api;
    std::uint64_t features;
    std::uint64_t ioctls;
};
struct Range {
    std::uint64_t start;
    std::uint64_t nbytes;
};
struct Register {
    Range range;
    std::uint64_t mode;
    std::uint64_t ioctls;
};
struct Copy {
    std::uint64_t to;
    std::uint64_t from;
    std::uint64_t nbytes;
    std::uint64_t mode;
    std::int64_t copied;
};
struct Continue {
    Range range;
    std::uint64_t mode;
    std::int64_t mapped;
};
struct Protect {
    Range range;
    std::uint64_t mode;
};
struct Poison {
    Range range;
    std::uint64_t mode;
    std::int64_t poisoned;
};
struct [[gnu::packed]] Message {
    std::uint8_t event;
    std::array<std::uint8_t, 7> reserved;
    std::uint64_t flags;
    std::uint64_t address;
    std::uint32_t thread;
    std::uint32_t padding;
};
static_assert(sizeof(Message) == 32);

constexpr std::uint64_t version = 0xAA;
constexpr std::uint64_t feature_pagefault_flag_wp = 1 << 0;
constexpr std::uint64_t feature_missing_shmem = 1 << 5;
constexpr std::uint64_t feature_thread_id = 1 << 8;
constexpr std::uint64_t feature_minor_shmem = 1 << 10;
constexpr std::uint64_t feature_wp_shmem = 1 << 12;
constexpr std::uint64_t feature_poison = 1 << 14;
constexpr std::uint64_t needed =
    feature_pagefault_flag_wp | feature_missing_shmem | feature_thread_id | feature_minor_shmem | feature_wp_shmem;

constexpr unsigned long call_api = _IOWR(0xAA, 0x3F, Api);
constexpr unsigned long call_register = _IOWR(0xAA, 0x00, Register);
constexpr unsigned long call_unregister = _IOR(0xAA, 0x01, Range);
constexpr unsigned long call_wake = _IOR(0xAA, 0x02, Range);
constexpr unsigned long call_copy = _IOWR(0xAA, 0x03, Copy);
constexpr unsigned long call_protect = _IOWR(0xAA, 0x06, Protect);
constexpr unsigned long call_continue = _IOWR(0xAA, 0x07, Continue);
constexpr unsigned long call_poison = _IOWR(0xAA, 0x08, Poison);
constexpr unsigned long call_new = _IO(0xAA, 0x00);  // of /dev/userfaultfd

constexpr std::uint64_t register_all = 1 | 2 | 4;  // missing, write-protect, minor
constexpr std::uint64_t mode_protect = 2;          // of copy and continue
constexpr std::uint64_t copy_asleep = 1;           // wakes no thread
constexpr std::uint64_t protect_on = 1;
constexpr std::uint64_t protect_off_asleep = 2;  // wakes no thread
constexpr std::uint8_t event_pagefault = 0x12;
constexpr std::uint64_t flag_write = 1;
constexpr std::uint64_t flag_protected = 2;
constexpr std::uint64_t flag_minor = 4;
constexpr std::uint64_t page_nbytes = 4096;

std::uint64_t at(const void* place) { return reinterpret_cast<std::uintptr_t>(place); }

// Opens a descriptor that also receives faults of system calls; -1 with errno if the kernel refuses it.
int open_userfault() {
    const int fd = static_cast<int>(syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK));
    if (fd >= 0 || errno != EPERM) {
        return fd;
    }
    const int device = open("/dev/userfaultfd", O_RDWR | O_CLOEXEC);
    if (device < 0) {
        errno = EPERM;
        return -1;
    }
    const int made = ioctl(device, call_new, O_CLOEXEC | O_NONBLOCK);
    const int code = errno;
    close(device);
    errno = code;
    return made;
}

[[noreturn]] void refuse(const std::string& why) { throw PortFailure({ErrorKind::unsupported, "Region: " + why, {}, 0, {}}); }

[[noreturn]] void refuse_open(int code) {
    if (code == EPERM) {
        refuse(
            "this process may not use userfaultfd, by which a region gets its pages. Allow it in one of these ways: sudo "
            "sysctl "
            "vm.unprivileged_userfaultfd=1; give the process the capability CAP_SYS_PTRACE; give its user read and write "
            "access to /dev/userfaultfd; in a container, also allow the system call userfaultfd in its seccomp profile");
    }
    if (code == ENOSYS) {
        refuse(
            "this kernel has no userfaultfd, or a seccomp profile hides it: use Linux 5.19 or newer with CONFIG_USERFAULTFD, "
            "and allow the system call userfaultfd in the container's seccomp profile");
    }
    refuse("the kernel opens no userfaultfd: " + reason(code));
}

}  // namespace

std::string reason(int code) { return std::generic_category().message(code); }

Userfault::Userfault() : fd_(open_userfault()) {
    if (fd_ < 0) {
        refuse_open(errno);
    }
    // A descriptor can be asked for its features only once, so we ask with one that we close again.
    Api all{version, 0, 0};
    const int asked = open_userfault();
    const bool known = asked >= 0 && ioctl(asked, call_api, &all) == 0;
    if (asked >= 0) {
        close(asked);
    }
    can_poison_ = known && (all.features & feature_poison) != 0;
    Api chosen{version, needed | (can_poison_ ? feature_poison : 0), 0};
    if (!known || (all.features & needed) != needed || ioctl(fd_, call_api, &chosen) != 0) {
        close(fd_);
        refuse(
            "this kernel's userfaultfd does not notice writes to shared memory: use Linux 5.19 or newer (on x86-64 or aarch64) "
            "with CONFIG_PTE_MARKER_UFFD_WP");
    }
}

Userfault::~Userfault() { close(fd_); }

void Userfault::add(std::byte* begin, std::size_t nbytes) {
    Register what{{at(begin), nbytes}, register_all, 0};
    if (ioctl(fd_, call_register, &what) != 0) {
        refuse("the kernel registers no faults of the region: " + reason(errno));
    }
}

void Userfault::remove(std::byte* begin, std::size_t nbytes) noexcept {
    Range range{at(begin), nbytes};
    ioctl(fd_, call_unregister, &range);
}

std::span<Fault> Userfault::take(std::span<Fault> into) const {
    std::array<Message, 16> messages;
    const std::size_t most = std::min(messages.size(), into.size());
    const ssize_t got = read(fd_, messages.data(), most * sizeof(Message));
    std::size_t count = 0;
    for (std::size_t index = 0; got > 0 && index < static_cast<std::size_t>(got) / sizeof(Message); ++index) {
        const Message& message = messages[index];
        if (message.event == event_pagefault) {
            const Fault::Kind kind = (message.flags & flag_protected) != 0 ? Fault::Kind::protected_
                                     : (message.flags & flag_minor) != 0   ? Fault::Kind::unmapped
                                                                           : Fault::Kind::missing;
            into[count++] = {message.address, message.thread, kind, (message.flags & flag_write) != 0};
        }
    }
    return into.first(count);
}

void Userfault::wait(int other, int milliseconds) const noexcept {
    std::array<pollfd, 2> watched{{{fd_, POLLIN, 0}, {other, POLLIN, 0}}};
    poll(watched.data(), watched.size(), milliseconds);
}

bool Userfault::copy(std::byte* begin, const std::byte* from, std::size_t nbytes, bool protect, bool asleep) const {
    const std::uint64_t mode = (protect ? mode_protect : 0) | (asleep ? copy_asleep : 0);
    bool all = true;
    std::size_t done = 0;
    for (unsigned attempt = 1; done < nbytes;) {
        Copy what{at(begin + done), at(from + done), nbytes - done, mode, 0};
        if (ioctl(fd_, call_copy, &what) == 0) {
            break;
        }
        if (what.copied > 0) {
            done += static_cast<std::size_t>(what.copied);
        } else if (errno == EEXIST) {
            wake(begin + done, page_nbytes);
            done += page_nbytes;
            all = false;
        } else if (errno == EAGAIN) {
            relax(attempt++);  // another thread changes the mappings of the process
        } else {
            fail_tier("fast", "the kernel gives the region no page: " + reason(errno), errno);
        }
    }
    return all;
}

bool Userfault::map(std::byte* begin, std::size_t nbytes, bool protect) const {
    static std::atomic<bool> protects = true;
    bool noticed = protect && protects.load(std::memory_order_relaxed);
    std::size_t done = 0;
    for (unsigned attempt = 1; done < nbytes;) {
        Continue what{{at(begin + done), nbytes - done}, noticed ? mode_protect : 0, 0};
        if (ioctl(fd_, call_continue, &what) == 0) {
            break;
        }
        if (what.mapped > 0) {
            done += static_cast<std::size_t>(what.mapped);
        } else if (errno == EEXIST) {
            wake(begin + done, page_nbytes);
            done += page_nbytes;
        } else if (errno == EAGAIN) {
            relax(attempt++);
        } else if (errno == EINVAL && noticed) {
            protects.store(noticed = false, std::memory_order_relaxed);
        } else {
            fail_tier("fast", "the kernel maps no page of the region: " + reason(errno), errno);
        }
    }
    return noticed || !protect;
}

void Userfault::protect(std::byte* begin, std::size_t nbytes, bool on) const {
    Protect what{{at(begin), nbytes}, on ? protect_on : 0};
    for (unsigned attempt = 1; ioctl(fd_, call_protect, &what) != 0;) {
        if (errno != EAGAIN) {
            fail_tier("fast", "the kernel does not protect pages of the region: " + reason(errno), errno);
        }
        relax(attempt++);
    }
}

void Userfault::wake(std::byte* begin, std::size_t nbytes) const noexcept {
    Range range{at(begin), nbytes};
    ioctl(fd_, call_wake, &range);
}

void Userfault::poison(std::byte* page) const noexcept {
    // A note of the kernel that the page was protected would be in the way.
    Protect unprotected{{at(page), page_nbytes}, protect_off_asleep};
    ioctl(fd_, call_protect, &unprotected);
    Poison what{{at(page), page_nbytes}, 0, 0};
    if (can_poison_ && (ioctl(fd_, call_poison, &what) == 0 || errno == EEXIST)) {
        wake(page, page_nbytes);
        return;
    }
    // An access beyond the end of a file is answered with SIGBUS, so an empty file takes the page's place.
    const int empty = memfd_create("farpool-lost", MFD_CLOEXEC);
    if (empty >= 0) {
        mmap(page, page_nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, empty, 0);
        close(empty);
    }
    wake(page, page_nbytes);
}

}  // namespace farpool::region
