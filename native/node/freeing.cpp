#include "node/freeing.hpp"

#include <system_error>
#include <utility>

#include "core/signals_blocked.hpp"

namespace farpool {

Freeing::~Freeing() { finish(); }

void Freeing::release(std::shared_ptr<const void> memory) {
    {
        const std::lock_guard lock(mutex_);
        if (!thread_.joinable()) {
            const SignalsBlocked blocked;
            try {
                closing_ = false;
                thread_ = std::thread([this] { work(); });
            } catch (const std::system_error&) {
                return;
            }
        }
        waiting_.push_back(std::move(memory));
    }
    ready_.notify_one();
}

void Freeing::finish() {
    std::thread ending;
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
        ending = std::move(thread_);
    }
    ready_.notify_one();
    if (ending.joinable()) {
        ending.join();
    }
}

void Freeing::work() {
    std::unique_lock lock(mutex_);
    for (;;) {
        ready_.wait(lock, [this] { return closing_ || !waiting_.empty(); });
        if (waiting_.empty()) {
            return;
        }
        auto memory = std::exchange(waiting_, {});
        lock.unlock();
        memory.clear();
        lock.lock();
    }
}

}  // namespace farpool
