// Threads that carry out jobs which wait for a tier, each with memory of its own for the bytes on their way.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/error.hpp"
#include "region/mapping.hpp"

namespace farpool::region {

// What a caller waits for: some jobs, and the first error among them. The region's lock guards it.
struct Ticket {
    std::size_t pending = 0;
    std::optional<PortError> error;
};

struct Job {
    enum class Kind {
        demand,  // load one page, for which a thread waits
        ahead,   // load pages that will be needed, by our guess
        fill,    // load pages that will be needed, by the program's word
        save,    // write pages below
    };
    Kind kind;
    Page first;
    Page count;
    bool fresh = false;  // of a load: nothing is stored below, the pages are zero
    bool write = false;  // of a demand: the thread writes
    std::shared_ptr<Ticket> ticket = nullptr;
};

// Page-aligned memory.
class Staging {
public:
    explicit Staging(std::size_t nbytes);
    std::byte* data() const noexcept { return data_.get(); }

private:
    struct Free {
        void operator()(std::byte* data) const noexcept;
    };
    std::unique_ptr<std::byte, Free> data_;
};

class Workers {
public:
    // `run` carries a job out, and throws nothing. `nbytes`: of the memory that it gets.
    Workers(unsigned count, std::size_t nbytes, std::function<void(const Job&, std::byte*)> run);
    ~Workers() { close(); }

    // Adds a job. Threads take demands first and saves last: programs wait for loads.
    void add(Job job);
    // Drops the jobs that were not begun, and waits for the others. Idempotent.
    void close() noexcept;

private:
    void work();

    const std::size_t nbytes_;
    const std::function<void(const Job&, std::byte*)> run_;
    std::mutex mutex_;
    std::condition_variable wake_;
    std::array<std::deque<Job>, 3> jobs_;  // demands, other loads, saves
    bool closing_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace farpool::region
