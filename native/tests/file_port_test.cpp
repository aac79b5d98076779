// Unit tests of how many threads a file is worth, and of reads by several threads of a queue at the same time.
#include "core/file_port.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <numeric>
#include <vector>

#include "core/queue.hpp"
#include "tests/folder.hpp"
#include "tests/testing.hpp"

using farpool::Direction;
using farpool::FilePort;
using farpool::Piece;
using farpool::QueueCore;
using farpool::Submission;

namespace {

constexpr std::size_t piece_bytes = std::size_t{1} << 16;
constexpr std::size_t pieces = 64;

// A file of numbers that grow, open for reading and writing.
class Numbers {
public:
    Numbers()
        : fd(open((folder_.path() + "/numbers").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)),
          values(pieces * piece_bytes / 4) {
        std::iota(values.begin(), values.end(), 0U);
        CHECK_EQUAL(write(fd, values.data(), values.size() * 4), static_cast<ssize_t>(values.size() * 4));
    }
    ~Numbers() { close(fd); }
    Numbers(const Numbers&) = delete;
    Numbers& operator=(const Numbers&) = delete;

private:
    farpool::testing::Folder folder_;

public:
    const int fd;
    std::vector<std::uint32_t> values;
};

}  // namespace

TEST("a buffered file is worth several threads if it is only read") {
    const Numbers file;
    const FilePort shared(file.fd, "shared",
                          {.direct = false, .alignment = 4096, .base = 0, .ring = false, .read_only = false});
    const FilePort source(file.fd, "source", {.direct = false, .alignment = 4096, .base = 0, .ring = false, .read_only = true});
    CHECK_EQUAL(shared.concurrency(), 1U);
    CHECK_EQUAL(source.concurrency(), 4U);
}

TEST("the threads of a queue read parts of a file at the same time") {
    const Numbers file;
    FilePort port(file.fd, "source", {.direct = false, .alignment = 4096, .base = 0, .ring = false, .read_only = true});
    const auto queue = std::make_shared<QueueCore>();
    std::vector<std::uint32_t> found(file.values.size());
    std::size_t ended = 0;
    for (std::size_t index = 0; index < pieces; ++index) {
        const Piece piece{index * piece_bytes, reinterpret_cast<std::uintptr_t>(found.data()) + index * piece_bytes,
                          piece_bytes};
        Submission submission{
            .id = static_cast<std::int64_t>(index), .port = &port, .direction = Direction::read, .pieces = {&piece, 1}};
        queue->submit({&submission, 1});
    }
    while (ended < pieces && queue->wait(60)) {
        for (const farpool::Result& result : queue->poll()) {
            CHECK(!result.error);
            ++ended;
        }
    }
    CHECK_EQUAL(ended, pieces);
    CHECK(found == file.values);
    CHECK(queue->close(60));
}

int main() { return farpool::testing::run(); }
