// Segment files: creating, opening and removing them (docs/segment-file.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/clock.hpp"
#include "node/bus_guard.hpp"
#include "wire/segment.hpp"

namespace farpool {

// RAII owner of a file descriptor.
class File {
public:
    File() = default;
    explicit File(int fd) : fd_(fd) {}
    File(File&& other) noexcept;
    File& operator=(File&& other) noexcept;
    ~File();
    int fd() const noexcept { return fd_; }
    int release() noexcept { return std::exchange(fd_, -1); }
    // Returns a duplicate of the descriptor, owned by the caller. Throws std::system_error.
    int duplicate() const;
    // Opens the file again, for reading only, for programs that may not write. The caller owns it. Throws std::system_error.
    int read_only() const;
    // Bytes of memory that the file takes according to the system; 0 if it does not say.
    std::uint64_t taken() const noexcept;

private:
    int fd_ = -1;
};

// Suffix of the name of a segment's file until it is complete.
constexpr const char* unfinished_suffix = ".new";

struct Segment {
    std::string path;
    File file;
    Mapping memory;
    GuardedRange guarded;  // destroyed before the mapping

    SegmentHeader& header() const noexcept { return *memory.at<SegmentHeader>(0); }
    // The bytes after the header. Their number comes from the mapping, because some clients may write the header.
    std::byte* data() const noexcept { return memory.data() + segment_header_nbytes; }
    std::uint64_t nbytes() const noexcept { return memory.nbytes() - segment_header_nbytes; }
};

// Makes a sparse segment file. It replaces a file of the same name only when it is complete. Throws std::system_error.
Segment make_segment(const std::string& path, const SegmentHeader& settings);
// make_segment() in two steps: the draft has another name until put_in_place() moves it to `path`.
Segment draft_segment(const std::string& path, const SegmentHeader& settings);
void put_in_place(const Segment& draft);
// Makes a segment in anonymous memory (memfd): it exists as long as it is open or mapped. Its length is sealed, so that
// programs that do not trust each other can share it. Like a file it belongs to its user: other users who have a descriptor may
// use that, and cannot open the file again. `name`: shown by the system. Throws std::system_error.
Segment make_nameless_segment(const std::string& name, const SegmentHeader& settings);
// Opens and maps an existing segment; throws std::runtime_error, which names the fault, or std::system_error. With
// `nbytes`, it must have so many after its header; we check that before we map it.
Segment open_segment(const std::string& path, SegmentKind kind, std::optional<std::uint64_t> nbytes = {});
// Makes the system back the range with memory, so that no later access to it can fail; false, with errno set, if it cannot.
bool back(const Segment& segment, std::uint64_t offset, std::uint64_t nbytes);
// Bytes that the file system of a folder or a file can still give; the largest number if it has no limit or does not say.
std::uint64_t left_in(const std::string& path) noexcept;
// True if an error of back() says that there is no more memory: returning some may help.
bool is_lack_of_memory(int error) noexcept;
// Returns whole pages of the range to the system, if the file system supports holes. Their content is undefined from now on.
void discard(const Segment& segment, std::uint64_t offset, std::uint64_t nbytes);
// Restores the length that the file was made with, and frees memory after its end.
void restore_length(const Segment& segment) noexcept;
void remove_file(const std::string& path) noexcept;

std::uint64_t random_word();

}  // namespace farpool
