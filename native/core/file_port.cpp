// A direct transfer is cut into slices. A slice whose memory or length is not aligned goes through its own aligned bounce
// buffer, so that unaligned transfers are pipelined like aligned ones.
#include "core/file_port.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>

namespace farpool {

namespace {

constexpr std::size_t slice_bytes = std::size_t{512} << 10;
constexpr unsigned parallel_transfers = 4;
constexpr std::size_t buffered_bytes = std::size_t{1} << 30;  // the kernel moves at most 2 GiB a call

std::size_t round_up(std::size_t value, std::size_t alignment) { return (value + alignment - 1) / alignment * alignment; }

// Alignment that the file system demands of a direct transfer's memory; often less than the alignment of the offset.
std::size_t direct_memory_alignment([[maybe_unused]] int fd, std::size_t fallback) {
#if defined(STATX_DIOALIGN) && defined(__NR_statx)
    struct statx status{};
    if (syscall(__NR_statx, fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &status) == 0 && (status.stx_mask & STATX_DIOALIGN) != 0 &&
        status.stx_dio_mem_align != 0) {
        return std::min<std::size_t>(status.stx_dio_mem_align, fallback);
    }
#endif
    return fallback;
}

struct FreeAligned {
    void operator()(std::byte* memory) const { std::free(memory); }
};

}  // namespace

struct FilePort::Job {
    bool write;
    std::uint64_t offset;
    std::byte* memory;
    std::size_t nbytes;
};

struct FilePort::Slice {
    std::size_t at;       // within the job
    std::size_t nbytes;   // that the caller asked for
    std::size_t request;  // nbytes, rounded up to the alignment if it goes through the bounce buffer
    std::size_t done;     // of the request
    std::byte* memory;
    bool bounced;
};

struct FilePort::Worker {
    std::unique_ptr<Ring> ring;
    std::unique_ptr<std::byte, FreeAligned> memory;
    std::size_t buffers = 0;

    std::byte* bounce(std::size_t slot, std::size_t count, std::size_t alignment) {
        const std::size_t stride = round_up(slice_bytes, alignment);
        if (buffers < count) {
            memory.reset(static_cast<std::byte*>(std::aligned_alloc(std::max<std::size_t>(alignment, 64), stride * count)));
            if (!memory) {
                buffers = 0;
                throw std::bad_alloc();
            }
            buffers = count;
        }
        return memory.get() + slot * stride;
    }
};

FilePort::FilePort(int fd, std::string name, const Options& options)
    : fd_(fd),
      name_(std::move(name)),
      direct_(options.direct),
      alignment_(options.alignment),
      memory_alignment_(options.alignment),
      base_(options.base),
      read_only_(options.read_only),
      owner_(getpid()) {
    if (alignment_ == 0 || (alignment_ & (alignment_ - 1)) != 0 || alignment_ > slice_bytes) {
        fail_value("FilePort: alignment must be a power of two up to " + std::to_string(slice_bytes) + ", got " +
                   std::to_string(alignment_));
    }
    if (direct_ && base_ % alignment_ != 0) {
        fail_value("FilePort: base must be a multiple of the alignment " + std::to_string(alignment_) + ", got " +
                   std::to_string(base_));
    }
    if (read_only_) {
        opened_ = version();
    }
    if (direct_) {
        memory_alignment_ = direct_memory_alignment(fd, alignment_);
        if (options.ring) {
            auto worker = std::make_unique<Worker>();
            worker->ring = Ring::open();
            ring_ = worker->ring != nullptr;
            return_worker(std::move(worker));
        }
    }
}

FilePort::~FilePort() = default;

// A disk is fast with several requests under way, and a small transfer is only one. Through the page cache it is only a copy.
// Of a file that is only read, one thread would get what one thread can copy from the page cache. Writes to one buffered file
// wait for each other in the kernel.
unsigned FilePort::concurrency() const noexcept { return direct_ || read_only_ ? parallel_transfers : 1; }

std::unique_ptr<FilePort::Worker> FilePort::borrow_worker() {
    {
        const std::lock_guard lock(mutex_);
        if (!idle_.empty()) {
            auto worker = std::move(idle_.back());
            idle_.pop_back();
            return worker;
        }
    }
    auto worker = std::make_unique<Worker>();
    if (ring_) {
        worker->ring = Ring::open();
    }
    return worker;
}

void FilePort::return_worker(std::unique_ptr<Worker> worker) {
    const std::lock_guard lock(mutex_);
    idle_.push_back(std::move(worker));
}

FilePort::Version FilePort::version() const {
    struct stat status{};
    if (fstat(fd_, &status) != 0) {
        const int code = errno;
        fail_tier(name_, std::string("the file cannot be examined: ") + strerrordesc_np(code), code);
    }
    return {status.st_size, status.st_mtim.tv_sec, status.st_mtim.tv_nsec};
}

void FilePort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    transfer(false, offset, static_cast<std::byte*>(into), nbytes);
    // After the read, so that a change during the read is noticed too.
    if (read_only_ && version() != opened_) {
        fail_tier(name_, "the file was changed since it was opened; the bytes read at offset " + std::to_string(offset) +
                             " cannot be trusted");
    }
}

void FilePort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    if (read_only_) {
        fail_tier(name_, "the file is read-only");
    }
    transfer(true, offset, const_cast<std::byte*>(static_cast<const std::byte*>(from)), nbytes);  // only read
}

void FilePort::transfer(bool write, std::uint64_t offset, std::byte* memory, std::size_t nbytes) {
    const Job job{write, base_ + offset, memory, nbytes};
    if (!direct_) {
        run_buffered(job);
        return;
    }
    if (offset % alignment_ != 0) {
        fail_value(name_ + ": a direct transfer must begin at a multiple of " + std::to_string(alignment_) + ", got offset " +
                   std::to_string(offset));
    }
    auto worker = borrow_worker();
    std::exception_ptr failure;
    try {
        // A ring pays only for several requests; one is quicker without. A forked child shares the ring's queues with its
        // parent and must not touch them.
        if (nbytes > slice_bytes && worker->ring != nullptr && getpid() == owner_) {
            run_ring(job, *worker);
        } else {
            run_direct(job, *worker);
        }
    } catch (...) {
        failure = std::current_exception();
    }
    return_worker(std::move(worker));
    if (failure) {
        std::rethrow_exception(failure);
    }
}

void FilePort::run_buffered(const Job& job) const {
    for (std::size_t at = 0; at < job.nbytes;) {
        const std::size_t nbytes = std::min(job.nbytes - at, buffered_bytes);
        Slice slice{at, nbytes, nbytes, 0, job.memory + at, false};
        const auto offset = static_cast<off_t>(job.offset + at);
        const ssize_t moved = job.write ? pwrite(fd_, slice.memory, nbytes, offset) : pread(fd_, slice.memory, nbytes, offset);
        if (moved < 0 && errno == EINTR) {
            continue;
        }
        if (moved <= 0) {
            fail(job, slice, moved < 0 ? errno : 0);
        }
        at += static_cast<std::size_t>(moved);
    }
}

FilePort::Slice FilePort::slice_at(const Job& job, std::size_t at, std::byte* bounce) const {
    const std::size_t nbytes = std::min(job.nbytes - at, slice_bytes);
    if (bounce != nullptr) {
        return {at, nbytes, round_up(nbytes, alignment_), 0, bounce, true};
    }
    return {at, nbytes, nbytes, 0, job.memory + at, false};
}

void FilePort::begin(const Job& job, Slice& slice) const {
    if (slice.bounced && job.write) {
        std::memcpy(slice.memory, job.memory + slice.at, slice.nbytes);
        // The padding reaches the file, so it must not contain older bytes of the buffer.
        std::memset(slice.memory + slice.nbytes, 0, slice.request - slice.nbytes);
    }
}

void FilePort::fail(const Job& job, const Slice& slice, int code) const {
    const std::string what = std::string(job.write ? "write" : "read") + " of " + std::to_string(job.nbytes) +
                             " bytes at offset " + std::to_string(job.offset - base_) + " failed";
    if (code != 0) {
        const char* text = strerrordesc_np(code);
        fail_tier(name_, what + ": " + (text != nullptr ? text : "unknown error") + " (errno " + std::to_string(code) + ")",
                  code);
    }
    const std::uint64_t end = job.offset + slice.at + slice.done;
    if (job.write) {
        fail_tier(name_, what + ": the file took no bytes at file offset " + std::to_string(end));
    }
    fail_tier(name_, what + ": the file was truncated, it ends at or before file offset " + std::to_string(end));
}

bool FilePort::advance(const Job& job, Slice& slice, ssize_t result) const {
    if (result == -EINTR || result == -EAGAIN) {
        return false;
    }
    if (result < 0) {
        fail(job, slice, static_cast<int>(-result));
    }
    const std::size_t before = slice.done;
    slice.done += static_cast<std::size_t>(result);
    const std::size_t enough = job.write ? slice.request : slice.nbytes;
    if (slice.done < enough) {
        // The rest has to begin at an aligned offset, so a part of a sector is transferred again.
        slice.done -= slice.done % alignment_;
        if (slice.done <= before) {
            fail(job, slice, 0);
        }
        return false;
    }
    if (slice.bounced && !job.write) {
        std::memcpy(job.memory + slice.at, slice.memory, slice.nbytes);
    }
    return true;
}

void FilePort::run_direct(const Job& job, Worker& worker) const {
    const bool unaligned = reinterpret_cast<std::uintptr_t>(job.memory) % memory_alignment_ != 0;
    for (std::size_t at = 0; at < job.nbytes; at += slice_bytes) {
        const bool bounced = unaligned || std::min(job.nbytes - at, slice_bytes) % alignment_ != 0;
        Slice slice = slice_at(job, at, bounced ? worker.bounce(0, 1, alignment_) : nullptr);
        begin(job, slice);
        for (bool complete = false; !complete;) {
            std::byte* memory = slice.memory + slice.done;
            const std::size_t rest = slice.request - slice.done;
            const auto offset = static_cast<off_t>(job.offset + slice.at + slice.done);
            const ssize_t moved = job.write ? pwrite(fd_, memory, rest, offset) : pread(fd_, memory, rest, offset);
            complete = advance(job, slice, moved < 0 ? -errno : moved);
        }
    }
}

void FilePort::run_ring(const Job& job, Worker& worker) const {
    Ring& ring = *worker.ring;
    const bool unaligned = reinterpret_cast<std::uintptr_t>(job.memory) % memory_alignment_ != 0;
    const std::size_t slices = (job.nbytes + slice_bytes - 1) / slice_bytes;
    const std::size_t slots = std::min<std::size_t>(slices, Ring::depth);
    const std::size_t last = slices == 0 ? 0 : (slices - 1) * slice_bytes;
    const bool ragged = (job.nbytes - last) % alignment_ != 0;
    if (unaligned || ragged) {
        worker.bounce(0, unaligned ? slots : 1, alignment_);  // now, because it cannot move once requests are under way
    }
    std::array<Slice, Ring::depth> under_way;
    std::array<unsigned, Ring::depth> free_slots;
    std::size_t free_count = 0;
    for (std::size_t slot = slots; slot > 0; --slot) {
        free_slots[free_count++] = static_cast<unsigned>(slot - 1);
    }
    const auto push = [&](unsigned slot) {
        const Slice& slice = under_way[slot];
        ring.push(job.write, fd_, slice.memory + slice.done, static_cast<unsigned>(slice.request - slice.done),
                  job.offset + slice.at + slice.done, slot);
    };
    std::size_t next = 0;
    std::size_t active = 0;
    std::exception_ptr failure;
    // Requests that the kernel has taken use the caller's memory: after any failure, wait until they have completed.
    while (active > 0 || (next < job.nbytes && !failure)) {
        while (next < job.nbytes && free_count > 0 && !failure) {
            const unsigned slot = free_slots[--free_count];
            const bool bounced = unaligned || (ragged && next == last);
            under_way[slot] = slice_at(job, next, bounced ? worker.bounce(unaligned ? slot : 0, 1, alignment_) : nullptr);
            begin(job, under_way[slot]);
            push(slot);
            ++active;
            next += slice_bytes;
        }
        if (const int code = ring.enter(); code != 0 && code != EINTR) {
            if (code != EAGAIN && code != EBUSY) {
                active -= ring.withdraw();
                if (!failure) {
                    try {
                        fail(job, under_way[0], code);
                    } catch (...) {
                        failure = std::current_exception();
                    }
                }
            }
            usleep(100);  // until completions make room
        }
        std::uint64_t tag = 0;
        int result = 0;
        while (ring.pop(tag, result)) {
            const auto slot = static_cast<unsigned>(tag);
            bool complete = true;
            try {
                complete = advance(job, under_way[slot], result);
            } catch (...) {
                failure = failure ? failure : std::current_exception();
            }
            if (complete || failure) {
                free_slots[free_count++] = slot;
                --active;
            } else {
                push(slot);
            }
        }
    }
    if (failure) {
        std::rethrow_exception(failure);
    }
}

}  // namespace farpool
