#include "region/mapping.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>

#include "core/error.hpp"
#include "region/userfault.hpp"

namespace farpool::region {

namespace {

std::size_t bytes(Page pages) { return std::size_t{pages} * page_nbytes; }

[[noreturn]] void fail(const std::string& what) { fail_tier("fast", "Region: " + what + ": " + reason(errno), errno); }

}  // namespace

Mapping::Mapping(Page most) : most_(most), fd_(memfd_create("farpool-region", MFD_CLOEXEC)) {
    if (fd_ < 0) {
        fail("the kernel makes no file in memory");
    }
    void* const place = mmap(nullptr, bytes(most), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (place == MAP_FAILED) {
        const int code = errno;
        close(fd_);
        errno = code;
        fail("there is no free range of " + std::to_string(bytes(most)) + " addresses");
    }
    data_ = static_cast<std::byte*>(place);
}

Mapping::~Mapping() {
    munmap(data_, bytes(most_));
    close(fd_);
}

void Mapping::grow(Page from, Page to) {
    if (ftruncate(fd_, static_cast<off_t>(bytes(to))) != 0) {
        fail("the file in memory does not grow");
    }
    void* const place =
        mmap(at(from), bytes(to - from), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd_, static_cast<off_t>(bytes(from)));
    if (place == MAP_FAILED) {
        const int code = errno;
        shrink(to, from);
        errno = code;
        fail("the pages are not mapped");
    }
    // A forked child could not get missing pages: faults there are not reported to this process. So it has no such range at
    // all.
    madvise(at(from), bytes(to - from), MADV_DONTFORK);
}

void Mapping::shrink(Page from, Page to) noexcept {
    mmap(at(to), bytes(from - to), PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    if (ftruncate(fd_, static_cast<off_t>(bytes(to))) != 0) {
        punch(to, from - to);
    }
}

Page Mapping::page_of(std::uintptr_t address) const noexcept {
    return static_cast<Page>((address - reinterpret_cast<std::uintptr_t>(data_)) / page_nbytes);
}

void Mapping::load(Page first, Page count, const std::byte* from) const {
    for (std::size_t done = 0; done < bytes(count);) {
        const ssize_t wrote = pwrite(fd_, from + done, bytes(count) - done, static_cast<off_t>(bytes(first) + done));
        if (wrote > 0) {
            done += static_cast<std::size_t>(wrote);
        } else if (errno != EINTR) {
            fail("there is no memory for pages");
        }
    }
}

void Mapping::save(Page first, Page count, std::byte* into) const {
    for (std::size_t done = 0; done < bytes(count);) {
        const ssize_t got = pread(fd_, into + done, bytes(count) - done, static_cast<off_t>(bytes(first) + done));
        if (got > 0) {
            done += static_cast<std::size_t>(got);
        } else if (got == 0 || errno != EINTR) {
            fail("pages cannot be read");
        }
    }
}

void Mapping::zero(Page first, Page count) const {
    while (fallocate(fd_, 0, static_cast<off_t>(bytes(first)), static_cast<off_t>(bytes(count))) != 0) {
        if (errno != EINTR) {
            fail("there is no memory for pages");
        }
    }
}

void Mapping::unmap(Page first, Page count) const noexcept { madvise(at(first), bytes(count), MADV_DONTNEED); }

void Mapping::punch(Page first, Page count) const noexcept {
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(bytes(first)),
              static_cast<off_t>(bytes(count)));
}

std::uint64_t Mapping::backed() const noexcept {
    struct stat now{};
    return fstat(fd_, &now) == 0 ? static_cast<std::uint64_t>(now.st_blocks) * 512 : 0;
}

}  // namespace farpool::region
