#include "core/helped.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <cstdint>
#include <new>
#include <system_error>
#include <thread>

#include "core/relax.hpp"
#include "core/signals_blocked.hpp"

namespace farpool {

namespace {

bool has_second_core() noexcept {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) > 1;
}

}  // namespace

// The other thread, one for a process. It holds no resource of the process, so it may be asleep when the process ends; for this
// reason it must never be destroyed.
class HelperThread {
public:
    // The process's thread, null if there is none yet. A forked child starts one of its own.
    static HelperThread* of_this_process() noexcept {
        HelperThread* known = current_.load(std::memory_order_acquire);
        if (known != nullptr && known->owner_ == getpid()) {
            return known->runs_ ? known : nullptr;
        }
        auto* made = new (std::nothrow) HelperThread;
        if (made == nullptr) {
            return nullptr;
        }
        if (!current_.compare_exchange_strong(known, made)) {
            delete made;  // another thread was faster
            return nullptr;
        }
        made->start();
        return nullptr;  // the new thread takes the next work
    }

    bool offer(Helped* work) noexcept {
        Helped* none = nullptr;
        if (!offered_.compare_exchange_strong(none, work)) {
            return false;
        }
        bell_.fetch_add(1);
        bell_.notify_one();
        return true;
    }

    // Withdraws an offer; true if the thread had not taken it.
    bool take_back(Helped* work) noexcept { return offered_.compare_exchange_strong(work, nullptr); }

private:
    void start() noexcept {
        if (!has_second_core()) {
            return;
        }
        const SignalsBlocked blocked;
        try {
            std::thread thread([this] { run(); });
            pthread_setname_np(thread.native_handle(), "farpool-helper");
            thread.detach();
            runs_ = true;
        } catch (const std::system_error&) {  // the system allows no more threads
        }
    }

    [[noreturn]] void run() noexcept {
        for (;;) {
            const std::uint32_t rung = bell_.load();
            if (Helped* work = offered_.exchange(nullptr)) {
                work->work_(work->self_);
                work->left_.store(true, std::memory_order_release);  // from this line on the caller may destroy the work
            } else {
                bell_.wait(rung);
            }
        }
    }

    static std::atomic<HelperThread*> current_;

    const pid_t owner_ = getpid();
    std::atomic<bool> runs_ = false;
    std::atomic<Helped*> offered_ = nullptr;
    std::atomic<std::uint32_t> bell_ = 0;
};

std::atomic<HelperThread*> HelperThread::current_ = nullptr;

bool Helped::offer() noexcept {
    HelperThread* const helper = HelperThread::of_this_process();
    helper_ = helper != nullptr && helper->offer(this) ? helper : nullptr;
    return helper_ != nullptr;
}

void Helped::end() noexcept {
    if (helper_ != nullptr && !helper_->take_back(this)) {
        for (unsigned attempt = 1; !left_.load(std::memory_order_acquire); ++attempt) {
            relax(attempt);
        }
    }
    helper_ = nullptr;
}

}  // namespace farpool
