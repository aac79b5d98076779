// The part of a device's queue that decides which leg of which transfer is next: the launcher's thread.
#include <algorithm>

#include "device/device_queue.hpp"

namespace farpool::device {

namespace {

constexpr double idle_seconds = 3600;  // the launcher is woken for all that happens
constexpr double retry_seconds = 0.1;  // until it asks for memory again

}  // namespace

// A thread of the queue enters the device where it is to call it, so that a device that was lost before is reported like one
// that is lost later.
void DeviceQueue::run() {
    std::unique_lock lock(mutex_);
    while (!closing_) {
        const Seen seen = tiers_->seen();
        bool progressed = false;
        const std::optional<PortError> error = error_of([&] { progressed = note_tier_ends(); });
        progressed = advance(lock) || progressed;
        const bool awaited = results_.settle();
        lock.unlock();
        if (awaited) {
            results_.notify_all();
        }
        if (!progressed) {
            retire();
            tiers_->wait_past(seen, 1, error ? retry_seconds : idle_seconds);
        }
        lock.lock();
    }
}

void DeviceQueue::retire() {
    // A device that does not answer is reported by the threads that wait for copies. Without memory, the next time will do.
    (void)error_of([&] {
        device_->enter();
        order_.retire();
    });
}

bool DeviceQueue::note_tier_ends() {
    std::vector<Result> results = tiers_->poll();
    for (Result& result : results) {
        const auto found = at_tier_.find(result.id);
        Chunk& chunk = *found->second;
        Job& job = *chunk.job;
        at_tier_.erase(found);
        if (result.error) {
            job.fail(std::move(*result.error));
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
        try {
            cut(job, locks_, config_.chunk);
        } catch (const std::exception&) {  // nothing of it was started
            job.chunks.clear();
            job.fail(handled_error("cuda"));
            complete(job, false);
            return true;
        }
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
    if (by_device && !may_copy(job)) {
        return false;
    }
    bool ready = true;
    std::optional<PortError> error;
    if (job.staged) {
        error = error_of([&] { ready = take_staging(next); });
    }
    if (!ready) {
        return false;
    }
    ++job.begun;
    if (error) {
        job.fail(std::move(*error));
        end_chunk(next);
        return true;
    }
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
    return staging_.take(chunk);
}

void DeviceQueue::submit_tier_leg(Chunk& chunk) {
    Job& job = *chunk.job;
    chunk.leg = Leg::tier;
    const std::int64_t leg = ++tier_legs_;
    try {
        std::vector<Piece> pieces;
        for (const Part& part : chunk.parts) {
            pieces.push_back({part.offset, part.host, part.nbytes});
        }
        at_tier_.emplace(leg, &chunk);
        Submission submission{
            .id = leg, .port = job.port, .direction = job.direction, .pieces = pieces, .priority = job.priority};
        tiers_->submit({&submission, 1});
    } catch (const std::exception&) {  // such as no memory, or no thread for this tier: the leg was not submitted
        at_tier_.erase(leg);
        job.fail(handled_error("cuda"));
        end_chunk(chunk);
    }
}

}  // namespace farpool::device
