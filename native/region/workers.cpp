#include "region/workers.hpp"

#include <pthread.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "core/signals_blocked.hpp"

namespace farpool::region {

namespace {

// A lower rank is more urgent.
std::size_t rank(Job::Kind kind) { return kind == Job::Kind::demand ? 0 : kind == Job::Kind::save ? 2 : 1; }

}  // namespace

Staging::Staging(std::size_t nbytes) : data_(static_cast<std::byte*>(std::aligned_alloc(page_nbytes, nbytes))) {
    if (data_ == nullptr) {
        throw std::bad_alloc();
    }
}

void Staging::Free::operator()(std::byte* data) const noexcept { std::free(data); }

Workers::Workers(unsigned count, std::size_t nbytes, std::function<void(const Job&, std::byte*)> run)
    : nbytes_(nbytes), run_(std::move(run)) {
    const SignalsBlocked blocked;
    try {
        for (unsigned index = 0; index < count; ++index) {
            threads_.emplace_back([this] { work(); });
            pthread_setname_np(threads_.back().native_handle(), "farpool-page-io");
        }
    } catch (...) {
        close();
        throw;
    }
}

void Workers::add(Job job) {
    {
        const std::lock_guard lock(mutex_);
        jobs_[rank(job.kind)].push_back(std::move(job));
    }
    wake_.notify_one();
}

void Workers::close() noexcept {
    {
        const std::lock_guard lock(mutex_);
        closing_ = true;
    }
    wake_.notify_all();
    for (std::thread& thread : threads_) {
        if (thread.joinable()) {
            thread.join();
        }
    }
}

void Workers::work() {
    const Staging staging(nbytes_);
    const auto waiting = [this] { return std::ranges::find_if(jobs_, [](const auto& jobs) { return !jobs.empty(); }); };
    std::unique_lock lock(mutex_);
    for (;;) {
        wake_.wait(lock, [&] { return closing_ || waiting() != jobs_.end(); });
        if (closing_) {
            return;
        }
        std::deque<Job>& jobs = *waiting();
        const Job job = std::move(jobs.front());
        jobs.pop_front();
        lock.unlock();
        run_(job, staging.data());
        lock.lock();
    }
}

}  // namespace farpool::region
