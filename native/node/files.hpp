// Segment files: made, opened, retired (docs/segment-file.md).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

#include "core/clock.hpp"
#include "node/bus_guard.hpp"
#include "wire/segment.hpp"

namespace farpool {

// A descriptor that closes itself.
class File {
public:
    File() = default;
    explicit File(int fd) : fd_(fd) {}
    File(File&& other) noexcept;
    File& operator=(File&& other) noexcept;
    ~File();
    int fd() const noexcept { return fd_; }
    int release() noexcept { return std::exchange(fd_, -1); }
    // Another descriptor of the same file, the caller's. Throws std::system_error.
    int duplicate() const;
    // The same opened anew for reading only, so that whoever gets it has no right to write. Throws std::system_error.
    int read_only() const;
    // Bytes that it takes, by what the system says; 0 where that does not say.
    std::uint64_t taken() const noexcept;

private:
    int fd_ = -1;
};

// What a segment's file is called until it is complete.
constexpr const char* unfinished_suffix = ".new";

struct Segment {
    std::string path;
    File file;
    Mapping memory;
    GuardedRange guarded;  // goes before the mapping does

    SegmentHeader& header() const noexcept { return *memory.at<SegmentHeader>(0); }
    // What follows the header; its length by the mapping, as some clients may write the header.
    std::byte* data() const noexcept { return memory.data() + segment_header_nbytes; }
    std::uint64_t nbytes() const noexcept { return memory.nbytes() - segment_header_nbytes; }
};

// A new file that replaces one of the same name only when it is complete; sparse. Throws std::system_error.
Segment make_segment(const std::string& path, const SegmentHeader& settings);
// The same in two steps: until the second one the file has another name, and what is called `path` is what it was.
Segment draft_segment(const std::string& path, const SegmentHeader& settings);
void put_in_place(const Segment& draft);
// One that no file system knows: it lives as long as somebody has it open or mapped, and nobody can change its length, so that
// it can be given to programs that do not trust each other. Like a file it is its user's alone: who else has a descriptor can do
// what that allows, and open it no second time. `name` is what the system shows for it. Throws std::system_error.
Segment make_nameless_segment(const std::string& name, const SegmentHeader& settings);
// An existing one; throws std::runtime_error, which says what is wrong with it, or std::system_error. With `nbytes`, it has to have
// so many behind its header, and is not mapped before that is known.
Segment open_segment(const std::string& path, SegmentKind kind, std::optional<std::uint64_t> nbytes = {});
// Has the system back the range with memory, so that no later access to it can fail; false, and errno says why, where it cannot.
bool back(const Segment& segment, std::uint64_t offset, std::uint64_t nbytes);
// Gives whole pages of the range back to the system, where the file system knows holes. Their content is undefined from now on.
void discard(const Segment& segment, std::uint64_t offset, std::uint64_t nbytes);
// Gives the file the length that it was made with, and nothing behind it.
void restore_length(const Segment& segment) noexcept;
void remove_file(const std::string& path) noexcept;

std::uint64_t random_word();

}  // namespace farpool
