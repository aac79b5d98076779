#include "node/catalogue/nvme.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/signals_blocked.hpp"
#include "node/files.hpp"

namespace farpool {

namespace {

constexpr std::uint64_t blocks_max = std::uint64_t{1} << 31;
constexpr std::uint64_t step_nbytes = std::uint64_t{1} << 20;
constexpr int thread_count = 4;
constexpr unsigned reads_ahead_max = 8;  // that a waiting write lets pass

[[noreturn]] void fail(const std::string& path) { throw std::system_error(errno, std::generic_category(), path); }

// Opens a file without the page cache, if the file system supports that: payloads that are read return to memory that farpool
// manages.
int open_direct(const std::string& path) {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
    return fd >= 0 || errno != EINVAL ? fd : open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

// Repeats a read or a write until all bytes have moved; false after an error or at the end of the file.
template <typename Move>
bool whole(std::byte* memory, std::uint64_t nbytes, Move move) {
    for (std::uint64_t moved = 0; moved < nbytes;) {
        const ssize_t step = move(memory + moved, nbytes - moved, moved);
        if (step < 0 && errno == EINTR) {
            continue;
        }
        if (step <= 0) {
            return false;
        }
        moved += static_cast<std::uint64_t>(step);
    }
    return true;
}

}  // namespace

Nvme::Nvme(const std::string& path, std::uint64_t nbytes, bool fresh, std::function<void()> wake)
    : file_(open_direct(path)),
      wake_(std::move(wake)),
      capacity_(nbytes / block_nbytes * block_nbytes),
      space_(static_cast<std::int64_t>(capacity_ / block_nbytes)) {
    if (file_.fd() < 0) {
        fail(path);
    }
    if (capacity_ / block_nbytes >= blocks_max) {
        throw std::runtime_error(path + ": a node's file has less than 8 TiB");
    }
    if (flock(file_.fd(), LOCK_EX | LOCK_NB) != 0) {
        throw std::runtime_error(path + " is in use by another node; choose another path");
    }
    struct stat status{};
    if (fstat(file_.fd(), &status) != 0) {
        fail(path);
    }
    AlignedBuffer page(segment_header_nbytes);
    SegmentHeader& header = *reinterpret_cast<SegmentHeader*>(page.data());
    const auto found = static_cast<std::uint64_t>(status.st_size);
    const bool read_back = found >= segment_header_nbytes && pread(file_.fd(), page.data(), segment_header_nbytes, 0) ==
                                                                 static_cast<ssize_t>(segment_header_nbytes);
    if (found > 0 && (!read_back || std::memcmp(header.magic, segment_magic, sizeof segment_magic) != 0)) {
        throw std::runtime_error(path + " is not empty and not a file of a node; it was not touched, choose another path");
    }
    if (found == 0 || fresh || header.capacity != capacity_ || segment_fault(header, found, SegmentKind::shelf) != nullptr) {
        // Asked before anything is taken: an attempt that fails has taken all that is left for a moment, and other programs
        // then find the file system full.
        const std::uint64_t needed = segment_header_nbytes + capacity_;
        const std::uint64_t has = std::min(needed, static_cast<std::uint64_t>(status.st_blocks) * 512);
        if (needed - has > left_in(path)) {
            errno = ENOSPC;
            fail(path);
        }
        std::memset(page.data(), 0, segment_header_nbytes);
        header.kind = static_cast<std::uint32_t>(SegmentKind::shelf);
        header.capacity = capacity_;
        header.lease = random_word() | 1;
        seal(header);
        // We write the header first, so that a node that is killed here leaves a file that the next one recognizes. The file
        // has its full size only when it is complete.
        if (ftruncate(file_.fd(), 0) != 0 ||
            pwrite(file_.fd(), page.data(), segment_header_nbytes, 0) != static_cast<ssize_t>(segment_header_nbytes)) {
            fail(path);
        }
        if (const int code = posix_fallocate(file_.fd(), 0, static_cast<off_t>(segment_header_nbytes + capacity_)); code != 0) {
            static_cast<void>(!ftruncate(file_.fd(), 0));
            errno = code;
            fail(path);
        }
    }
    id_ = header.lease;
    const SignalsBlocked blocked;
    for (int thread = 0; thread < thread_count; ++thread) {
        threads_.emplace_back([this, step = std::make_shared<AlignedBuffer>(step_nbytes)] { work(*step); });
    }
}

Nvme::~Nvme() { close(); }

void Nvme::close() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) {
        thread.join();
    }
    threads_.clear();
    file_ = File();  // releases the lock, too
}

std::uint64_t Nvme::used() const noexcept { return capacity_ - static_cast<std::uint64_t>(space_.free_units()) * block_nbytes; }

std::optional<std::uint64_t> Nvme::alloc(std::uint32_t blocks) {
    const std::int64_t first = space_.alloc(blocks);
    return first < 0 ? std::nullopt : std::optional(static_cast<std::uint64_t>(first));
}

bool Nvme::adopt(std::uint64_t first, std::uint32_t blocks) { return space_.take(static_cast<std::int64_t>(first), blocks); }

void Nvme::release(std::uint64_t first, std::uint32_t blocks) { space_.free(static_cast<std::int64_t>(first), blocks); }

void Nvme::put(std::uint64_t first, const Source& source, Then then) { submit({first, nullptr, source, std::move(then)}); }

void Nvme::get(std::uint64_t first, std::shared_ptr<AlignedBuffer> into, Then then) {
    submit({first, std::move(into), {}, std::move(then)});
}

void Nvme::submit(Job job) {
    {
        const std::lock_guard lock(mutex_);
        (job.into == nullptr ? writes_ : reads_).push_back(std::move(job));
    }
    ready_.notify_one();
}

std::vector<std::function<void()>> Nvme::finished() {
    const std::lock_guard lock(mutex_);
    return std::exchange(finished_, {});
}

// Takes the next job. Reads go first, because requests wait for them. But a write goes first after some reads, because objects
// leave RAM only when they are written.
Nvme::Job Nvme::next() {
    const bool write = reads_.empty() || (!writes_.empty() && reads_ahead_ >= reads_ahead_max);
    reads_ahead_ = write ? 0 : reads_ahead_ + 1;
    std::deque<Job>& queue = write ? writes_ : reads_;
    Job job = std::move(queue.front());
    queue.pop_front();
    return job;
}

void Nvme::work(AlignedBuffer& step) {
    std::unique_lock lock(mutex_);
    for (;;) {
        ready_.wait(lock, [this] { return closing_ || !reads_.empty() || !writes_.empty(); });
        if (reads_.empty() && writes_.empty()) {
            return;  // closing, and all jobs are done
        }
        Job job = next();
        lock.unlock();
        const bool ok = job.into == nullptr ? copy(job, step) : read_back(job);
        lock.lock();
        finished_.push_back([ok, then = std::move(job.then)] { then(ok); });
        wake_();
    }
}

bool Nvme::read_back(const Job& job) const {
    return whole(job.into->data(), job.into->nbytes(), [&](std::byte* memory, std::size_t rest, std::uint64_t moved) {
        return pread(file_.fd(), memory, rest, static_cast<off_t>(segment_header_nbytes + job.first * block_nbytes + moved));
    });
}

// Copies a payload to the NVMe file by system calls on both files, because a publisher may truncate the source file: an access
// to a mapping of it would then end the process.
bool Nvme::copy(const Job& job, AlignedBuffer& step) {
    for (std::uint64_t moved = 0; moved < job.from.nbytes; moved += step_nbytes) {
        const std::uint64_t nbytes = std::min(step_nbytes, job.from.nbytes - moved);
        const std::uint64_t padded = units(nbytes) * block_nbytes;
        std::memset(step.data() + nbytes, 0, padded - nbytes);
        const bool read = whole(step.data(), nbytes, [&](std::byte* memory, std::size_t rest, std::uint64_t done) {
            return pread(job.from.file, memory, rest, static_cast<off_t>(job.from.offset + moved + done));
        });
        const bool written =
            read && whole(step.data(), padded, [&](std::byte* memory, std::size_t rest, std::uint64_t done) {
                return pwrite(file_.fd(), memory, rest,
                              static_cast<off_t>(segment_header_nbytes + job.first * block_nbytes + moved + done));
            });
        if (!written) {
            return false;
        }
        written_.fetch_add(padded, std::memory_order_relaxed);
    }
    return true;
}

}  // namespace farpool
