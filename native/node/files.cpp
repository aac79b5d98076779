#include "node/files.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cerrno>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>

namespace farpool {

namespace {

[[noreturn]] void fail(const std::string& what) { throw std::system_error(errno, std::generic_category(), what); }

constexpr std::uint64_t page_nbytes = 4096;

void map(Segment& segment, std::uint64_t nbytes) {
    segment.memory = Mapping(segment.file.fd(), nbytes, true);
    segment.guarded = GuardedRange(segment.memory.data(), nbytes);
}

// Backs the header with memory, maps the file and writes the header.
void begin_segment(Segment& segment, const SegmentHeader& settings, const std::string& name) {
    if (!back(segment, 0, segment_header_nbytes)) {
        fail(name);
    }
    map(segment, segment_header_nbytes + settings.capacity);
    SegmentHeader& header = segment.header();
    std::memcpy(static_cast<void*>(&header), &settings, offsetof(SegmentHeader, level_and_split));
    seal(header);
}

}  // namespace

File::File(File&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}

File& File::operator=(File&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

File::~File() {
    if (fd_ >= 0) {
        close(fd_);
    }
}

int File::duplicate() const {
    const int copy = fcntl(fd_, F_DUPFD_CLOEXEC, 0);
    if (copy < 0) {
        fail("passing a file on");
    }
    return copy;
}

int File::read_only() const {
    const int fresh = open(("/proc/self/fd/" + std::to_string(fd_)).c_str(), O_RDONLY | O_CLOEXEC);
    if (fresh < 0) {
        fail("passing a file on");
    }
    return fresh;
}

std::uint64_t File::taken() const noexcept {
    struct stat status{};
    return fstat(fd_, &status) == 0 ? static_cast<std::uint64_t>(status.st_blocks) * 512 : 0;
}

Segment draft_segment(const std::string& path, const SegmentHeader& settings) {
    const std::string fresh = path + unfinished_suffix;
    File file(open(fresh.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    if (file.fd() < 0) {
        fail(fresh);
    }
    try {
        if (ftruncate(file.fd(), static_cast<off_t>(segment_header_nbytes + settings.capacity)) != 0) {
            fail(fresh);
        }
        Segment segment{path, std::move(file), {}, {}};
        begin_segment(segment, settings, fresh);
        return segment;
    } catch (...) {
        remove_file(fresh);
        throw;
    }
}

void put_in_place(const Segment& draft) {
    const std::string fresh = draft.path + unfinished_suffix;
    if (rename(fresh.c_str(), draft.path.c_str()) != 0) {
        const int code = errno;
        remove_file(fresh);
        errno = code;
        fail(draft.path);
    }
}

Segment make_segment(const std::string& path, const SegmentHeader& settings) {
    Segment segment = draft_segment(path, settings);
    put_in_place(segment);
    return segment;
}

Segment make_nameless_segment(const std::string& name, const SegmentHeader& settings) {
    File file(memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (file.fd() < 0 || fchmod(file.fd(), 0600) != 0 ||
        ftruncate(file.fd(), static_cast<off_t>(segment_header_nbytes + settings.capacity)) != 0 ||
        fcntl(file.fd(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        fail(name);
    }
    Segment segment{name, std::move(file), {}, {}};
    begin_segment(segment, settings, name);
    return segment;
}

Segment open_segment(const std::string& path, SegmentKind kind, std::optional<std::uint64_t> lent) {
    Segment segment{path, File(open(path.c_str(), O_RDWR | O_CLOEXEC)), {}, {}};
    struct stat status{};
    if (segment.file.fd() < 0 || fstat(segment.file.fd(), &status) != 0) {
        fail(path);
    }
    const auto nbytes = static_cast<std::uint64_t>(status.st_size);
    if (nbytes < segment_header_nbytes) {
        throw std::runtime_error(path + " is not a segment file");
    }
    if (lent && nbytes - segment_header_nbytes != *lent) {
        throw std::runtime_error(path + " has " + std::to_string(nbytes) + " bytes, expected " +
                                 std::to_string(segment_header_nbytes + *lent));
    }
    map(segment, nbytes);
    if (const char* fault = segment_fault(segment.header(), nbytes, kind)) {
        throw std::runtime_error(path + " " + fault);
    }
    return segment;
}

bool back(const Segment& segment, std::uint64_t offset, std::uint64_t nbytes) {
    int code = EINTR;
    while (code == EINTR) {  // a signal interrupted the call, and memory is not lacking
        code = posix_fallocate(segment.file.fd(), static_cast<off_t>(offset), static_cast<off_t>(nbytes));
    }
    errno = code != 0 ? code : errno;
    return code == 0;
}

std::uint64_t left_in(const std::string& path) noexcept {
    struct statvfs state{};
    const bool is_known = statvfs(path.c_str(), &state) == 0 && state.f_blocks > 0;
    return is_known ? std::uint64_t{state.f_bavail} * state.f_frsize : std::numeric_limits<std::uint64_t>::max();
}

bool is_lack_of_memory(int error) noexcept { return error == ENOSPC || error == ENOMEM || error == EDQUOT; }

void discard(const Segment& segment, std::uint64_t offset, std::uint64_t nbytes) {
    const std::uint64_t begin = (offset + page_nbytes - 1) / page_nbytes * page_nbytes;
    const std::uint64_t end = (offset + nbytes) / page_nbytes * page_nbytes;
    if (begin < end) {
        // A file system without holes keeps the pages. Nothing depends on them.
        static_cast<void>(fallocate(segment.file.fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(begin),
                                    static_cast<off_t>(end - begin)));
    }
}

void restore_length(const Segment& segment) noexcept {
    // Frees memory after the end, too, even if the length does not change.
    static_cast<void>(!ftruncate(segment.file.fd(), static_cast<off_t>(segment.memory.nbytes())));
}

void remove_file(const std::string& path) noexcept { unlink(path.c_str()); }

std::uint64_t random_word() {
    std::uint64_t word = 0;
    if (getrandom(&word, sizeof word, 0) != sizeof word) {
        fail("getrandom");
    }
    return word;
}

}  // namespace farpool
