// The ordered queue of transfers and the threads that work it off: for each port and direction as many as it has use for.
// Knows nothing of Python but opaque references.
#pragma once

#include <sys/types.h>

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <thread>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "port.hpp"

namespace farpool {

enum class Direction : int { read = 0, write = 1 };

struct Piece {
    std::uint64_t offset;
    std::uintptr_t address;
    std::size_t nbytes;
};

// A reference that the submitter holds for as long as the entry lives; given back with the result.
using Keepalive = PyObject*;

struct Result {
    std::int64_t id = 0;
    std::optional<PortError> error;
    bool cancelled = false;
    double start = 0;
    double end = 0;
    Keepalive keepalive = nullptr;
};

class QueueCore : public std::enable_shared_from_this<QueueCore> {
public:
    QueueCore();
    ~QueueCore();
    QueueCore(const QueueCore&) = delete;
    QueueCore& operator=(const QueueCore&) = delete;

    // `port` null or no pieces: a barrier. On failure nothing was submitted and the keepalive stays the caller's.
    void submit(std::int64_t id, Port* port, Direction direction, std::vector<Piece> pieces,
                const std::vector<std::int64_t>& after, std::int64_t priority, Keepalive keepalive);
    void reprioritize(std::int64_t id, std::int64_t priority);
    std::vector<Result> poll();
    // Whether there is something to poll; waits at most `seconds` for it.
    bool wait(double seconds);
    // What has happened so far: whoever waits for what comes after it was read misses nothing, not even a result that
    // another thread polls.
    struct Seen {
        std::uint64_t results;
        std::uint64_t nudges;
    };
    Seen seen() const;
    // Waits until there were `results` more results, or a nudge, for so many seconds at most.
    void wait_past(const Seen& seen, std::uint64_t results, double seconds);
    void nudge();
    std::size_t pending() const;
    bool close(double seconds);
    // False in a process that forked off the one that made the queue: its threads are not here and its locks may be
    // held for ever, so nothing of it may be touched.
    bool ours() const noexcept;

private:
    struct Entry;
    struct Lane;
    struct Worker;
    void work(Lane& lane, Worker& worker);
    void set_ready(Entry& entry);
    void complete(std::int64_t id, std::optional<PortError> error, bool cancelled, double start, double end);
    void start_worker(Lane& lane);
    void require_open() const;
    template <typename Ready>
    void wait_for(std::unique_lock<std::mutex>& lock, std::uint64_t results, double seconds, Ready ready);

    pid_t owner_;
    mutable std::mutex mutex_;
    std::condition_variable finished_;  // as many results came as somebody waits for, or a nudge, or a thread ended
    std::unordered_map<std::int64_t, std::unique_ptr<Entry>> entries_;
    std::map<std::pair<Port*, Direction>, std::unique_ptr<Lane>> lanes_;
    std::vector<Result> results_;
    Seen seen_{0, 0};
    std::multiset<std::uint64_t> targets_;  // counts of results that somebody waits for
    std::unordered_set<std::int64_t> unpolled_failures_;  // the submitter does not know of them yet
    std::uint64_t submitted_ = 0;
    bool closing_ = false;
};

}  // namespace farpool
