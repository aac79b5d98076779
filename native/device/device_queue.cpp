#include "device/device_queue.hpp"

#include <pthread.h>

#include <algorithm>
#include <exception>
#include <string>

#include "core/clock.hpp"
#include "core/room.hpp"
#include "core/signals_blocked.hpp"

namespace farpool::device {

DeviceQueue::DeviceQueue(std::shared_ptr<Device> device, Config config, PageLocks* locks)
    : device_(std::move(device)),
      config_(config),
      locks_(locks),
      staging_(device_, config.staging, config.chunk),
      events_(device_),
      lines_{Line(device_), Line(device_), Line(device_), Line(device_)},
      moves_(device_, config.bounce),
      clock_(device_, events_, moves_.stream()),
      order_(device_, events_, clock_, config.allocating),
      tiers_(std::make_shared<QueueCore>()) {}

std::vector<std::thread*> DeviceQueue::threads() {
    std::vector<std::thread*> threads{&launcher_};
    for (Line& line : lines_) {
        threads.push_back(&line.thread);
    }
    return threads;
}

// Runs after all threads: each of them holds a reference to the queue.
DeviceQueue::~DeviceQueue() {
    for (std::thread* thread : threads()) {
        if (thread->joinable()) {
            thread->detach();
        }
    }
}

// `left` becomes true when the thread has ended its work.
void DeviceQueue::start_thread(std::thread& thread, bool& left, const char* name, std::function<void()> body) {
    const SignalsBlocked blocked;
    thread = std::thread([self = shared_from_this(), &left, body = std::move(body)] {
        bool failed = false;
        try {
            self->guard("a thread of the device's queue has ended", body);
        } catch (...) {  // a thread has no caller, so the accesses fail
            failed = true;
        }
        const std::lock_guard lock(self->mutex_);
        left = true;
        self->thread_failed_ |= failed;
        for (Line& line : self->lines_) {
            line.wake.notify_all();
        }
        self->results_.notify_all();
    });
    pthread_setname_np(thread.native_handle(), name);
}

void DeviceQueue::begin() {
    // The launcher is last: nothing is under way until then, so the others can be stopped if one does not start.
    try {
        for (Line& line : lines_) {
            start_thread(line.thread, line.left, "farpool-copies", [this, &line] { watch(line); });
        }
        start_thread(launcher_, launcher_left_, "farpool-launch", [this] { run(); });
    } catch (...) {
        const std::lock_guard lock(mutex_);
        closing_ = launcher_left_ = true;
        for (Line& line : lines_) {
            line.wake.notify_all();
        }
        throw;
    }
}

// ---- what the driver calls ------------------------------------------------------------------------------------------------

void DeviceQueue::submit(std::span<Submission> batch, bool) {
    if (batch.empty()) {
        return;
    }
    std::exception_ptr refused;
    bool awaited = false;
    {
        const std::lock_guard lock(mutex_);
        require_open();
        if (broken_by_) {
            throw PortFailure(*broken_by_);
        }
        try {
            for (Submission& submission : batch) {
                add(submission);
                submission.keepalive = nullptr;
            }
        } catch (...) {
            refused = std::current_exception();  // those before it are submitted
        }
        awaited = results_.settle();
    }
    if (awaited) {
        results_.notify_all();
    }
    wake_launcher();
    if (refused) {
        std::rethrow_exception(refused);
    }
}

// All that needs memory comes before the change: if there is none, the entry is not submitted.
void DeviceQueue::add(Submission& submission) {
    const std::int64_t id = submission.id;
    if (jobs_.contains(id)) {
        fail_value("DeviceQueue.submit: entry " + std::to_string(id) + " is still pending; use a new id");
    }
    auto made = std::make_unique<Job>();
    Job& job = *made;
    job.id = id;
    job.port = submission.port;
    job.direction = submission.direction;
    job.priority = submission.priority;
    job.number = submitted_++;
    job.last_use = submission.last_use;
    job.keepalive = submission.keepalive;
    if (submission.port != nullptr) {
        std::ranges::copy_if(submission.pieces, std::back_inserter(job.pieces),
                             [](const Piece& piece) { return piece.nbytes > 0; });
    }
    const bool doomed = std::ranges::any_of(
        submission.after, [&](std::int64_t other) { return results_.has_failure(other) && !jobs_.contains(other); });
    results_.expect(jobs_.size() + 1);
    make_room(ends_, links_ + submission.after.size() + 1);
    link(std::move(made), submission.after);
    links_ += job.after.size();
    job.waiting_for = job.after.size();
    job.end = monotonic_seconds();
    if (doomed || (job.barrier() && job.waiting_for == 0)) {
        complete(job, doomed);
    }
}

// Adds a job, which waits for those of `after` that have not ended. If it throws, nothing was changed.
void DeviceQueue::link(std::unique_ptr<Job> made, std::span<const std::int64_t> after) {
    Job& job = *made;
    job.after.reserve(after.size());
    try {
        for (const std::int64_t other : after) {
            if (const auto found = jobs_.find(other); found != jobs_.end()) {
                found->second->dependents.push_back(job.id);
                job.after.push_back(other);
            }
        }
        if (!job.barrier()) {
            open_.insert(&job);
        }
        jobs_[job.id] = std::move(made);
    } catch (...) {
        for (const std::int64_t other : job.after) {
            jobs_.at(other)->dependents.pop_back();
        }
        open_.erase(&job);
        throw;
    }
}

void DeviceQueue::reprioritize(std::int64_t id, std::int64_t priority) {
    {
        const std::lock_guard lock(mutex_);
        std::vector<std::int64_t> todo{id};
        for (bool first = true; !todo.empty(); first = false) {
            const auto found = jobs_.find(todo.back());
            todo.pop_back();
            if (found == jobs_.end() || (!first && found->second->priority >= priority)) {
                continue;
            }
            Job& job = *found->second;
            const bool raised = priority > job.priority;
            auto place = open_.extract(&job);
            job.priority = priority;
            if (!place.empty()) {
                open_.insert(std::move(place));
            }
            for (const auto& [leg, chunk] : at_tier_) {
                if (chunk->job == &job) {
                    tiers_->reprioritize(leg, priority);
                }
            }
            if (raised) {  // it cannot go on before those that it waits for
                todo.insert(todo.end(), job.after.begin(), job.after.end());
            }
        }
    }
    wake_launcher();
}

std::size_t DeviceQueue::pending() const {
    const std::lock_guard lock(mutex_);
    return jobs_.size();
}

std::optional<PortError> DeviceQueue::trouble() const {
    const std::lock_guard lock(mutex_);
    if (broken_by_) {
        return broken_by_;
    }
    const auto found = std::ranges::find_if(lines_, [](const Line& line) { return line.trouble.has_value(); });
    return found == lines_.end() ? std::nullopt : found->trouble;
}

// Runs what must not be left half done. If it throws, the queue is broken.
template <typename Work>
void DeviceQueue::guard(const char* what, Work work) {
    try {
        work();
    } catch (...) {
        note_broken(what);
        throw PortFailure(*trouble());
    }
}

// Notes the error that is being handled.
void DeviceQueue::note_broken(const char* what) noexcept {
    PortError error = handled_error("cuda");
    try {
        error.message =
            std::string(what) + ": " + error.message +
            "; what the fast tier holds may be wrong since then, so it cannot be used any more: close the pool, and "
            "make a new one";
    } catch (...) {  // the error is as short as it is
    }
    const std::lock_guard lock(mutex_);
    if (!broken_by_) {
        broken_by_ = std::move(error);
    }
    broken_ = true;
    results_.nudge();  // threads that wait for their operands give up
}

void DeviceQueue::order_use(ProgramStream stream, std::int64_t last_use) {
    require_not_released();
    order_.order(stream, last_use);
}

void DeviceQueue::require_not_released() const {
    if (released_) {
        fail_closed("the transfer queue was closed");
    }
}

void DeviceQueue::end_use(ProgramStream stream, std::int64_t ordinal) {
    if (released_ || broken_) {
        return;  // no other block gets the range
    }
    bool full = false;
    // Without an event, the ranges could be given away while the work still uses them.
    guard("the end of work on the device was not noted", [&] { full = order_.end(stream, ordinal); });
    if (full) {
        wake_launcher();  // to give back the events that have passed
    }
}

void DeviceQueue::move(std::uintptr_t target, std::uintptr_t source, std::size_t nbytes, std::int64_t last_use) {
    require_not_released();
    guard("the device did not move bytes", [&] { moves_.move(order_, target, source, nbytes, last_use); });
}

void DeviceQueue::fill(std::uintptr_t target, std::size_t nbytes, std::uint16_t value) {
    require_not_released();
    guard("the device did not fill bytes", [&] { moves_.fill(order_, target, nbytes / 2, value); });
}

std::vector<ProgramStream> DeviceQueue::streams() const {
    std::vector<ProgramStream> streams = order_.streams();
    if (!released_) {
        streams.push_back(reinterpret_cast<ProgramStream>(moves_.stream()));
    }
    return streams;
}

// ---- ends -----------------------------------------------------------------------------------------------------------------

void DeviceQueue::end_chunk(Chunk& chunk) {
    Job& job = *chunk.job;
    chunk.leg = Leg::ended;
    staging_.give_back(chunk);
    ++job.ended;
    if (job.under_way() == 0 && (job.given_up() || job.ended == job.chunks.size())) {
        complete(job, job.dropped);
    }
}

// Reports the end of a job, and of those that have only waited for it.
void DeviceQueue::complete(Job& job, bool cancelled) {
    ends_.push_back({job.id, cancelled, job.end});  // a stack: chains of barriers and cancellations may be long
    while (!ends_.empty()) {
        const End end = ends_.back();
        ends_.pop_back();
        const auto found = jobs_.find(end.id);
        if (found == jobs_.end()) {
            continue;  // cancelled before, because another transfer that it waited for had failed
        }
        Job& ended = *found->second;
        if (end.cancelled && ended.under_way() > 0) {
            ended.dropped = true;  // it ends when its legs do
            continue;
        }
        open_.erase(&ended);
        if (ended.begun == 0) {
            ended.start = ended.end = end.time;
        }
        const bool bad = end.cancelled || ended.error.has_value();
        for (auto dependent = ended.dependents.rbegin(); dependent != ended.dependents.rend(); ++dependent) {
            const auto waiting = jobs_.find(*dependent);
            if (waiting == jobs_.end()) {
                continue;
            }
            Job& next = *waiting->second;
            if (bad) {
                ends_.push_back({next.id, true, ended.end});
            } else if (--next.waiting_for == 0 && next.barrier()) {
                ends_.push_back({next.id, false, ended.end});
            }
        }
        results_.add({ended.id, end.cancelled ? std::nullopt : std::move(ended.error), end.cancelled, ended.start, ended.end,
                      ended.keepalive});
        links_ -= ended.dependents.size();
        jobs_.erase(found);
    }
}

// ---- the end of the queue ------------------------------------------------------------------------------------------------

bool DeviceQueue::close(double seconds) {
    const double deadline = monotonic_seconds() + seconds;
    std::unique_lock lock(mutex_);
    if (!closing_) {
        drop_all();
        closing_ = true;
        for (Line& line : lines_) {
            line.wake.notify_all();  // if the launcher has failed, it wakes them no more
        }
    }
    lock.unlock();
    wake_launcher();
    lock.lock();
    const auto left = [&] { return launcher_left_ && std::ranges::all_of(lines_, [](const Line& line) { return line.left; }); };
    results_.wait(lock, UINT64_MAX, seconds, left);
    if (!left()) {
        return false;
    }
    lock.unlock();
    const bool tiers_left = tiers_->close(std::max(0.0, deadline - monotonic_seconds()));
    lock.lock();
    for (std::thread* thread : threads()) {
        if (thread->joinable()) {
            thread->join();  // it has left its loop, needs no lock any more and is about to return
        }
    }
    note_tier_ends();
    if (!tiers_left || thread_failed_ || !std::ranges::all_of(lines_, [](const Line& line) { return line.copies.empty(); })) {
        return false;
    }
    lock.unlock();
    return give_back(deadline);
}

// Gives back what the queue has of the device, when its last work has ended.
bool DeviceQueue::give_back(double deadline) {
    const std::lock_guard one_at_a_time(ending_);
    if (!released_) {
        try {
            if (!moves_.close(order_, events_, deadline)) {
                return false;
            }
        } catch (const PortFailure&) {
            return false;  // we do not know if that work has ended
        }
        released_ = true;
        for (Line& line : lines_) {
            line.stream.end();
        }
        events_.end();
        staging_.release();
    }
    return true;
}

// Drops all jobs; those with a leg under way are reported as cancelled when it has ended.
void DeviceQueue::drop_all() {
    std::vector<Job*> jobs;
    for (const auto& [id, job] : jobs_) {
        jobs.push_back(job.get());
    }
    std::ranges::sort(jobs, {}, &Job::number);
    const double now = monotonic_seconds();
    for (Job* job : jobs) {
        job->dropped = true;
        job->dependents.clear();  // they are dropped here, too
        job->ended += static_cast<std::size_t>(std::ranges::count(job->chunks, Leg::between, &Chunk::leg));
        if (job->under_way() == 0) {
            job->end = std::max(job->end, now);
            complete(*job, true);
        }
    }
    results_.notify_all();
}

}  // namespace farpool::device
