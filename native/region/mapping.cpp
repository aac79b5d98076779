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

// MADV_DONTNEED_LOCKED of Linux 5.18: also if the program has locked the pages (mlock).
constexpr int unmap_locked = 24;

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
    punch(0, most_);  // a forked child still has the file open
    close(fd_);
}

void Mapping::grow(Page from, Page to) {
    if (ftruncate(fd_, static_cast<off_t>(bytes(to))) != 0) {
        fail("the file in memory does not grow");
    }
    // Without access at first, so that no page comes into the file unseen: of a program that locks all its memory (mlockall),
    // the kernel would bring in every page at once.
    void* const place =
        mmap(at(from), bytes(to - from), PROT_NONE, MAP_SHARED | MAP_FIXED, fd_, static_cast<off_t>(bytes(from)));
    // A forked child could not get missing pages: faults there are not reported to this process. So it has no such range at
    // all.
    if (place == MAP_FAILED || madvise(place, bytes(to - from), MADV_DONTFORK) != 0 || munlock(place, bytes(to - from)) != 0 ||
        mprotect(place, bytes(to - from), PROT_READ | PROT_WRITE) != 0) {
        const int code = errno;
        shrink(to, from);
        errno = code;
        fail("the pages are not mapped");
    }
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

void Mapping::unmap(Page first, Page count) const noexcept { madvise(at(first), bytes(count), unmap_locked); }

void Mapping::punch(Page first, Page count) const noexcept {
    fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(bytes(first)),
              static_cast<off_t>(bytes(count)));
}

std::uint64_t Mapping::backed() const noexcept {
    struct stat now{};
    return fstat(fd_, &now) == 0 ? static_cast<std::uint64_t>(now.st_blocks) * 512 : 0;
}

Zeros::Zeros(Page count) : nbytes_(bytes(count)) {
    void* const place = mmap(nullptr, nbytes_, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    if (place == MAP_FAILED) {
        fail("there is no free range of " + std::to_string(nbytes_) + " addresses");
    }
    data_ = static_cast<const std::byte*>(place);
}

Zeros::~Zeros() { munmap(const_cast<std::byte*>(data_), nbytes_); }

}  // namespace farpool::region
