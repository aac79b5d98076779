// The ordered queue of transfers and the threads that run them, as many for each port and direction as `Port::concurrency`.
// It knows nothing of Python except opaque references.
//
// Waking a thread costs more than copying a few kilobytes, and so does a contended lock. So entries are submitted many at once,
// small copies in memory (`Port::copies`) are taken and ended a few at once, and a waiting thread makes such copies itself
// instead of sleeping. Only the queue's own threads call other ports, one entry at a time.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <thread>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/queue_base.hpp"

namespace farpool {

class QueueCore : public QueueBase, public std::enable_shared_from_this<QueueCore> {
public:
    QueueCore();
    ~QueueCore() override;

    void submit(std::span<Submission> batch, bool waits = false) override;
    void move(std::uintptr_t target, std::uintptr_t source, std::size_t nbytes, std::int64_t last_use) override;
    void reprioritize(std::int64_t id, std::int64_t priority) override;
    // Makes small copies while waiting.
    void wait_past(const Seen& seen, std::uint64_t results, double seconds) override;
    std::size_t pending() const override;
    bool close(double seconds) override;

private:
    struct Entry;
    struct Lane;
    struct Worker;
    struct Outcome;
    class Wakes;
    void add(Submission& submission);
    void link(Entry& entry, std::span<const std::int64_t> after);
    Lane& lane_of(Port* port, Direction direction);
    Entry& new_entry();
    void work(Lane& lane, Worker& worker);
    void run_next(std::unique_lock<std::mutex>& lock, Lane& lane);
    bool help(std::unique_lock<std::mutex>& lock);
    void set_ready(Entry& entry);
    void complete(Outcome ended);
    void wake_workers(Lane& lane, Wakes& wakes);
    void wake_all(bool but_small, Wakes& wakes);
    void start_worker(Lane& lane);

    std::unordered_map<std::int64_t, Entry*> entries_;
    // All entries ever allocated; unused entries are in `spare_` and keep the memory of their parts.
    std::vector<std::unique_ptr<Entry>> made_;
    std::vector<Entry*> spare_;
    std::vector<Outcome> outcomes_;  // scratch memory of `complete`
    std::size_t links_ = 0;          // at least as many as pending entries have dependents
    std::map<std::pair<Port*, Direction>, std::unique_ptr<Lane>> lanes_;
    std::uint64_t submitted_ = 0;
    std::size_t helping_ = 0;  // waiting threads, not the queue's own, that make a copy
};

}  // namespace farpool
