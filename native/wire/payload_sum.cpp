#include "wire/payload_sum.hpp"

#include <pthread.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <new>
#include <system_error>
#include <thread>

#include "core/crc32c.hpp"
#include "core/relax.hpp"
#include "core/signals_blocked.hpp"

namespace farpool {

namespace {

// Between two of these the other thread looks whether it is still wanted, so a caller waits for one of them at most.
constexpr std::size_t step_nbytes = std::size_t{64} << 10;

bool has_second_core() noexcept {
    cpu_set_t cores;
    return sched_getaffinity(0, sizeof cores, &cores) == 0 && CPU_COUNT(&cores) > 1;
}

}  // namespace

// The other thread, one for a process. It takes one payload at a time; whoever finds it busy does without it. It asks for
// nothing of the process, so it may be asleep when the process ends; for that it must never be destroyed.
class Summer {
public:
    // The process's thread, null if there is none yet. A forked child starts one of its own.
    static Summer* of_this_process() noexcept {
        Summer* known = current_.load(std::memory_order_acquire);
        if (known != nullptr && known->owner_ == getpid()) {
            return known->runs_ ? known : nullptr;
        }
        auto* made = new (std::nothrow) Summer;
        if (made == nullptr) {
            return nullptr;
        }
        if (!current_.compare_exchange_strong(known, made)) {
            delete made;  // another thread was faster
            return nullptr;
        }
        made->start();
        return nullptr;  // from the next payload on
    }

    bool offer(PayloadSum* sum) noexcept {
        PayloadSum* none = nullptr;
        if (!offered_.compare_exchange_strong(none, sum)) {
            return false;
        }
        bell_.fetch_add(1);
        bell_.notify_one();
        return true;
    }

    // Withdraws an offer; true if the thread had not taken it.
    bool take_back(PayloadSum* sum) noexcept { return offered_.compare_exchange_strong(sum, nullptr); }

private:
    void start() noexcept {
        if (!has_second_core()) {
            return;
        }
        const SignalsBlocked blocked;
        try {
            std::thread thread([this] { run(); });
            pthread_setname_np(thread.native_handle(), "farpool-sum");
            thread.detach();
            runs_ = true;
        } catch (const std::system_error&) {  // no more threads may be started
        }
    }

    [[noreturn]] void run() noexcept {
        for (;;) {
            const std::uint32_t rung = bell_.load();
            if (PayloadSum* sum = offered_.exchange(nullptr)) {
                sum->work();
            } else {
                bell_.wait(rung);
            }
        }
    }

    static std::atomic<Summer*> current_;

    const pid_t owner_ = getpid();
    std::atomic<bool> runs_ = false;
    std::atomic<PayloadSum*> offered_ = nullptr;
    std::atomic<std::uint32_t> bell_ = 0;
};

std::atomic<Summer*> Summer::current_ = nullptr;

PayloadSum::PayloadSum(Parts parts, std::size_t nbytes, bool helped) noexcept
    : parts_(parts), data_(parts.size() == 1 ? static_cast<const std::byte*>(parts[0].iov_base) : nullptr), nbytes_(nbytes) {
    if (helped && nbytes >= worth_it && data_ != nullptr) {
        Summer* const summer = Summer::of_this_process();
        summer_ = summer != nullptr && summer->offer(this) ? summer : nullptr;
    }
}

PayloadSum::~PayloadSum() { part(); }

std::uint32_t PayloadSum::finish() noexcept {
    part();
    if (data_ != nullptr) {
        crc_ = crc32c(data_ + done_, nbytes_ - done_, crc_);
    } else if (done_ < nbytes_) {
        for (const iovec& part : parts_) {
            crc_ = crc32c(part.iov_base, part.iov_len, crc_);
        }
    }
    done_ = nbytes_;
    return crc_;
}

bool PayloadSum::go_on() noexcept {
    if (summer_ != nullptr || data_ == nullptr || done_ == nbytes_) {
        return false;
    }
    const std::size_t step = std::min(step_nbytes, nbytes_ - done_);
    crc_ = crc32c(data_ + done_, step, crc_);
    done_ += step;
    return true;
}

// Waits until the other thread no longer looks at the payload.
void PayloadSum::part() noexcept {
    if (summer_ == nullptr || summer_->take_back(this)) {
        summer_ = nullptr;
        return;
    }
    enough_.store(true, std::memory_order_relaxed);
    for (unsigned attempt = 1; !left_.load(std::memory_order_acquire); ++attempt) {
        relax(attempt);
    }
    summer_ = nullptr;
}

void PayloadSum::work() noexcept {
    while (done_ < nbytes_ && !enough_.load(std::memory_order_relaxed)) {
        const std::size_t step = std::min(step_nbytes, nbytes_ - done_);
        crc_ = crc32c(data_ + done_, step, crc_);
        done_ += step;
    }
    left_.store(true, std::memory_order_release);  // from here on it may be gone
}

}  // namespace farpool
