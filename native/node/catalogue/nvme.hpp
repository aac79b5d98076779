// The medium in an NVMe file: blocks of 4 KiB, read and written by threads of its own. The node's loop never waits for the
// disk.
#pragma once

#include <atomic>
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
#include "node/catalogue/medium.hpp"
#include "node/files.hpp"

namespace farpool {

class Nvme final : public Medium {
public:
    // Opens or creates the file. `wake` is called, from any thread, when finished() has something to return. Throws
    // std::system_error, and std::runtime_error if another process uses the file or if it is not such a file.
    Nvme(const std::string& path, std::uint64_t nbytes, bool fresh, std::function<void()> wake);
    ~Nvme() override;
    Nvme(const Nvme&) = delete;
    Nvme& operator=(const Nvme&) = delete;

    std::uint64_t id() const noexcept override { return id_; }
    std::uint64_t capacity() const noexcept override { return capacity_; }
    std::uint64_t used() const noexcept override;
    std::uint64_t written() const noexcept override { return written_.load(std::memory_order_relaxed); }
    std::uint64_t unit() const noexcept override { return block_nbytes; }
    std::optional<std::uint64_t> alloc(std::uint32_t blocks) override;
    bool adopt(std::uint64_t first, std::uint32_t blocks) override;
    void release(std::uint64_t first, std::uint32_t blocks) override;
    const std::byte* view(std::uint64_t) const noexcept override { return nullptr; }
    void put(std::uint64_t first, const Source& source, Then then) override;
    void get(std::uint64_t first, std::shared_ptr<AlignedBuffer> into, Then then) override;
    std::vector<std::function<void()>> finished() override;
    void close() override;

private:
    static constexpr std::uint64_t block_nbytes = 4096;

    struct Job {
        std::uint64_t first;
        std::shared_ptr<AlignedBuffer> into;  // null for a write
        Source from;
        Then then;
    };

    void submit(Job job);
    Job next();
    void work(AlignedBuffer& step);
    bool read_back(const Job& job) const;
    bool copy(const Job& job, AlignedBuffer& step);

    File file_;
    std::function<void()> wake_;
    std::uint64_t id_ = 0;
    std::uint64_t capacity_;
    std::atomic<std::uint64_t> written_{0};
    FreeSpace space_;
    std::mutex mutex_;  // guards the fields below
    std::condition_variable ready_;
    std::deque<Job> reads_;
    std::deque<Job> writes_;
    unsigned reads_ahead_ = 0;  // reads since the last write
    std::vector<std::function<void()>> finished_;
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace farpool
