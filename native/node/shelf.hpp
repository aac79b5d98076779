// The NVMe file to which a node moves payloads that leave memory: blocks of 4 KiB, read and written by threads of its own.
//
// The node's loop never waits for the disk.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "core/free_space.hpp"
#include "node/files.hpp"

namespace farpool {

constexpr std::uint64_t shelf_block = 4096;

constexpr std::uint32_t shelf_blocks(std::uint64_t nbytes) noexcept {
    return static_cast<std::uint32_t>((nbytes + shelf_block - 1) / shelf_block);
}

// Aligned memory for direct reads and writes of the file.
class Aside {
public:
    explicit Aside(std::uint64_t nbytes);
    ~Aside();
    Aside(const Aside&) = delete;
    Aside& operator=(const Aside&) = delete;
    std::byte* data() const noexcept { return data_; }
    std::uint64_t nbytes() const noexcept { return nbytes_; }

private:
    std::byte* data_;
    std::uint64_t nbytes_;  // a multiple of the block
};

class Shelf {
public:
    struct Done {
        std::uint64_t job;
        bool ok;
    };

    // Opens or creates the file; `wake` is called, from any thread, when a job is done. Throws std::system_error, and
    // std::runtime_error where another process has the file or it is not such a file.
    Shelf(const std::string& path, std::uint64_t nbytes, bool fresh, std::function<void()> wake);
    ~Shelf();
    Shelf(const Shelf&) = delete;
    Shelf& operator=(const Shelf&) = delete;

    // Id of the file's content, replaced by another one whenever the content is given up. Never 0.
    std::uint64_t id() const noexcept { return id_; }
    std::uint64_t capacity() const noexcept { return capacity_; }
    std::uint64_t used() const noexcept;

    std::optional<std::uint32_t> alloc(std::uint32_t blocks);
    bool take(std::uint32_t first, std::uint32_t blocks);
    void free(std::uint32_t first, std::uint32_t blocks);

    // Start a write or a read and return the job's number, never 0; its result comes from done(). The bytes to write lie in the
    // file `from` and must stay there meanwhile.
    std::uint64_t write(std::uint32_t first, int from, std::uint64_t offset, std::uint64_t nbytes);
    std::uint64_t read(std::uint32_t first, std::shared_ptr<Aside> into);
    std::vector<Done> done();
    // Waits until all jobs are done, and ends the threads. Idempotent.
    void finish();

private:
    struct Job {
        std::uint64_t number;
        std::uint32_t first;
        std::shared_ptr<Aside> into;  // null for a write
        int from = -1;
        std::uint64_t offset = 0;
        std::uint64_t nbytes = 0;
    };

    std::uint64_t submit(Job job);
    Job next();
    void work(Aside& step);
    bool read_back(const Job& job) const;
    bool copy(const Job& job, Aside& step) const;

    File file_;
    std::function<void()> wake_;
    std::uint64_t id_ = 0;
    std::uint64_t capacity_;
    FreeSpace space_;
    std::uint64_t jobs_ = 0;
    std::mutex mutex_;  // guards what follows
    std::condition_variable ready_;
    std::deque<Job> reads_;
    std::deque<Job> writes_;
    unsigned reads_ahead_ = 0;  // since a write had its turn
    std::vector<Done> done_;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace farpool
