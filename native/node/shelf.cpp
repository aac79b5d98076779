#include "node/shelf.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <new>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/signals_blocked.hpp"

namespace farpool {

namespace {

constexpr std::uint64_t largest_blocks = std::uint64_t{1} << 31;
constexpr std::uint64_t copied_at_once = std::uint64_t{1} << 20;
constexpr int thread_count = 4;
constexpr unsigned most_reads_ahead = 8;  // of a write that waits

[[noreturn]] void fail(const std::string& path) { throw std::system_error(errno, std::generic_category(), path); }

// Opens a file without the page cache, as payloads that are read return to memory that farpool manages, where the file system
// supports it.
int open_direct(const std::string& path) {
    const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_DIRECT, 0600);
    return fd >= 0 || errno != EINVAL ? fd : open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
}

// Goes on until all of it has been read or written; false at an error or an end.
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

Aside::Aside(std::uint64_t nbytes)
    : data_(static_cast<std::byte*>(std::aligned_alloc(shelf_block, shelf_blocks(nbytes) * shelf_block))),
      nbytes_(shelf_blocks(nbytes) * shelf_block) {
    if (data_ == nullptr) {
        throw std::bad_alloc();
    }
}

Aside::~Aside() { std::free(data_); }

Shelf::Shelf(const std::string& path, std::uint64_t nbytes, bool fresh, std::function<void()> wake)
    : file_(open_direct(path)),
      wake_(std::move(wake)),
      capacity_(nbytes / shelf_block * shelf_block),
      space_(static_cast<std::int64_t>(capacity_ / shelf_block)) {
    if (file_.fd() < 0) {
        fail(path);
    }
    if (capacity_ / shelf_block >= largest_blocks) {
        throw std::runtime_error(path + ": a node's file has less than 8 TiB");
    }
    if (flock(file_.fd(), LOCK_EX | LOCK_NB) != 0) {
        throw std::runtime_error(path + " is in use by another node; choose another path");
    }
    struct stat status{};
    if (fstat(file_.fd(), &status) != 0) {
        fail(path);
    }
    Aside page(segment_header_nbytes);
    SegmentHeader& header = *reinterpret_cast<SegmentHeader*>(page.data());
    const auto found = static_cast<std::uint64_t>(status.st_size);
    const bool read_back = found >= segment_header_nbytes && pread(file_.fd(), page.data(), segment_header_nbytes, 0) ==
                                                                 static_cast<ssize_t>(segment_header_nbytes);
    if (found > 0 && (!read_back || std::memcmp(header.magic, segment_magic, sizeof segment_magic) != 0)) {
        throw std::runtime_error(path + " is not empty and not a file of a node; it was not touched, choose another path");
    }
    if (found == 0 || fresh || header.capacity != capacity_ || segment_fault(header, found, SegmentKind::shelf) != nullptr) {
        std::memset(page.data(), 0, segment_header_nbytes);
        header.kind = static_cast<std::uint32_t>(SegmentKind::shelf);
        header.capacity = capacity_;
        header.lease = random_word() | 1;
        seal(header);
        // The header is written first, so that a node killed in between leaves a file that is known as a node's; its size is
        // right only when it is complete.
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
        threads_.emplace_back([this, step = std::make_shared<Aside>(copied_at_once)] { work(*step); });
    }
}

Shelf::~Shelf() { finish(); }

void Shelf::finish() {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    ready_.notify_all();
    for (std::thread& thread : threads_) {
        thread.join();
    }
    threads_.clear();
    file_ = File();  // and with it the lock
}

std::uint64_t Shelf::used() const noexcept { return capacity_ - static_cast<std::uint64_t>(space_.free_units()) * shelf_block; }

std::optional<std::uint32_t> Shelf::alloc(std::uint32_t blocks) {
    const std::int64_t first = space_.alloc(blocks);
    return first < 0 ? std::nullopt : std::optional(static_cast<std::uint32_t>(first));
}

bool Shelf::take(std::uint32_t first, std::uint32_t blocks) { return space_.take(first, blocks); }

void Shelf::free(std::uint32_t first, std::uint32_t blocks) { space_.free(first, blocks); }

std::uint64_t Shelf::write(std::uint32_t first, int from, std::uint64_t offset, std::uint64_t nbytes) {
    return submit({0, first, nullptr, from, offset, nbytes});
}

std::uint64_t Shelf::read(std::uint32_t first, std::shared_ptr<Aside> into) { return submit({0, first, std::move(into)}); }

std::uint64_t Shelf::submit(Job job) {
    job.number = ++jobs_;
    {
        const std::lock_guard lock(mutex_);
        (job.into == nullptr ? writes_ : reads_).push_back(std::move(job));
    }
    ready_.notify_one();
    return jobs_;
}

std::vector<Shelf::Done> Shelf::done() {
    const std::lock_guard lock(mutex_);
    return std::exchange(done_, {});
}

// Takes the next job. Reads go first, as requests wait for them, but not always: writes that wait keep objects from leaving
// memory.
Shelf::Job Shelf::next() {
    const bool write = reads_.empty() || (!writes_.empty() && reads_ahead_ >= most_reads_ahead);
    reads_ahead_ = write ? 0 : reads_ahead_ + 1;
    std::deque<Job>& queue = write ? writes_ : reads_;
    Job job = std::move(queue.front());
    queue.pop_front();
    return job;
}

void Shelf::work(Aside& step) {
    std::unique_lock lock(mutex_);
    for (;;) {
        ready_.wait(lock, [this] { return closing_ || !reads_.empty() || !writes_.empty(); });
        if (reads_.empty() && writes_.empty()) {
            return;  // closing: what was on its way has been written
        }
        const Job job = next();
        lock.unlock();
        const bool ok = job.into == nullptr ? copy(job, step) : read_back(job);
        lock.lock();
        done_.push_back({job.number, ok});
        wake_();
    }
}

bool Shelf::read_back(const Job& job) const {
    return whole(job.into->data(), job.into->nbytes(), [&](std::byte* memory, std::size_t rest, std::uint64_t moved) {
        return pread(file_.fd(), memory, rest, static_cast<off_t>(segment_header_nbytes + job.first * shelf_block + moved));
    });
}

// Copies a payload to the NVMe file by system calls at both ends: publishers may truncate the source file, and an access to a
// mapping of it would then end the process.
bool Shelf::copy(const Job& job, Aside& step) const {
    for (std::uint64_t moved = 0; moved < job.nbytes; moved += copied_at_once) {
        const std::uint64_t nbytes = std::min(copied_at_once, job.nbytes - moved);
        const std::uint64_t padded = shelf_blocks(nbytes) * shelf_block;
        std::memset(step.data() + nbytes, 0, padded - nbytes);
        const bool read = whole(step.data(), nbytes, [&](std::byte* memory, std::size_t rest, std::uint64_t done) {
            return pread(job.from, memory, rest, static_cast<off_t>(job.offset + moved + done));
        });
        const bool written =
            read && whole(step.data(), padded, [&](std::byte* memory, std::size_t rest, std::uint64_t done) {
                return pwrite(file_.fd(), memory, rest,
                              static_cast<off_t>(segment_header_nbytes + job.first * shelf_block + moved + done));
            });
        if (!written) {
            return false;
        }
    }
    return true;
}

}  // namespace farpool
