#include "core/queue.hpp"

#include <pthread.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <tuple>

#include "core/clock.hpp"
#include "core/room.hpp"
#include "core/signals_blocked.hpp"

namespace farpool {

namespace {

constexpr std::size_t small_copy = 64 << 10;  // copying this many bytes takes less time than waking a thread
constexpr std::size_t most_at_once = 16;      // small copies: a few tens of microseconds

}  // namespace

struct QueueCore::Entry {
    std::int64_t id;
    std::vector<Piece> pieces;
    Lane* lane;  // null for a barrier
    std::vector<std::int64_t> after;
    std::vector<std::int64_t> dependents;
    std::size_t waiting_for;
    std::int64_t priority;
    std::uint64_t order;
    bool small;  // a copy in memory that takes less time than handing it to another thread
    bool ready;
    bool running;
    Keepalive keepalive;
};

struct QueueCore::Outcome {
    std::int64_t id;
    std::optional<PortError> error;
    bool cancelled;
    double start;
    double end;
};

struct QueueCore::Worker {
    std::thread thread;
    bool ended = false;
};

// The entries and threads of one port and direction. A thread is started when an entry would have to wait for one, up to the
// port's concurrency.
struct QueueCore::Lane {
    struct Next {
        std::int64_t priority;
        std::uint64_t order;
        Entry* entry;
        // True if this entry comes after the other, as std heap functions expect.
        bool operator<(const Next& other) const { return std::tie(priority, other.order) < std::tie(other.priority, order); }
        // False if the entry has ended or has another priority now. Entries are reused, but never with the same order.
        bool is_current() const { return entry->ready && entry->order == order && entry->priority == priority; }
    };

    // Makes room for all entries that are not ready yet, and for one more. So none of them needs memory when it is.
    void make_room() { farpool::make_room(ready, ready.size() + unready + 1); }
    void push(Entry& entry) {
        ready.push_back({entry.priority, entry.order, &entry});
        std::push_heap(ready.begin(), ready.end());
    }
    // The next entry; null if there is none.
    Entry* next() {
        while (!ready.empty() && !ready.front().is_current()) {
            drop_front();
        }
        return ready.empty() ? nullptr : ready.front().entry;
    }
    void take(Entry& entry) {  // the entry of `next`
        entry.ready = false;
        entry.running = true;
        --waiting;
        drop_front();
    }
    void drop_front() {
        std::pop_heap(ready.begin(), ready.end());
        ready.pop_back();
    }

    Port* port;
    Direction direction;
    std::vector<Next> ready;  // a heap
    std::size_t unready = 0;  // entries that wait for others
    std::size_t waiting = 0;  // entries that are ready
    std::condition_variable wake;
    std::vector<std::unique_ptr<Worker>> workers;
    std::size_t idle = 0;  // workers that will check for an entry
};

// Threads to wake: workers, and those that wait for results. Each locks the queue's mutex first, so it is best woken when the
// mutex is free: at the end of this object.
class QueueCore::Wakes {
public:
    ~Wakes() { run(); }
    bool empty() const { return count_ == 0 && results_ == nullptr; }
    void add(Results& results) { results_ = &results; }
    void add(Lane& lane, std::size_t count) {
        if (count_ == lanes_.size()) {
            run();
        }
        lanes_[count_++] = {&lane, count};
    }
    void run() {
        for (; count_ > 0; --count_) {
            for (auto [lane, count] = lanes_[count_ - 1]; count > 0; --count) {
                lane->wake.notify_one();
            }
        }
        if (Results* const results = std::exchange(results_, nullptr)) {
            results->notify_all();
        }
    }

private:
    std::array<std::pair<Lane*, std::size_t>, 8> lanes_;
    std::size_t count_ = 0;
    Results* results_ = nullptr;
};

QueueCore::QueueCore() = default;

// Runs after all threads: each of them holds a reference to the queue.
QueueCore::~QueueCore() {
    if (!results_.empty()) {
        // Only a thread that outlived the queue's owner gets here. The interpreter may have ended, so references cannot be
        // released.
        new std::vector<Result>(results_.leave());
    }
    for (auto& [key, lane] : lanes_) {
        for (const auto& worker : lane->workers) {
            if (worker->thread.joinable()) {
                worker->thread.detach();
            }
        }
    }
}

void QueueCore::start_worker(Lane& lane) {
    lane.workers.reserve(lane.workers.size() + 1);
    auto worker = std::make_unique<Worker>();
    {
        const SignalsBlocked blocked;
        worker->thread = std::thread([self = shared_from_this(), &lane, &worker = *worker] { self->work(lane, worker); });
    }
    const std::string name = std::string("farpool-") + (lane.direction == Direction::read ? "rd" : "wr") + "-" +
                             std::to_string(lanes_.size() % 100);  // the kernel keeps 15 characters
    pthread_setname_np(worker->thread.native_handle(), name.c_str());
    lane.workers.push_back(std::move(worker));
    ++lane.idle;
}

void QueueCore::submit(std::span<Submission> batch, bool waits) {
    Wakes wakes;  // at its end, so without the lock
    const std::lock_guard lock(mutex_);
    if (!batch.empty()) {
        require_open();
    }
    try {
        for (Submission& submission : batch) {
            add(submission);
            submission.keepalive = nullptr;
        }
    } catch (...) {
        wake_all(false, wakes);
        throw;
    }
    wake_all(waits, wakes);
}

void QueueCore::move(std::uintptr_t target, std::uintptr_t source, std::size_t nbytes, std::int64_t) {
    // Made here and now, so it precedes every transfer that is submitted after it.
    std::memmove(reinterpret_cast<void*>(target), reinterpret_cast<const void*>(source), nbytes);
}

QueueCore::Lane& QueueCore::lane_of(Port* port, Direction direction) {
    const auto [found, is_new] = lanes_.try_emplace({port, direction});
    if (is_new) {
        try {
            auto made = std::make_unique<Lane>();
            made->port = port;
            made->direction = direction;
            start_worker(*made);
            found->second = std::move(made);
        } catch (...) {
            lanes_.erase(found);
            throw;
        }
    }
    return *found->second;
}

// An unused entry, which stays in `spare_` until it is used.
QueueCore::Entry& QueueCore::new_entry() {
    if (spare_.empty()) {
        make_room(spare_, made_.size() + 1);  // so that returning an entry never fails
        made_.push_back(std::make_unique<Entry>());
        spare_.push_back(made_.back().get());
    }
    return *spare_.back();
}

// Has an entry wait for those that have not ended. If it throws, nothing was changed but the entry itself.
void QueueCore::link(Entry& entry, std::span<const std::int64_t> after) {
    entry.after.clear();
    entry.after.reserve(after.size());
    try {
        for (const std::int64_t other : after) {
            if (const auto found = entries_.find(other); found != entries_.end()) {
                found->second->dependents.push_back(entry.id);
                entry.after.push_back(other);
            }
        }
        entries_.emplace(entry.id, &entry);
    } catch (...) {
        for (const std::int64_t other : entry.after) {
            entries_.at(other)->dependents.pop_back();
        }
        throw;
    }
    spare_.pop_back();
}

// All that needs memory comes first: if there is none, the entry is not submitted, and the others are as before.
void QueueCore::add(Submission& submission) {
    const std::int64_t id = submission.id;
    if (entries_.contains(id)) {
        fail_value("Queue.submit: entry " + std::to_string(id) + " is still pending; use a new id");
    }
    Lane* lane = nullptr;
    if (submission.port != nullptr && !submission.pieces.empty()) {
        lane = &lane_of(submission.port, submission.direction);
    }
    results_.expect(entries_.size() + 1);
    make_room(outcomes_, links_ + submission.after.size() + 1);
    if (lane != nullptr) {
        lane->make_room();
    }
    Entry& entry = new_entry();
    entry.id = id;
    entry.pieces.assign(submission.pieces.begin(), submission.pieces.end());
    entry.dependents.clear();
    entry.lane = lane;
    entry.priority = submission.priority;
    entry.order = submitted_++;
    entry.ready = entry.running = false;
    entry.keepalive = submission.keepalive;
    std::size_t nbytes = 0;
    for (const Piece& piece : entry.pieces) {
        nbytes += piece.nbytes;
    }
    entry.small = lane != nullptr && nbytes <= small_copy && lane->port->copies();
    const bool doomed = std::ranges::any_of(
        submission.after, [&](std::int64_t other) { return results_.has_failure(other) && !entries_.contains(other); });
    link(entry, submission.after);
    entry.waiting_for = entry.after.size();
    links_ += entry.after.size();
    if (lane != nullptr) {
        ++lane->unready;
    }
    if (doomed) {
        const double now = monotonic_seconds();
        complete({id, std::nullopt, true, now, now});
    } else if (entry.waiting_for == 0) {
        set_ready(entry);
    }
}

void QueueCore::set_ready(Entry& entry) {
    if (entry.lane == nullptr) {
        const double now = monotonic_seconds();
        complete({entry.id, std::nullopt, false, now, now});
        return;
    }
    entry.ready = true;
    --entry.lane->unready;
    entry.lane->push(entry);
    ++entry.lane->waiting;
}

void QueueCore::wake_workers(Lane& lane, Wakes& wakes) {
    if (const std::size_t count = std::min(lane.waiting, lane.idle); count > 0) {
        wakes.add(lane, count);
    }
    try {
        while (lane.waiting > lane.idle && lane.workers.size() < lane.port->concurrency()) {
            start_worker(lane);
        }
    } catch (const std::exception&) {
        // If no thread can be started, the existing ones do the work.
    }
}

// Wakes threads that wait for the results so far, and workers of all lanes. `but_small`: except for small copies, which the
// caller makes.
void QueueCore::wake_all(bool but_small, Wakes& wakes) {
    if (results_.settle()) {
        wakes.add(results_);
    }
    for (const auto& [key, lane] : lanes_) {
        if (lane->waiting > 0 && !(but_small && lane->next()->small)) {
            wake_workers(*lane, wakes);
        }
    }
}

// Completes an entry; the caller wakes threads.
void QueueCore::complete(Outcome ended) {
    outcomes_.push_back(std::move(ended));  // a stack: chains of barriers and cancellations may be long
    while (!outcomes_.empty()) {
        Outcome outcome = std::move(outcomes_.back());
        outcomes_.pop_back();
        const auto found = entries_.find(outcome.id);
        if (found == entries_.end()) {
            continue;  // cancelled before, because another entry that it waited for had failed
        }
        Entry& entry = *found->second;
        entries_.erase(found);
        spare_.push_back(&entry);  // and not used again before this returns
        links_ -= entry.dependents.size();
        if (entry.lane != nullptr && !entry.ready && !entry.running) {
            --entry.lane->unready;  // cancelled
        }
        const bool bad = outcome.cancelled || outcome.error.has_value();
        // In reverse, so that the stack returns them in order of submission.
        for (auto dependent = entry.dependents.rbegin(); dependent != entry.dependents.rend(); ++dependent) {
            const auto waiting = entries_.find(*dependent);
            if (waiting == entries_.end()) {
                continue;
            }
            Entry& next = *waiting->second;
            if (bad) {
                outcomes_.push_back({next.id, std::nullopt, true, outcome.end, outcome.end});
            } else if (--next.waiting_for == 0) {
                if (next.lane == nullptr) {
                    outcomes_.push_back({next.id, std::nullopt, false, outcome.end, outcome.end});
                } else {
                    set_ready(next);
                }
            }
        }
        results_.add({outcome.id, std::move(outcome.error), outcome.cancelled, outcome.start, outcome.end, entry.keepalive});
    }
}

void QueueCore::work(Lane& lane, Worker& worker) {
    std::unique_lock lock(mutex_);
    for (;;) {
        lane.wake.wait(lock, [&] { return closing_ || lane.waiting > 0; });
        --lane.idle;
        if (closing_) {
            break;
        }
        run_next(lock, lane);
        ++lane.idle;
    }
    worker.ended = true;
    results_.notify_all();
}

// Runs the next entry of a lane, which has one, or the next few small copies. The lock is released while they run.
void QueueCore::run_next(std::unique_lock<std::mutex>& lock, Lane& lane) {
    std::array<Entry*, most_at_once> taken;
    std::array<Outcome, most_at_once> outcomes;
    std::size_t count = 0;
    for (Entry* next = lane.next(); next != nullptr; next = lane.next()) {
        lane.take(*next);
        taken[count++] = next;
        const Entry* following = lane.next();
        if (count == most_at_once || !next->small || following == nullptr || !following->small) {
            break;
        }
    }
    Wakes wakes;
    wake_workers(lane, wakes);  // for the remaining entries
    lock.unlock();
    wakes.run();
    double time = monotonic_seconds();
    for (std::size_t index = 0; index < count; ++index) {
        Outcome& outcome = outcomes[index] = {taken[index]->id, std::nullopt, false, time, time};
        try {
            for (const Piece& piece : taken[index]->pieces) {
                lane.port->move(lane.direction, piece);
            }
        } catch (const std::exception&) {
            outcome.error = handled_error("", "a transfer failed: ");
        }
        outcome.end = time = monotonic_seconds();
    }
    lock.lock();
    for (std::size_t index = 0; index < count; ++index) {
        complete(std::move(outcomes[index]));
    }
    wake_all(false, wakes);  // for these results, and for entries that waited for them
    if (!wakes.empty()) {
        lock.unlock();
        wakes.run();
        lock.lock();
    }
}

// Makes small copies that are ready, a few of the most urgent lane; false if there are none.
bool QueueCore::help(std::unique_lock<std::mutex>& lock) {
    Lane* best = nullptr;
    for (const auto& [key, lane] : lanes_) {
        const Entry* next = lane->next();
        if (next != nullptr && next->small && (best == nullptr || best->ready.front() < lane->ready.front())) {
            best = lane.get();
        }
    }
    if (best == nullptr) {
        return false;
    }
    ++helping_;
    run_next(lock, *best);
    --helping_;
    if (closing_) {
        results_.notify_all();
    }
    return true;
}

void QueueCore::reprioritize(std::int64_t id, std::int64_t priority) {
    const std::lock_guard lock(mutex_);
    const auto set = [](Entry& entry, std::int64_t value) {
        if (entry.ready) {
            entry.lane->make_room();
        }
        entry.priority = value;
        if (entry.ready) {
            entry.lane->push(entry);  // the heap's item with the old priority is invalid now
        }
    };
    const auto found = entries_.find(id);
    if (found == entries_.end() || found->second->running) {
        return;
    }
    const bool raised = priority > found->second->priority;
    set(*found->second, priority);
    if (!raised) {
        return;
    }
    std::vector<std::int64_t> to_raise = found->second->after;
    while (!to_raise.empty()) {
        const auto other = entries_.find(to_raise.back());
        to_raise.pop_back();
        // If an entry has the priority already, so have the entries that it waits for.
        if (other == entries_.end() || other->second->running || other->second->priority >= priority) {
            continue;
        }
        set(*other->second, priority);
        to_raise.insert(to_raise.end(), other->second->after.begin(), other->second->after.end());
    }
}

void QueueCore::wait_past(const Seen& seen, std::uint64_t results, double seconds) {
    std::unique_lock lock(mutex_);
    const auto ready = [&] { return results_.past(seen, results) || closing_; };
    const double deadline = monotonic_seconds() + seconds;
    while (!ready() && monotonic_seconds() < deadline && help(lock)) {
    }
    Wakes wakes;
    wake_all(false, wakes);  // for copies that were left to this thread and that it does not wait for
    wakes.run();
    results_.wait(lock, seen.results + results, deadline - monotonic_seconds(), ready);
}

std::size_t QueueCore::pending() const {
    const std::lock_guard lock(mutex_);
    return entries_.size();
}

bool QueueCore::close(double seconds) {
    std::unique_lock lock(mutex_);
    if (!closing_) {
        std::vector<Entry*> dropped;
        for (const auto& [id, entry] : entries_) {
            if (!entry->running) {
                dropped.push_back(entry);
            }
        }
        closing_ = true;
        std::sort(dropped.begin(), dropped.end(), [](const Entry* a, const Entry* b) { return a->order < b->order; });
        const double now = monotonic_seconds();
        for (const Entry* entry : dropped) {
            results_.add({entry->id, std::nullopt, true, now, now, entry->keepalive});
        }
        for (auto& [key, lane] : lanes_) {
            lane->ready.clear();
            lane->waiting = 0;
            lane->wake.notify_all();
        }
        std::erase_if(entries_, [](const auto& item) { return !item.second->running; });
        results_.notify_all();
    }
    std::vector<Worker*> workers;  // no more workers are started from now on
    for (const auto& [key, lane] : lanes_) {
        for (const auto& worker : lane->workers) {
            workers.push_back(worker.get());
        }
    }
    const auto all_ended = [&] {
        return helping_ == 0 && std::all_of(workers.begin(), workers.end(), [](const Worker* worker) { return worker->ended; });
    };
    results_.wait(lock, UINT64_MAX, seconds, all_ended);
    const bool ended = all_ended();
    for (Worker* worker : workers) {
        if (worker->ended && worker->thread.joinable()) {
            std::thread thread = std::move(worker->thread);
            lock.unlock();
            thread.join();  // it has left its loop and is about to return
            lock.lock();
        }
    }
    return ended;
}

}  // namespace farpool
