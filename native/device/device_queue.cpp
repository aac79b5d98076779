#include "device/device_queue.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <limits>
#include <string>
#include <tuple>

#include "core/clock.hpp"
#include "core/signals_blocked.hpp"

namespace farpool::device {

namespace {

constexpr std::int64_t alignment = 64;   // of parts in staging memory
constexpr std::size_t least_copies = 2;  // queued on a stream, however long they take
constexpr std::size_t most_copies = 64;  // queued on a stream, however small they are
constexpr double idle_seconds = 3600;    // the launcher is woken for all that happens
constexpr double trouble_seconds = 0.1;  // between two questions to a device that does not answer
constexpr double weight = 0.25;          // of the latest copy in the speed of a link

std::size_t rounded(std::size_t nbytes) {
    return (nbytes + static_cast<std::size_t>(alignment) - 1) / static_cast<std::size_t>(alignment) *
           static_cast<std::size_t>(alignment);
}

}  // namespace

struct DeviceQueue::Job {
    std::int64_t id;
    Port* port;
    Direction direction;
    std::int64_t priority;
    std::uint64_t number;  // of submission
    std::int64_t last_use;
    Keepalive keepalive;
    std::vector<Piece> pieces;
    std::vector<std::int64_t> after;
    std::vector<std::int64_t> dependents;
    std::size_t waiting_for = 0;
    std::vector<Chunk> chunks;  // empty until the first leg can start, as the page locks at that time decide
    bool staged = false;
    bool followed = false;  // the copies' stream has waited for the program's work
    std::size_t begun = 0;  // chunks of which a leg was started
    std::size_t ended = 0;
    double start = std::numeric_limits<double>::infinity();
    double end = 0;
    std::optional<PortError> error;
    bool dropped = false;  // cancelled while legs were under way

    void note_times(double started, double ended_at) {
        start = std::min(start, started);
        end = std::max(end, ended_at);
    }
    bool barrier() const { return pieces.empty(); }
    bool fetch() const { return direction == Direction::read; }
    std::size_t under_way() const { return begun - ended; }
    bool given_up() const { return dropped || error.has_value(); }
    bool all_begun() const { return barrier() ? waiting_for == 0 : !chunks.empty() && begun == chunks.size(); }
};

bool DeviceQueue::Rank::operator()(const Job* left, const Job* right) const {
    const auto key = [](const Job* job) { return std::tuple(-job->priority, !job->fetch(), job->number); };
    return key(left) < key(right);
}

DeviceQueue::Line& DeviceQueue::line_of(const Job& job) { return lines_[static_cast<std::size_t>(job.direction)]; }

DeviceQueue::DeviceQueue(std::shared_ptr<Device> device, Config config, PageLocks* locks)
    : owner_(getpid()),
      device_(std::move(device)),
      config_(config),
      locks_(locks),
      memory_(device_, config.staging),
      events_(device_),
      in_(device_),
      out_(device_),
      moving_(device_),
      bounce_(device_, config.bounce),
      clock_(device_, events_, moving_.get()),
      order_(device_, events_, clock_, config.allocating),
      tiers_(std::make_shared<QueueCore>()),
      staging_(static_cast<std::int64_t>(config.staging), alignment) {
    lines_[0].stream = in_.get();
    lines_[1].stream = out_.get();
}

// Runs after all threads: each of them holds a reference to the queue.
DeviceQueue::~DeviceQueue() {
    for (std::thread* thread : {&launcher_, &lines_[0].thread, &lines_[1].thread}) {
        if (thread->joinable()) {
            thread->detach();
        }
    }
}

void DeviceQueue::start_thread(std::thread& thread, const char* name, std::function<void()> body) {
    const SignalsBlocked blocked;
    thread = std::thread([self = shared_from_this(), body = std::move(body)] { body(); });
    pthread_setname_np(thread.native_handle(), name);
}

void DeviceQueue::begin() {
    // The launcher is last: nothing is under way until then, so the others can be stopped if one does not start.
    try {
        start_thread(lines_[0].thread, "farpool-in", [this] { watch(lines_[0]); });
        start_thread(lines_[1].thread, "farpool-out", [this] { watch(lines_[1]); });
        start_thread(launcher_, "farpool-launch", [this] { run(); });
    } catch (...) {
        const std::lock_guard lock(mutex_);
        closing_ = launcher_left_ = true;
        for (Line& line : lines_) {
            line.wake.notify_all();
        }
        throw;
    }
}

bool DeviceQueue::ours() const noexcept { return getpid() == owner_; }

// ---- what the driver calls ------------------------------------------------------------------------------------------------

void DeviceQueue::submit(std::span<Submission> batch, bool) {
    if (batch.empty()) {
        return;
    }
    std::exception_ptr refused;
    {
        const std::lock_guard lock(mutex_);
        if (closing_) {
            fail_closed("the transfer queue was closed");
        }
        try {
            for (Submission& submission : batch) {
                add(submission);
                submission.keepalive = nullptr;
            }
        } catch (...) {
            refused = std::current_exception();  // those before it are submitted
        }
        results_.wake();
    }
    wake_launcher();
    if (refused) {
        std::rethrow_exception(refused);
    }
}

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
    bool doomed = false;
    for (const std::int64_t other : submission.after) {
        const auto found = jobs_.find(other);
        if (found == jobs_.end()) {
            doomed = doomed || results_.has_failure(other);
        } else {
            job.after.push_back(other);
            found->second->dependents.push_back(id);
            ++job.waiting_for;
        }
    }
    jobs_.emplace(id, std::move(made));
    results_.forget_failure(id);
    job.end = monotonic_seconds();
    if (doomed || (job.barrier() && job.waiting_for == 0)) {
        complete(job, doomed);
    } else if (!job.barrier()) {
        open_.insert(&job);
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
            const bool was_open = open_.erase(&job) > 0;
            job.priority = priority;
            if (was_open) {
                open_.insert(&job);
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

std::vector<Result> DeviceQueue::poll() {
    const std::lock_guard lock(mutex_);
    return results_.poll();
}

bool DeviceQueue::wait(double seconds) {
    std::unique_lock lock(mutex_);
    results_.wait(lock, results_.seen().results + 1, seconds, [&] { return !results_.empty() || closing_; });
    return !results_.empty();
}

TransferQueue::Seen DeviceQueue::seen() const {
    const std::lock_guard lock(mutex_);
    return results_.seen();
}

void DeviceQueue::wait_past(const Seen& seen, std::uint64_t results, double seconds) {
    std::unique_lock lock(mutex_);
    results_.wait(lock, seen.results + results, seconds, [&] { return results_.past(seen, results) || closing_; });
}

void DeviceQueue::nudge() {
    if (!ours()) {
        return;  // a thread of the parent may have held the lock
    }
    const std::lock_guard lock(mutex_);
    results_.nudge();
}

std::size_t DeviceQueue::pending() const {
    const std::lock_guard lock(mutex_);
    return jobs_.size();
}

std::optional<PortError> DeviceQueue::trouble() const {
    const std::lock_guard lock(mutex_);
    return lines_[0].trouble ? lines_[0].trouble : lines_[1].trouble;
}

void DeviceQueue::end_use(ProgramStream stream, std::int64_t ordinal) {
    if (order_.end(stream, ordinal)) {
        wake_launcher();  // to give back the events that have passed
    }
}

// ---- moves ----------------------------------------------------------------------------------------------------------------

void DeviceQueue::queue_move(std::int64_t last_use, const std::function<void(Stream)>& work) {
    const Attached attached(*device_);
    order_.follow(moving_.get(), last_use, moves_);
    work(moving_.get());
    order_.moved(moving_.get());
}

void DeviceQueue::move(std::uintptr_t target, std::uintptr_t source, std::size_t nbytes, std::int64_t last_use) {
    queue_move(last_use, [&](Stream stream) {
        const std::size_t distance = target < source ? source - target : target - source;
        // A copy between ranges that overlap has no defined result. Pieces no longer than the distance do not overlap; if the
        // distance is short, pieces go through memory of their own. They go in the direction in which no write overwrites bytes
        // that are still to be read.
        const bool bounced = distance < std::min(nbytes, config_.bounce);
        const std::size_t most = bounced ? config_.bounce : std::max<std::size_t>(distance, 1);
        for (std::size_t done = 0; done < nbytes;) {
            const std::size_t size = std::min(most, nbytes - done);
            const std::size_t at = target < source ? done : nbytes - done - size;
            if (bounced) {
                device_->copy_within(stream, bounce_.address(), source + at, size);
                device_->copy_within(stream, target + at, bounce_.address(), size);
            } else {
                device_->copy_within(stream, target + at, source + at, size);
            }
            done += size;
        }
    });
}

void DeviceQueue::fill(std::uintptr_t target, std::size_t nbytes, std::uint16_t value) {
    queue_move(order_.newest(), [&](Stream stream) { device_->fill(stream, target, value, nbytes / 2); });
}

std::vector<ProgramStream> DeviceQueue::streams() const {
    std::vector<ProgramStream> streams = order_.streams();
    streams.push_back(reinterpret_cast<ProgramStream>(moving_.get()));
    return streams;
}

// ---- the launcher ---------------------------------------------------------------------------------------------------------

// A thread of the queue enters the device where it is to call it, so that a device that was lost before is reported like one
// that is lost later.
void DeviceQueue::run() {
    std::unique_lock lock(mutex_);
    while (!closing_) {
        const Seen seen = tiers_->seen();
        const bool progressed = note_tier_ends() | advance(lock);
        results_.wake();
        if (progressed) {
            continue;
        }
        lock.unlock();
        try {
            device_->enter();
            order_.retire();
        } catch (const PortFailure&) {
            // A device that does not answer is reported by the threads that wait for copies.
        }
        tiers_->wait_past(seen, 1, idle_seconds);
        lock.lock();
    }
    launcher_left_ = true;
    for (Line& line : lines_) {
        line.wake.notify_all();
    }
    results_.notify_all();
}

bool DeviceQueue::note_tier_ends() {
    std::vector<Result> results = tiers_->poll();
    for (Result& result : results) {
        const auto found = at_tier_.find(result.id);
        Chunk& chunk = *found->second;
        Job& job = *chunk.job;
        at_tier_.erase(found);
        if (result.error) {
            fail(job, std::move(*result.error));
        }
        if (!result.cancelled) {
            job.note_times(result.start, result.end);
        }
        if (!job.fetch() || result.cancelled || job.given_up()) {
            end_chunk(chunk);
        } else {
            chunk.leg = Leg::between;
        }
    }
    return !results.empty();
}

bool DeviceQueue::advance(std::unique_lock<std::mutex>& lock) {
    bool any = false;
    // Starting a copy gives up the lock, during which jobs come and go, so each step looks for the most urgent job again.
    while (!closing_ && std::ranges::any_of(open_, [&](Job* job) { return advance(lock, *job); })) {
        any = true;
    }
    return any;
}

// Starts one leg of a job, or gives up a chunk that waits between its legs; false, and nothing changed, if there is nothing to
// do now.
bool DeviceQueue::advance(std::unique_lock<std::mutex>& lock, Job& job) {
    if (job.chunks.empty()) {
        cut(job, lay_out(job));
    }
    for (std::size_t index = 0; index < job.begun; ++index) {
        if (job.chunks[index].leg == Leg::between) {
            return advance_between(lock, job.chunks[index]);  // the others have to wait for the same
        }
    }
    if (job.begun == job.chunks.size() || job.given_up()) {
        return false;
    }
    Chunk& next = job.chunks[job.begun];
    const bool by_device = !job.staged || !job.fetch();
    if ((by_device && !may_copy(job)) || (job.staged && !take_staging(next))) {
        return false;
    }
    ++job.begun;
    if (by_device) {
        copy(lock, next);
    } else {
        submit_tier_leg(next);
    }
    return true;
}

// Starts the second leg of a chunk.
bool DeviceQueue::advance_between(std::unique_lock<std::mutex>& lock, Chunk& chunk) {
    Job& job = *chunk.job;
    if (job.given_up()) {
        end_chunk(chunk);
    } else if (!job.fetch()) {
        submit_tier_leg(chunk);
    } else if (may_copy(job)) {
        copy(lock, chunk);
    } else {
        return false;
    }
    return true;
}

// Gives a chunk staging memory; false if there is none now.
bool DeviceQueue::take_staging(Chunk& chunk) {
    const Job& job = *chunk.job;
    // The transfers that this one waits for get staging memory first: if this one took the last of it, none could go on.
    const auto is_to_begin = [&](std::int64_t id) {
        const auto found = jobs_.find(id);
        return found != jobs_.end() && !found->second->all_begun();
    };
    if (std::ranges::any_of(job.after, is_to_begin)) {
        return false;
    }
    chunk.staging = staging_.alloc(static_cast<std::int64_t>(chunk.nbytes));
    if (chunk.staging < 0) {
        return false;
    }
    std::uintptr_t host = memory_.address() + static_cast<std::uintptr_t>(chunk.staging);
    for (Part& part : chunk.parts) {
        part.host = host;
        host += rounded(part.nbytes);
    }
    return true;
}

// The parts of a job's pieces, cut where page-locked memory is cut. If some of the memory is not page-locked, the job is
// staged.
std::vector<DeviceQueue::Part> DeviceQueue::lay_out(Job& job) const {
    std::vector<Part> parts;
    std::vector<HostPart> memory;
    for (const Piece& piece : job.pieces) {
        memory.clear();
        job.staged = job.staged || locks_ == nullptr || !locks_->parts(job.port, piece.offset, piece.nbytes, memory);
        if (job.staged) {
            memory.assign(1, {0, piece.nbytes});
        }
        std::size_t done = 0;
        for (const HostPart& part : memory) {
            parts.push_back({piece.offset + done, piece.address + done, part.address, part.nbytes});
            done += part.nbytes;
        }
    }
    return parts;
}

// Cuts a job into chunks. Parts in host memory get their addresses in staging memory later, if the job is staged.
void DeviceQueue::cut(Job& job, std::vector<Part> parts) {
    for (Part& part : parts) {
        while (part.nbytes > 0) {
            const std::size_t size = std::min(part.nbytes, config_.chunk);
            if (job.chunks.empty() || job.chunks.back().nbytes + rounded(size) > config_.chunk) {
                job.chunks.push_back({&job, {}});
            }
            Chunk& chunk = job.chunks.back();
            chunk.parts.push_back({part.offset, part.place, part.host, size});
            chunk.nbytes += rounded(size);
            part = {part.offset + size, part.place + size, part.host + size, part.nbytes - size};
        }
    }
}

void DeviceQueue::submit_tier_leg(Chunk& chunk) {
    Job& job = *chunk.job;
    std::vector<Piece> pieces;
    for (const Part& part : chunk.parts) {
        pieces.push_back({part.offset, part.host, part.nbytes});
    }
    chunk.leg = Leg::tier;
    const std::int64_t leg = ++tier_legs_;
    at_tier_.emplace(leg, &chunk);
    Submission submission{.id = leg, .port = job.port, .direction = job.direction, .pieces = pieces, .priority = job.priority};
    try {
        tiers_->submit({&submission, 1});
    } catch (const PortFailure& failure) {
        at_tier_.erase(leg);
        fail(job, failure.error());
        end_chunk(chunk);
    }
}

// ---- copies ---------------------------------------------------------------------------------------------------------------

bool DeviceQueue::may_copy(const Job& job) {
    const Line& line = line_of(job);
    if (job.waiting_for > 0) {
        return false;
    }
    const double seconds = static_cast<double>(line.nbytes) * line.seconds_per_byte;
    return line.copies.size() < least_copies || (line.copies.size() < most_copies && seconds < config_.queued_seconds);
}

// Queues the device's leg of a chunk. It gives up the lock while it does so: the chunk counts as under way, so the job stays.
void DeviceQueue::copy(std::unique_lock<std::mutex>& lock, Chunk& chunk) {
    Job& job = *chunk.job;
    Line& line = line_of(job);
    chunk.leg = Leg::device;
    lock.unlock();
    Copy made{&chunk, nullptr, nullptr, std::nullopt};
    std::optional<PortError> error;
    bool queued = false;
    try {
        device_->enter();
        made.start = events_.take();
        made.end = events_.take();
        if (!job.followed) {
            order_.follow(line.stream, job.last_use, line.moves);
            job.followed = true;
        }
        device_->record(made.start, line.stream);
        queued = true;
        try {
            queue_copies(chunk, line.stream);
        } catch (const PortFailure& failure) {
            error = failure.error();
        }
        // Also after an error: some of the copies may have been queued, and they use the host's memory until they have ended.
        device_->record(made.end, line.stream);
    } catch (const PortFailure& failure) {
        error = failure.error();
        made.lost = failure.error();
    }
    lock.lock();
    if (error) {
        fail(job, std::move(*error));
    }
    if (queued) {
        line.copies.push_back(std::move(made));
        line.nbytes += chunk.nbytes;
        line.wake.notify_one();
        return;
    }
    for (const Event event : {made.start, made.end}) {
        if (event != nullptr) {
            events_.give(event);
        }
    }
    end_chunk(chunk);
}

void DeviceQueue::queue_copies(const Chunk& chunk, Stream stream) {
    const Job& job = *chunk.job;
    for (std::size_t index = 0; index < chunk.parts.size();) {
        const Part& part = chunk.parts[index];
        std::size_t nbytes = part.nbytes;
        // Neighbours go in one copy, but not in a tier's memory: there a copy must not cross from one locked range into
        // another.
        while (++index < chunk.parts.size() && job.staged && chunk.parts[index].place == part.place + nbytes &&
               chunk.parts[index].host == part.host + nbytes) {
            nbytes += chunk.parts[index].nbytes;
        }
        if (job.fetch()) {
            device_->copy_in(stream, part.place, reinterpret_cast<const void*>(part.host), nbytes);
        } else {
            device_->copy_out(stream, reinterpret_cast<void*>(part.host), part.place, nbytes);
        }
    }
}

// Waits for the ends of copies, one after the other.
void DeviceQueue::watch(Line& line) {
    std::unique_lock lock(mutex_);
    for (;;) {
        line.wake.wait(lock, [&] { return !line.copies.empty() || (closing_ && launcher_left_); });
        if (line.copies.empty()) {
            break;
        }
        const Copy oldest = line.copies.front();
        lock.unlock();
        std::optional<PortError> error = oldest.lost;
        double start = 0;
        double end = 0;
        if (!error) {
            try {
                device_->enter();
                device_->synchronize(oldest.end);
            } catch (const PortFailure& failure) {
                error = failure.error();
            }
        }
        if (!error) {
            try {
                start = clock_.take_time(oldest.start);
                end = std::max(start, clock_.take_time(oldest.end));
            } catch (const PortFailure&) {  // the device was lost since then
                start = end = monotonic_seconds();
            }
        }
        lock.lock();
        if (error) {
            // We do not know if the copy has ended, so its memory stays taken. An access that waits for it gives up in time,
            // with this error.
            line.trouble = std::move(error);
            if (closing_) {
                break;
            }
            line.wake.wait_for(lock, std::chrono::duration<double>(trouble_seconds));
            continue;
        }
        line.trouble.reset();
        end_copy(line, start, end);
        results_.wake();
        lock.unlock();
        wake_launcher();
        lock.lock();
    }
    line.left = true;
    results_.notify_all();
}

void DeviceQueue::end_copy(Line& line, double start, double end) {
    Chunk& chunk = *line.copies.front().chunk;
    Job& job = *chunk.job;
    line.copies.pop_front();
    line.nbytes -= chunk.nbytes;
    // While copies follow each other without a gap, the next one's time on the link begins with the end of the one before.
    const double alone = end - std::max(start, line.ended_at);
    line.ended_at = end;
    if (chunk.nbytes > 0 && alone > 0) {
        line.seconds_per_byte += weight * (alone / static_cast<double>(chunk.nbytes) - line.seconds_per_byte);
    }
    job.note_times(start, end);
    if (job.staged && !job.fetch() && !job.given_up()) {
        chunk.leg = Leg::between;  // the launcher hands it to the tier
    } else {
        end_chunk(chunk);
    }
}

// ---- ends -----------------------------------------------------------------------------------------------------------------

void DeviceQueue::fail(Job& job, PortError error) {
    if (!job.error) {
        job.error = std::move(error);
    }
}

void DeviceQueue::end_chunk(Chunk& chunk) {
    Job& job = *chunk.job;
    chunk.leg = Leg::ended;
    if (chunk.staging >= 0) {
        staging_.free(std::exchange(chunk.staging, -1));
    }
    ++job.ended;
    if (job.under_way() == 0 && (job.given_up() || job.ended == job.chunks.size())) {
        complete(job, job.dropped);
    }
}

// Reports the end of a job, and of those that have only waited for it.
void DeviceQueue::complete(Job& job, bool cancelled) {
    struct End {
        std::int64_t id;
        bool cancelled;
        double time;
    };
    std::vector<End> todo{{job.id, cancelled, job.end}};  // a stack: chains of barriers and cancellations may be long
    while (!todo.empty()) {
        const End end = todo.back();
        todo.pop_back();
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
                todo.push_back({next.id, true, ended.end});
            } else if (--next.waiting_for == 0 && next.barrier()) {
                todo.push_back({next.id, false, ended.end});
            }
        }
        results_.add({ended.id, end.cancelled ? std::nullopt : std::move(ended.error), end.cancelled, ended.start, ended.end,
                      ended.keepalive});
        jobs_.erase(found);
    }
}

// ---- the end of the queue ------------------------------------------------------------------------------------------------

bool DeviceQueue::close(double seconds) {
    const double deadline = monotonic_seconds() + seconds;
    std::unique_lock lock(mutex_);
    if (!std::exchange(closing_, true)) {
        drop_all();
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
    for (std::thread* thread : {&launcher_, &lines_[0].thread, &lines_[1].thread}) {
        if (thread->joinable()) {
            thread->join();  // it has left its loop, needs no lock any more and is about to return
        }
    }
    note_tier_ends();
    return tiers_left && std::ranges::all_of(lines_, [](const Line& line) { return line.copies.empty(); });
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
