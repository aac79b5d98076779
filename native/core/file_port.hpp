// A port over a file descriptor: positioned reads and writes, buffered, direct or through io_uring.
#pragma once

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/port.hpp"
#include "core/ring.hpp"

namespace farpool {

class FilePort final : public Port {
public:
    struct Options {
        bool direct;
        std::size_t alignment;
        std::uint64_t base;
        bool ring;
        bool read_only;
    };

    FilePort(int fd, std::string name, const Options& options);
    ~FilePort() override;
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    unsigned concurrency() const noexcept override;
    bool uses_ring() const noexcept { return ring_; }

private:
    struct Job;     // one read or write call
    struct Slice;   // one system call's part of a job
    struct Worker;  // one thread's resources for a job: a ring and bounce buffers

    // Size and modification time of the file, to detect that another process has written to it.
    struct Version {
        std::int64_t nbytes;
        std::int64_t seconds;
        std::int64_t nanoseconds;
        bool operator==(const Version&) const = default;
    };

    Version version() const;
    void transfer(bool write, std::uint64_t offset, std::byte* memory, std::size_t nbytes);
    void run_buffered(const Job& job) const;
    void run_direct(const Job& job, Worker& worker) const;
    void run_ring(const Job& job, Worker& worker) const;
    Slice slice_at(const Job& job, std::size_t at, std::byte* bounce) const;
    void begin(const Job& job, Slice& slice) const;
    // Accounts for a system call's result. True if the slice is complete, false if the rest must be issued. Throws on failure.
    bool advance(const Job& job, Slice& slice, ssize_t result) const;
    [[noreturn]] void fail(const Job& job, const Slice& slice, int code) const;
    std::unique_ptr<Worker> borrow_worker();
    void return_worker(std::unique_ptr<Worker> worker);

    int fd_;
    std::string name_;
    bool direct_;
    std::size_t alignment_;
    std::size_t memory_alignment_;
    std::uint64_t base_;
    bool ring_ = false;
    bool read_only_;
    Version opened_{};
    pid_t owner_;
    std::mutex mutex_;
    std::vector<std::unique_ptr<Worker>> idle_;
};

}  // namespace farpool
