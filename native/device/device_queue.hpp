// The queue of transfers between tiers and a device that has its own memory.
//
// If a tier's memory is page-locked, the device copies between that memory and the arena. Otherwise a transfer has two steps,
// which we call *legs*: threads of a `QueueCore` copy between the tier and page-locked staging memory, and the device copies
// between staging memory and arena. A transfer is cut into chunks whose legs run at the same time, so that a large block starts
// to arrive before it was read completely.
//
// One thread starts all legs, in order of urgency. The device has streams for each direction, on which at least two copies are
// queued, and otherwise as many as take a few milliseconds: enough to keep the link busy, and few enough for an urgent copy to
// have its turn soon. Urgent copies have streams of their own: a copy may wait for the program's work, and all that is queued
// behind it on its stream waits with it. While an urgent copy runs, no other one of its direction is queued; while it waits for
// the program's work, others use the link. A thread for each stream sleeps until the oldest copy there has ended. No thread
// needs an interpreter.
//
// The target of a fetch may still hold bytes that other transfers write to their tiers (`Submission::after`). Only the device's
// leg of the fetch waits for these transfers, until they have ended on their tiers: the bytes must still be in the arena if a
// tier refuses a write. The program's work on the range is another matter: for that the copy waits on its stream
// (`ProgramOrder`).
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <functional>
#include <list>
#include <memory>
#include <new>
#include <set>
#include <thread>
#include <unordered_map>
#include <vector>

#include "core/queue.hpp"
#include "device/jobs.hpp"
#include "device/moves.hpp"
#include "device/owned.hpp"
#include "device/program_order.hpp"
#include "device/staging.hpp"

namespace farpool::device {

class DeviceQueue final : public QueueBase, public std::enable_shared_from_this<DeviceQueue> {
public:
    struct Config {
        std::size_t staging;           // bytes of page-locked host memory, at least one chunk
        std::size_t chunk = 4 << 20;   // bytes of a copy
        double queued_seconds = 2e-3;  // of copies on a stream, by the link's measured speed
        ProgramStream allocating = 0;  // stream on which the arena was allocated
        std::size_t bounce = 4 << 20;  // device memory for moves between ranges that overlap
    };
    // `locks`: the page locks of the tiers' memory, which must last until the queue is closed; may be null. The queue is owned
    // by a shared_ptr. The calling thread must be able to call the device, also at `close` and at the end of the queue.
    DeviceQueue(std::shared_ptr<Device> device, Config config, PageLocks* locks);
    ~DeviceQueue() override;
    // Starts the threads.
    void begin();

    void submit(std::span<Submission> batch, bool waits = false) override;
    void move(std::uintptr_t target, std::uintptr_t source, std::size_t nbytes, std::int64_t last_use) override;
    void reprioritize(std::int64_t id, std::int64_t priority) override;
    std::size_t pending() const override;
    // If it succeeds, the moves and the work on destroyed streams have ended, too, and all memory, streams and events have been
    // given back.
    bool close(double seconds) override;

    void begin_use(ProgramStream stream) override { order_.begin(stream); }
    void order_use(ProgramStream stream, std::int64_t last_use) override;
    void end_use(ProgramStream stream, std::int64_t ordinal) override;
    void look() override { wake_launcher(); }
    std::vector<Ran> take_ran() override { return order_.take_ran(); }
    std::optional<PortError> trouble() const override;
    bool broken() const noexcept override { return broken_; }

    // Fills a range after the program's earlier work and before its later work; both bounds must be even.
    void fill(std::uintptr_t target, std::size_t nbytes, std::uint16_t value);
    // Bytes of the pieces, from its start, in which a block that is not page-locked is written to its tier and read again.
    std::size_t chunk() const noexcept { return config_.chunk; }
    // Bytes of device memory that the queue holds for moves between ranges that overlap; 0 after `close` has succeeded.
    std::size_t bounce() const noexcept { return released_ ? 0 : config_.bounce; }
    // All streams whose queued work may use the arena: the program's, and until `close` has succeeded the one of moves.
    std::vector<ProgramStream> streams() const;

private:
    struct Copy {
        Chunk* chunk;
        Event start;
        Event end;
        std::optional<PortError> lost;  // why the device cannot tell when it has ended
        bool has_begun;                 // or waits for the copies before it alone
    };
    // The end of a job that is to be reported.
    struct End {
        std::int64_t id;
        bool cancelled;
        double time;
    };
    // A stream of copies in one direction, and the thread that waits for their ends.
    struct Line {
        explicit Line(std::shared_ptr<Device> device) : stream(std::move(device)) {}

        OwnedStream stream;
        std::list<Copy> copies;            // in the order of their ends; a list takes one over without memory
        std::size_t nbytes = 0;            // of these copies
        std::uint64_t moves = 0;           // that the stream has waited for
        double seconds_per_byte = 1e-10;   // of the latest copies
        double ended_at = 0;               // when the latest copy ended
        std::optional<PortError> trouble;  // why the end of the oldest copy is not known
        std::condition_variable wake;
        std::thread thread;
        bool left = false;  // the thread uses the queue no more
    };

    Line& line_of(Direction direction, bool urgent) {
        return lines_[2 * (urgent ? 1U : 0U) + static_cast<unsigned>(direction)];
    }
    Line& line_of(const Job& job);
    void add(Submission& submission);
    void link(std::unique_ptr<Job> made, std::span<const std::int64_t> after);
    void start_thread(std::thread& thread, bool& left, const char* name, std::function<void()> body);
    void require_not_released() const;
    template <typename Work>
    void guard(const char* what, Work work);
    template <typename Work>
    static std::optional<PortError> error_of(Work work);
    void note_broken(const char* what) noexcept;
    std::vector<std::thread*> threads();
    void wake_launcher() { tiers_->nudge(); }
    void run();
    void retire();
    bool note_tier_ends();
    bool advance(std::unique_lock<std::mutex>& lock);
    bool advance(std::unique_lock<std::mutex>& lock, Job& job);
    bool advance_between(std::unique_lock<std::mutex>& lock, Chunk& chunk);
    bool take_staging(Chunk& chunk);
    void submit_tier_leg(Chunk& chunk);
    bool may_copy(const Job& job);
    bool urgent_copy_runs(Direction direction);
    void copy(std::unique_lock<std::mutex>& lock, Chunk& chunk);
    void queue_copies(const Chunk& chunk, Stream stream);
    void watch(Line& line);
    void end_copy(Line& line, double start, double end);
    void end_chunk(Chunk& chunk);
    void complete(Job& job, bool cancelled);
    void drop_all();
    bool give_back(double deadline);

    std::shared_ptr<Device> device_;
    Config config_;
    PageLocks* locks_;
    Staging staging_;
    EventPool events_;
    std::array<Line, 4> lines_;  // by urgency, and then by Direction
    Moves moves_;
    DeviceClock clock_;
    ProgramOrder order_;

    std::shared_ptr<QueueCore> tiers_;  // the legs between tiers and staging memory
    std::unordered_map<std::int64_t, std::unique_ptr<Job>> jobs_;
    std::vector<End> ends_;      // scratch memory of `complete`
    std::size_t links_ = 0;      // at least as many as pending jobs have dependents
    std::set<Job*, Rank> open_;  // jobs with legs to start
    std::unordered_map<std::int64_t, Chunk*> at_tier_;
    std::int64_t tier_legs_ = 0;
    std::uint64_t submitted_ = 0;
    std::thread launcher_;
    bool launcher_left_ = false;
    bool thread_failed_ = false;  // so that we do not know what it has left undone
    std::mutex ending_;           // held by the call that gives back what the queue has taken
    std::atomic<bool> released_ = false;
    std::atomic<bool> broken_ = false;
    std::optional<PortError> broken_by_;
};

// The error that keeps the work from being done: the device refuses it, or the host has no memory for it. Other errors pass.
template <typename Work>
std::optional<PortError> DeviceQueue::error_of(Work work) {
    try {
        work();
        return std::nullopt;
    } catch (const PortFailure&) {
        return handled_error("cuda");
    } catch (const std::bad_alloc&) {
        return handled_error("cuda");
    }
}

}  // namespace farpool::device
