// The part of a device's queue that queues copies on the device's streams, and the threads that wait for their ends.
#include <algorithm>

#include "core/clock.hpp"
#include "device/device_queue.hpp"

namespace farpool::device {

namespace {

constexpr std::size_t least_copies = 2;  // queued on a stream, however long they take
constexpr std::size_t most_copies = 64;  // queued on a stream, however small they are
constexpr double trouble_seconds = 0.1;  // between two questions to a device that does not answer
constexpr double weight = 0.25;          // of the latest copy in the speed of a link

}  // namespace

DeviceQueue::Line& DeviceQueue::line_of(const Job& job) { return line_of(job.direction, job.urgent()); }

bool DeviceQueue::may_copy(const Job& job) {
    const Line& line = line_of(job);
    if (job.waiting_for > 0) {
        return false;
    }
    const double seconds = static_cast<double>(line.nbytes) * line.seconds_per_byte;
    const bool room =
        line.copies.size() < least_copies || (line.copies.size() < most_copies && seconds < config_.queued_seconds);
    return room && (job.urgent() || !urgent_copy_runs(job.direction));
}

// True if the link is for an urgent copy. One that waits for the program's work leaves it to others until then: what they have
// queued by that time is as bounded as ever.
bool DeviceQueue::urgent_copy_runs(Direction direction) {
    Line& line = line_of(direction, true);
    if (line.copies.empty()) {
        return false;
    }
    Copy& oldest = line.copies.front();
    if (!oldest.has_begun) {
        // If it has just ended, its event may be another one's by now; then the answer does not matter.
        const std::optional<PortError> error = error_of([&] {
            device_->enter();
            oldest.has_begun = device_->passed(oldest.start);
        });
        oldest.has_begun = oldest.has_begun || error.has_value();  // the thread that waits for its end says why
    }
    return oldest.has_begun;
}

// Queues the device's leg of a chunk. All that needs memory comes before the first copy is queued: from then on, the copy is
// known until it has ended. It gives up the lock while it does so: the chunk counts as under way, so the job stays.
void DeviceQueue::copy(std::unique_lock<std::mutex>& lock, Chunk& chunk) {
    Job& job = *chunk.job;
    Line& line = line_of(job);
    bool& followed = job.followed[job.urgent() ? 1 : 0];
    chunk.leg = Leg::device;
    lock.unlock();
    std::list<Copy> made;
    std::optional<PortError> refused;
    bool queued = false;
    std::optional<PortError> error = error_of([&] {
        made.push_back({&chunk, nullptr, nullptr, std::nullopt, followed});
        Copy& copy = made.back();
        device_->enter();
        copy.start = events_.take();
        copy.end = events_.take();
        if (!followed) {
            order_.follow(line.stream.get(), job.last_use, line.moves);
            followed = true;
        }
        device_->record(copy.start, line.stream.get());
        queued = true;
        refused = error_of([&] { queue_copies(chunk, line.stream.get()); });
        // Also after an error: some of the copies may have been queued, and they use the host's memory until they have ended.
        device_->record(copy.end, line.stream.get());
    });
    if (queued && error) {
        made.back().lost = copy_of(*error);
    }
    lock.lock();
    if (error || refused) {
        job.fail(std::move(error ? *error : *refused));
    }
    if (queued) {
        line.copies.splice(line.copies.end(), made);
        line.nbytes += chunk.nbytes;
        line.wake.notify_one();
        return;
    }
    for (const Copy& copy : made) {
        for (const Event event : {copy.start, copy.end}) {
            if (event != nullptr) {
                events_.give(event);
            }
        }
    }
    end_chunk(chunk);
}

void DeviceQueue::queue_copies(const Chunk& chunk, Stream stream) {
    const Job& job = *chunk.job;
    std::vector<HostCopy> copies;
    for (std::size_t index = 0; index < chunk.parts.size();) {
        const Part& part = chunk.parts[index];
        std::size_t nbytes = part.nbytes;
        // Neighbours go in one copy, but not in a tier's memory: there a copy must not cross from one locked range into
        // another.
        while (++index < chunk.parts.size() && job.staged && chunk.parts[index].place == part.place + nbytes &&
               chunk.parts[index].host == part.host + nbytes) {
            nbytes += chunk.parts[index].nbytes;
        }
        copies.push_back({part.place, part.host, nbytes});
    }
    device_->copy_all(stream, job.fetch(), copies);
}

// Waits for the ends of copies, one after the other.
void DeviceQueue::watch(Line& line) {
    std::unique_lock lock(mutex_);
    for (;;) {
        line.wake.wait(lock, [&] { return !line.copies.empty() || (closing_ && launcher_left_); });
        if (line.copies.empty()) {
            break;
        }
        const Copy& oldest = line.copies.front();  // only this thread takes it out
        lock.unlock();
        std::optional<PortError> error;
        double start = 0;
        double end = 0;
        if (oldest.lost) {
            error = copy_of(*oldest.lost);
        } else {
            error = error_of([&] {
                device_->enter();
                device_->synchronize(oldest.end);
            });
        }
        const auto take_times = [&] {
            start = clock_.take_time(oldest.start);
            end = std::max(start, clock_.take_time(oldest.end));
        };
        if (!error && error_of(take_times)) {  // the device was lost since then
            start = end = monotonic_seconds();
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
        const bool awaited = results_.settle();
        const bool more = !open_.empty();
        lock.unlock();
        if (awaited) {
            results_.notify_all();
        }
        if (more) {
            wake_launcher();
        }
        lock.lock();
    }
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

}  // namespace farpool::device
