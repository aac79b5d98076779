// The driver: a pager, the queue that runs its transfers, and one lock around them, without an interpreter.
//
// A thread asks for byte ranges and receives their places, at once or when transfers have ended. The thread that holds the lock
// reports ended transfers to the pager; the queue's threads only leave their results. So a thread waits in one place for the
// end of a transfer, a release by another thread and a change made from outside (`nudge`).
//
// A thread that holds an interpreter's lock never waits for the driver's lock (the caller's `Pause` releases the interpreter
// first), so a thread may call into the interpreter while it holds the driver's lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "core/transfer_queue.hpp"
#include "pager/device_times.hpp"
#include "pager/pager.hpp"
#include "pager/uses.hpp"

namespace farpool::pager {

// The end of a transfer that moved bytes.
struct Ended {
    std::shared_ptr<const Transfer> transfer;
    double start;
    double end;
    std::int64_t used;  // bytes of the arena that blocks owned then
};

struct LinkTotal {
    std::int64_t transfers = 0;
    std::int64_t nbytes = 0;
    double seconds = 0.0;
};

// Releases an interpreter's lock, if the thread holds one, while the thread blocks.
class Pause {
public:
    virtual ~Pause() = default;
    // Runs `block`, which may take long, without the interpreter lock.
    virtual void run(const std::function<void()>& block) { block(); }
    // True if a signal has arrived and the thread must stop waiting.
    virtual bool interrupted() { return false; }
};

// Follows a driver in debug mode. All calls come under the driver's lock and may throw; the driver goes on working then.
class Observer {
public:
    virtual ~Observer() = default;
    // Before commands are started. If it throws, none of them is started: the transfers fail, and moved blocks lose their
    // bytes.
    virtual void starting(std::span<const Command> commands) = 0;
    // The move at `index` of the commands last passed to `starting` has been made.
    virtual void moved(std::size_t index) = 0;
    // A transfer has ended, and the pager does not know it yet. `failed`: it failed or was cancelled.
    virtual void ended(TransferId transfer, bool failed) = 0;
    // An access is being released, and the pager does not know it yet.
    virtual void released(const Access& access) = 0;
    // A release is complete: throws the first error found so far, if there is one.
    virtual void raise_findings() = 0;
};

enum class Wait { granted, refused, timed_out, closed, interrupted };

class Driver {
public:
    // Takes (`take` true) or releases a reference to the owner of a port, which must outlive the transfers under way.
    using Keep = void (*)(PyObject* owner, bool take);
    // `observer`: null without debug mode.
    Driver(std::shared_ptr<Pager> pager, std::shared_ptr<TransferQueue> queue, std::uintptr_t arena, Keep keep = nullptr,
           Observer* observer = nullptr)
        : pager_(std::move(pager)), queue_(std::move(queue)), arena_(arena), keep_(keep), observer_(observer) {}
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;

    // ---- under the lock ----

    // Takes the lock; `pause` releases the interpreter if another thread has it. `unlock` is for callers that release() the
    // result.
    std::unique_lock<std::mutex> lock(Pause& pause);
    void unlock() { mutex_.unlock(); }
    Pager& pager() noexcept { return *pager_; }
    // Adds the native port of the next tier or source.
    void add_port(Port* port, PyObject* owner = nullptr) { ports_.emplace_back(port, owner); }
    // Submits the pager's commands to the queue. `waits`: the caller goes on to `await` or `abandon`.
    void start(bool waits = false);
    // Copies bytes inside the arena, after all uses so far. An access holds both ranges.
    void move(std::int64_t source, std::int64_t target, std::int64_t nbytes);
    // Reports ended transfers to the pager and starts the next commands; false if none has ended.
    bool note_ends();
    // Requests the ranges of one operation, which will be queued on this stream, and starts their transfers. Throws Refused if
    // they do not fit together, and PortFailure if the stream cannot have an access now or the queue is broken.
    std::shared_ptr<Access> request(std::vector<Run> runs, ProgramStream stream = 0);
    // Waits with the lock released until a transfer has ended or `nudge` was called, at most `seconds`; throws nothing.
    void wait(double seconds, Pause& pause);
    // Waits with the lock released until an access is granted or refused, at most until `deadline` on the monotonic clock.
    // Throws if the queue is broken; the access must then be abandoned.
    Wait await(std::unique_lock<std::mutex>& lock, Access& access, double deadline, Pause& pause);
    // The block that an access waits for, and the tier at the other end; -1 if it waits for other threads.
    std::pair<BlockId, std::int32_t> awaited(const Access& access) const;
    // Runs debug mode's `check` of an access that has just been granted. If it throws, the access is given up.
    void check_grant(const std::shared_ptr<Access>& access, const std::function<void()>& check);
    void release(Access& access);
    void abandon(const std::shared_ptr<Access>& access);
    void close();
    bool closed() const noexcept { return closed_; }

    // ---- from anywhere ----

    // Wakes waiting threads, so that they check again.
    void nudge() { queue_->nudge(); }

    // Closes the driver in the child of a fork, where the thread that may have held the lock does not exist.
    void forget_parent();

    // ---- the account, under the lock ----

    // Totals of the transfers so far, by tier and direction.
    const std::map<std::pair<std::int32_t, Kind>, LinkTotal>& links() const noexcept { return links_; }
    // Turns on or off the records for `take_ended` and `take_ran`.
    void listen(bool wanted) { listening_ = wanted; }
    std::vector<Ended> take_ended() { return std::exchange(ended_, {}); }
    // When a device computed for accesses, as far as it has told since the last call.
    std::vector<Ran> take_ran() {
        queue_->look();
        note_ran();
        return std::exchange(ran_, {});
    }
    // What a device did so far; all 0 on the host.
    const DeviceTimes& device_times() {
        queue_->look();
        note_ran();
        return device_times_;
    }
    std::int64_t peak() const noexcept { return peak_; }
    std::int64_t granted() const noexcept { return granted_; }

private:
    void check_queue() const;
    void announce();
    void count_towards_ran(int releases);
    void note_ran();
    void add(const Transfer& transfer);
    void submit(bool waits);
    void account(const std::shared_ptr<const Transfer>& transfer, double start, double end);
    void grant(Access& access);

    std::mutex mutex_;
    std::shared_ptr<Pager> pager_;
    std::shared_ptr<TransferQueue> queue_;
    std::uintptr_t arena_;
    Keep keep_;
    Observer* observer_;
    std::vector<std::pair<Port*, PyObject*>> ports_;  // with the owner of each
    std::map<std::pair<std::int32_t, Kind>, LinkTotal> links_;
    std::vector<Ended> ended_;
    std::vector<Ran> ran_;
    DeviceTimes device_times_;
    int since_ran_ = 0;  // releases since the latest `note_ran`
    // Scratch vectors of `start`, kept to reuse their memory.
    std::vector<Command> commands_;
    std::vector<farpool::Piece> pieces_;
    std::vector<Submission> batch_;
    bool left_ = false;  // small copies were not started, because a thread that is about to wait makes them
    std::int64_t peak_ = 0;
    std::int64_t granted_ = 0;  // accesses that have not been released
    int waiting_ = 0;           // threads in `wait`, not in `await`
    bool listening_ = false;
    bool closed_ = false;
};

}  // namespace farpool::pager
