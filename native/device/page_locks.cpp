#include "device/page_locks.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <limits>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>

#include "core/error.hpp"
#include "core/signals_blocked.hpp"
#include "device/locked_memory.hpp"

namespace farpool::device {

namespace {

constexpr double leaving_seconds = 1.0;
constexpr double seconds_max = 1e9;  // more would overflow the clock

std::atomic<std::size_t> locked_by_all = 0;

// Counts bytes that are about to be locked; false, and nothing is counted, if there would then be more than `most`.
bool count(std::size_t nbytes, std::size_t most) noexcept {
    std::size_t before = locked_by_all.load();
    do {
        if (before > most || nbytes > most - before) {
            return false;
        }
    } while (!locked_by_all.compare_exchange_weak(before, before + nbytes));
    return true;
}

std::size_t page() noexcept { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

// Runs a call of the device, and returns why it was refused.
template <typename Call>
std::optional<std::string> refusal_of(Call call) {
    try {
        call();
        return std::nullopt;
    } catch (const std::exception& error) {
        const std::string why = error.what();
        return why.empty() ? "the device gives no reason" : why;
    }
}

struct Space {
    Port* port;
    std::uintptr_t address;
    std::size_t nbytes;
    std::string name;
    std::size_t wanted = 0;
    std::size_t locked = 0;
    std::string refused = {};
};

}  // namespace

class PageLocks::Worker {
public:
    Worker(std::shared_ptr<Device> device, std::size_t chunk, std::size_t most)
        : device_(std::move(device)), chunk_(chunk), most_(most) {}

    void add(Space space);
    bool parts(Port* port, std::uint64_t offset, std::size_t nbytes, std::vector<HostPart>& parts);
    bool close(double seconds) { return !ours() || end(seconds, true); }
    // Ends the thread without unlocking anything; false if it does not end soon.
    bool leave() { return ours() && end(leaving_seconds, false); }
    std::vector<SpaceLocks> totals();

private:
    using Lock = std::unique_lock<std::mutex>;

    // False in a forked child, where the thread does not exist and the mutex may never be released.
    bool ours() const noexcept { return getpid() == owner_; }
    bool end(double seconds, bool unlock);
    void run();
    Space* next();
    std::optional<std::string> lock_chunk(std::uintptr_t address, std::size_t nbytes);
    void unlock_all(Lock lock);

    const pid_t owner_ = getpid();
    const std::shared_ptr<Device> device_;
    const std::size_t chunk_;
    const std::size_t most_;
    std::mutex mutex_;  // never held during a call of the device
    std::condition_variable changed_;
    std::deque<Space> spaces_;  // never moved, because the thread keeps a reference without the mutex
    std::thread thread_;
    bool closing_ = false;    // the thread is to lock nothing more
    bool stopped_ = true;     // it locks nothing more, or there is none
    bool leaving_ = false;    // it is to end
    bool unlocking_ = false;  // and to unlock everything before
    std::mutex ending_;       // held by the call that ends the thread
};

void PageLocks::Worker::add(Space space) {
    if (!ours()) {
        return;
    }
    const Lock lock(mutex_);
    if (closing_) {
        fail_closed(space.name + ": its memory cannot be page-locked, because the page locks were closed");
    }
    if (std::ranges::any_of(spaces_, [&](const Space& known) { return known.port == space.port; })) {
        fail_value(space.name + ": its port was added to the page locks before; add each port once");
    }
    spaces_.push_back(std::move(space));
    if (thread_.joinable()) {
        return;
    }
    try {
        const SignalsBlocked blocked;
        thread_ = std::thread([this] { run(); });
    } catch (...) {
        spaces_.pop_back();
        throw;
    }
    stopped_ = false;
    pthread_setname_np(thread_.native_handle(), "farpool-locks");
}

bool PageLocks::Worker::parts(Port* port, std::uint64_t offset, std::size_t nbytes, std::vector<HostPart>& parts) {
    if (!ours()) {
        return false;
    }
    const Lock lock(mutex_);
    const auto space = std::ranges::find(spaces_, port, &Space::port);
    if (space == spaces_.end()) {
        return false;
    }
    if (offset > space->nbytes || nbytes > space->nbytes - offset) {
        fail_value(space->name + ": " + std::to_string(nbytes) + " bytes at offset " + std::to_string(offset) +
                   " do not lie in its " + std::to_string(space->nbytes) + " bytes");
    }
    const std::uint64_t stop = offset + nbytes;
    if (stop > space->locked) {
        if (stop > space->wanted && space->refused.empty() && !closing_) {
            space->wanted = stop;
            changed_.notify_all();
        }
        return false;
    }
    while (offset < stop) {
        const std::uint64_t end = std::min<std::uint64_t>(stop, (offset / chunk_ + 1) * chunk_);
        parts.push_back({space->address + offset, end - offset});
        offset = end;
    }
    return true;
}

bool PageLocks::Worker::end(double seconds, bool unlock) {
    const std::lock_guard one_at_a_time(ending_);
    {
        Lock lock(mutex_);
        closing_ = true;
        changed_.notify_all();
        const std::chrono::duration<double> most(seconds > 0 ? std::min(seconds, seconds_max) : 0.0);
        const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration_cast<std::chrono::nanoseconds>(most);
        if (!changed_.wait_until(lock, deadline, [&] { return stopped_; })) {
            return false;
        }
        leaving_ = true;
        unlocking_ = unlock;
        changed_.notify_all();
    }
    if (thread_.joinable()) {
        thread_.join();
    }
    return true;
}

std::vector<SpaceLocks> PageLocks::Worker::totals() {
    std::vector<SpaceLocks> totals;
    if (!ours()) {
        return totals;
    }
    const Lock lock(mutex_);
    for (const Space& space : spaces_) {
        totals.push_back({space.name, space.nbytes, space.locked, space.refused});
    }
    return totals;
}

void PageLocks::Worker::run() {
    const std::optional<std::string> not_entered = refusal_of([&] { device_->enter(); });
    Lock lock(mutex_);
    for (;;) {
        Space* space = nullptr;
        changed_.wait(lock, [&] { return closing_ || (space = next()) != nullptr; });
        if (closing_) {
            break;
        }
        const std::size_t nbytes = std::min(chunk_, space->nbytes - space->locked);
        const std::uintptr_t address = space->address + space->locked;
        lock.unlock();
        std::optional<std::string> refusal = not_entered ? not_entered : lock_chunk(address, nbytes);
        lock.lock();
        if (refusal) {
            space->refused = std::move(*refusal);
        } else {
            space->locked += nbytes;  // from now on, copies may use the chunk directly
        }
    }
    stopped_ = true;
    changed_.notify_all();
    changed_.wait(lock, [&] { return leaving_; });
    if (unlocking_) {
        unlock_all(std::move(lock));
    }
}

Space* PageLocks::Worker::next() {
    const auto space =
        std::ranges::find_if(spaces_, [](const Space& one) { return one.locked < one.wanted && one.refused.empty(); });
    return space == spaces_.end() ? nullptr : &*space;
}

std::optional<std::string> PageLocks::Worker::lock_chunk(std::uintptr_t address, std::size_t nbytes) {
    if (!count(nbytes, most_)) {
        return "tiers of this process may page-lock at most " + std::to_string(most_) +
               " bytes in all, a share of the host memory that was available when the pool was opened: free host memory "
               "before that, or use smaller tiers";
    }
    void* const memory = reinterpret_cast<void*>(address);
    std::optional<std::string> refusal = refusal_of([&] { lock_memory(*device_, memory, nbytes); });
    if (refusal) {
        locked_by_all -= nbytes;
    }
    return refusal;
}

void PageLocks::Worker::unlock_all(Lock lock) {
    std::vector<HostPart> chunks;
    for (Space& space : spaces_) {
        for (std::size_t start = 0; start < space.locked; start += chunk_) {
            chunks.push_back({space.address + start, std::min(chunk_, space.locked - start)});
        }
        space.locked = 0;  // before the first chunk is unlocked, because `parts` looks here
    }
    lock.unlock();
    for (const HostPart& chunk : chunks) {
        void* const memory = reinterpret_cast<void*>(chunk.address);
        unlock_memory(*device_, memory, chunk.nbytes);
        locked_by_all -= chunk.nbytes;
    }
}

PageLocks::PageLocks(std::shared_ptr<Device> device, std::size_t chunk, std::size_t most) {
    if (device == nullptr) {
        fail_value("PageLocks: there is no device to lock pages for; give one");
    }
    if (chunk == 0 || chunk % page() != 0) {
        fail_value("PageLocks: chunk is " + std::to_string(chunk) + " bytes, expected a multiple of the page size, " +
                   std::to_string(page()) + " bytes");
    }
    worker_ = std::make_unique<Worker>(std::move(device), chunk, most);
}

PageLocks::~PageLocks() {
    if (!worker_->leave()) {
        // Its thread still uses it, or it is the parent's.
        (void)worker_.release();
    }
}

void PageLocks::add(Port* port, std::uintptr_t address, std::size_t nbytes, std::string name) {
    if (port == nullptr) {
        fail_value(name + ": page locks need the port of its memory, got none");
    }
    if (address % page() != 0) {
        fail_value(name + ": its memory at address " + std::to_string(address) +
                   " does not begin at a page boundary, so it cannot be page-locked; map it at a multiple of " +
                   std::to_string(page()) + " bytes");
    }
    if (nbytes == 0 || nbytes > std::numeric_limits<std::uintptr_t>::max() - address) {
        fail_value(name + ": " + std::to_string(nbytes) + " bytes at address " + std::to_string(address) +
                   " are no range of memory that could be page-locked");
    }
    worker_->add({.port = port, .address = address, .nbytes = nbytes, .name = std::move(name)});
}

bool PageLocks::parts(Port* port, std::uint64_t offset, std::size_t nbytes, std::vector<HostPart>& parts) {
    return worker_->parts(port, offset, nbytes, parts);
}

bool PageLocks::close(double seconds) { return worker_->close(seconds); }

std::vector<SpaceLocks> PageLocks::totals() const { return worker_->totals(); }

std::size_t PageLocks::locked_in_process() noexcept { return locked_by_all; }

}  // namespace farpool::device
