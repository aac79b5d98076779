#include "queue.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <tuple>

#include "clock.hpp"
#include "signals_blocked.hpp"

namespace farpool {

namespace {

std::chrono::steady_clock::time_point deadline_after(double seconds) {
    // A century stands for "for ever": larger values would overflow the clock.
    const double bounded = std::clamp(seconds, 0.0, 100.0 * 365 * 86400);
    return std::chrono::steady_clock::now() +
           std::chrono::duration_cast<std::chrono::steady_clock::duration>(std::chrono::duration<double>(bounded));
}

}  // namespace

struct QueueCore::Entry {
    std::int64_t id;
    std::vector<Piece> pieces;
    Lane* lane;  // null for a barrier
    std::vector<std::int64_t> after;
    std::vector<std::int64_t> dependents;
    std::size_t waiting_for = 0;
    std::int64_t priority;
    std::uint64_t order;
    bool ready = false;
    bool running = false;
    Keepalive keepalive;
};

struct QueueCore::Worker {
    std::thread thread;
    bool ended = false;
};

// As many threads as the port has use for, each made when an entry would have to wait for one.
struct QueueCore::Lane {
    struct Next {
        std::int64_t priority;
        std::uint64_t order;
        std::int64_t id;
        bool operator<(const Next& other) const {
            return std::tie(other.priority, order) < std::tie(priority, other.order);
        }
    };

    Port* port;
    Direction direction;
    std::set<Next> ready;
    std::condition_variable wake;
    std::vector<std::unique_ptr<Worker>> workers;
    std::size_t idle = 0;  // workers that will look for an entry
};

QueueCore::QueueCore() : owner_(getpid()) {}

// The threads hold a reference to the queue, so none of them runs here: they were joined or end by themselves.
QueueCore::~QueueCore() {
    if (!results_.empty()) {
        // Only a thread that was left behind gets here. The interpreter may be gone, so references cannot be given back.
        new std::vector<Result>(std::move(results_));
    }
    for (auto& [key, lane] : lanes_) {
        for (const auto& worker : lane->workers) {
            if (worker->thread.joinable()) {
                worker->thread.detach();
            }
        }
    }
}

bool QueueCore::ours() const noexcept { return getpid() == owner_; }

void QueueCore::require_open() const {
    if (closing_) {
        fail_closed("the transfer queue was closed");
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

void QueueCore::submit(std::int64_t id, Port* port, Direction direction, std::vector<Piece> pieces,
                       const std::vector<std::int64_t>& after, std::int64_t priority, Keepalive keepalive) {
    const std::lock_guard lock(mutex_);
    require_open();
    if (entries_.contains(id)) {
        fail_value("Queue.submit: entry " + std::to_string(id) + " is still pending; use a new id");
    }
    Lane* lane = nullptr;
    if (port != nullptr && !pieces.empty()) {
        auto& slot = lanes_[{port, direction}];
        if (slot == nullptr) {
            auto made = std::make_unique<Lane>();
            made->port = port;
            made->direction = direction;
            try {
                start_worker(*made);
            } catch (...) {
                lanes_.erase({port, direction});
                throw;
            }
            slot = std::move(made);
        }
        lane = slot.get();
    }
    auto made = std::make_unique<Entry>();
    Entry& entry = *made;
    entry.id = id;
    entry.pieces = std::move(pieces);
    entry.lane = lane;
    entry.priority = priority;
    entry.order = submitted_++;
    entry.keepalive = keepalive;
    bool doomed = false;
    for (const std::int64_t other : after) {
        doomed = doomed || (unpolled_failures_.contains(other) && !entries_.contains(other));
        const auto found = entries_.find(other);
        if (found != entries_.end()) {
            entry.after.push_back(other);
            found->second->dependents.push_back(id);
            ++entry.waiting_for;
        }
    }
    entries_.emplace(id, std::move(made));
    unpolled_failures_.erase(id);
    if (doomed) {
        const double now = monotonic_seconds();
        complete(id, std::nullopt, true, now, now);
    } else if (entry.waiting_for == 0) {
        set_ready(entry);
    }
}

void QueueCore::set_ready(Entry& entry) {
    if (entry.lane == nullptr) {
        const double now = monotonic_seconds();
        complete(entry.id, std::nullopt, false, now, now);
        return;
    }
    entry.ready = true;
    Lane& lane = *entry.lane;
    lane.ready.insert({entry.priority, entry.order, entry.id});
    lane.wake.notify_one();
    if (lane.ready.size() > lane.idle && lane.workers.size() < lane.port->concurrency()) {
        try {
            start_worker(lane);
        } catch (const std::exception&) {
            // Those that there are do it.
        }
    }
}

void QueueCore::complete(std::int64_t id, std::optional<PortError> error, bool cancelled, double start, double end) {
    struct Outcome {
        std::int64_t id;
        std::optional<PortError> error;
        bool cancelled;
        double start;
        double end;
    };
    std::vector<Outcome> outcomes;  // a stack: chains of barriers and cancellations may be long
    outcomes.push_back({id, std::move(error), cancelled, start, end});
    bool failed = false;
    while (!outcomes.empty()) {
        Outcome outcome = std::move(outcomes.back());
        outcomes.pop_back();
        const auto found = entries_.find(outcome.id);
        if (found == entries_.end()) {
            continue;  // cancelled already, through another of those it waited for
        }
        const std::unique_ptr<Entry> entry = std::move(found->second);
        entries_.erase(found);
        const bool bad = outcome.cancelled || outcome.error.has_value();
        if (bad) {
            unpolled_failures_.insert(outcome.id);
            failed = true;
        }
        // In reverse, so that the stack takes them in order of submission.
        for (auto dependent = entry->dependents.rbegin(); dependent != entry->dependents.rend(); ++dependent) {
            const auto waiting = entries_.find(*dependent);
            if (waiting == entries_.end()) {
                continue;
            }
            Entry& next = *waiting->second;
            if (bad) {
                outcomes.push_back({next.id, std::nullopt, true, outcome.end, outcome.end});
            } else if (--next.waiting_for == 0) {
                if (next.lane == nullptr) {
                    outcomes.push_back({next.id, std::nullopt, false, outcome.end, outcome.end});
                } else {
                    set_ready(next);
                }
            }
        }
        ++seen_.results;
        results_.push_back(
            {outcome.id, std::move(outcome.error), outcome.cancelled, outcome.start, outcome.end, entry->keepalive});
    }
    seen_.nudges += failed ? 1 : 0;  // whoever waits for more results need not wait for them any longer
    if (failed || (!targets_.empty() && seen_.results >= *targets_.begin())) {
        finished_.notify_all();
    }
}

void QueueCore::work(Lane& lane, Worker& worker) {
    std::unique_lock lock(mutex_);
    for (;;) {
        lane.wake.wait(lock, [&] { return closing_ || !lane.ready.empty(); });
        --lane.idle;
        if (closing_) {
            break;
        }
        const std::int64_t id = lane.ready.begin()->id;
        lane.ready.erase(lane.ready.begin());
        Entry& entry = *entries_.at(id);
        entry.ready = false;
        entry.running = true;
        lock.unlock();
        std::optional<PortError> error;
        const double start = monotonic_seconds();
        try {
            for (const Piece& piece : entry.pieces) {
                if (lane.direction == Direction::read) {
                    lane.port->read(piece.offset, reinterpret_cast<void*>(piece.address), piece.nbytes);
                } else {
                    lane.port->write(piece.offset, reinterpret_cast<const void*>(piece.address), piece.nbytes);
                }
            }
        } catch (const PortFailure& failure) {
            error = failure.error();
        } catch (const std::exception& failure) {
            error = PortError{ErrorKind::tier, std::string("a transfer failed: ") + failure.what(), {}, 0, {}};
        }
        const double end = monotonic_seconds();
        lock.lock();
        complete(id, std::move(error), false, start, end);
        ++lane.idle;
    }
    worker.ended = true;
    finished_.notify_all();
}

void QueueCore::reprioritize(std::int64_t id, std::int64_t priority) {
    const std::lock_guard lock(mutex_);
    const auto set = [](Entry& entry, std::int64_t value) {
        if (entry.ready) {
            entry.lane->ready.erase({entry.priority, entry.order, entry.id});
            entry.lane->ready.insert({value, entry.order, entry.id});
        }
        entry.priority = value;
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
        // Nothing above an entry that is high enough needs raising on its behalf twice.
        if (other == entries_.end() || other->second->running || other->second->priority >= priority) {
            continue;
        }
        set(*other->second, priority);
        to_raise.insert(to_raise.end(), other->second->after.begin(), other->second->after.end());
    }
}

std::vector<Result> QueueCore::poll() {
    const std::lock_guard lock(mutex_);
    unpolled_failures_.clear();
    return std::exchange(results_, {});
}

// Waits until `ready`, which is looked at when there have been `results` results in all, and when somebody nudges or closes.
template <typename Ready>
void QueueCore::wait_for(std::unique_lock<std::mutex>& lock, std::uint64_t results, double seconds, Ready ready) {
    const auto target = targets_.insert(results);  // to be woken for each result would cost more than a small transfer
    finished_.wait_until(lock, deadline_after(seconds), [&] { return ready() || closing_; });
    targets_.erase(target);
}

bool QueueCore::wait(double seconds) {
    std::unique_lock lock(mutex_);
    wait_for(lock, seen_.results + 1, seconds, [&] { return !results_.empty(); });
    return !results_.empty();
}

QueueCore::Seen QueueCore::seen() const {
    const std::lock_guard lock(mutex_);
    return seen_;
}

void QueueCore::wait_past(const Seen& seen, std::uint64_t results, double seconds) {
    std::unique_lock lock(mutex_);
    const std::uint64_t target = seen.results + results;
    wait_for(lock, target, seconds, [&] { return seen_.results >= target || seen_.nudges != seen.nudges; });
}

void QueueCore::nudge() {
    if (!ours()) {
        return;  // a thread of the parent may have held the lock
    }
    const std::lock_guard lock(mutex_);
    ++seen_.nudges;
    finished_.notify_all();
}

std::size_t QueueCore::pending() const {
    const std::lock_guard lock(mutex_);
    return entries_.size();
}

bool QueueCore::close(double seconds) {
    std::unique_lock lock(mutex_);
    if (!closing_) {
        closing_ = true;
        std::vector<Entry*> dropped;
        for (const auto& [id, entry] : entries_) {
            if (!entry->running) {
                dropped.push_back(entry.get());
            }
        }
        std::sort(dropped.begin(), dropped.end(), [](const Entry* a, const Entry* b) { return a->order < b->order; });
        const double now = monotonic_seconds();
        for (const Entry* entry : dropped) {
            results_.push_back({entry->id, std::nullopt, true, now, now, entry->keepalive});
        }
        for (auto& [key, lane] : lanes_) {
            lane->ready.clear();
            lane->wake.notify_all();
        }
        std::erase_if(entries_, [](const auto& item) { return !item.second->running; });
        finished_.notify_all();
    }
    std::vector<Worker*> workers;  // no more of them are made from now on
    for (const auto& [key, lane] : lanes_) {
        for (const auto& worker : lane->workers) {
            workers.push_back(worker.get());
        }
    }
    const auto all_ended = [&] {
        return std::all_of(workers.begin(), workers.end(), [](const Worker* worker) { return worker->ended; });
    };
    const bool ended = finished_.wait_until(lock, deadline_after(seconds), all_ended);
    for (Worker* worker : workers) {
        if (worker->ended && worker->thread.joinable()) {
            std::thread thread = std::move(worker->thread);
            lock.unlock();
            thread.join();  // it has left its loop and only returns
            lock.lock();
        }
    }
    return ended;
}

}  // namespace farpool
