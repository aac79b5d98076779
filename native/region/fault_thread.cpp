#include "region/fault_thread.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <optional>
#include <utility>

#include "core/clock.hpp"
#include "core/relax.hpp"
#include "core/signals_blocked.hpp"

namespace farpool::region {

namespace {

constexpr double spin_seconds = 50e-6;  // waking a sleeping thread costs about this much
constexpr double retry_seconds = 0.05;  // between attempts to save pages that a tier has refused

}  // namespace

FaultThread::FaultThread(Parts& parts, Transfers& transfers) : parts_(parts), transfers_(transfers), incoming_(page_nbytes) {
    const SignalsBlocked blocked;
    thread_ = std::thread([this] { listen(); });
    pthread_setname_np(thread_.native_handle(), "farpool-faults");
}

void FaultThread::close() noexcept {
    closing_ = true;
    parts_.nudge();
    if (thread_.joinable()) {
        thread_.join();
    }
}

void FaultThread::listen() {
    std::array<Fault, 16> faults;
    double spin_until = 0;
    for (unsigned attempt = 1; !closing_;) {
        const std::span<Fault> taken = parts_.userfault.take(faults);
        if (!taken.empty()) {
            Lock lock(parts_.mutex);
            for (const Fault& fault : taken) {
                answer(fault, lock);
            }
            spin_until = monotonic_seconds() + spin_seconds;
            attempt = 1;
            continue;
        }
        std::uint64_t nudges = 0;
        const bool is_nudged = read(parts_.nudged, &nudges, sizeof nudges) > 0;
        if (parts_.parks && (is_nudged || monotonic_seconds() >= next_retry_)) {
            Lock lock(parts_.mutex);
            retry_parked(lock);
        }
        if (monotonic_seconds() < spin_until) {
            for (int pause = 0; pause < 8; ++pause) {
                relax(attempt++);
            }
        } else if (!closing_) {
            parts_.userfault.wait(parts_.nudged, parts_.parks ? static_cast<int>(retry_seconds * 1000) : -1);
        }
    }
}

void FaultThread::answer(const Fault& fault, Lock& lock) {
    ++parts_.counters.faults;
    const Page page = parts_.mapping.page_of(fault.address);
    if (page >= parts_.pages.pages()) {
        parts_.userfault.wake(parts_.mapping.at(page), page_nbytes);  // the region has become smaller since
        return;
    }
    try {
        serve(page, fault, lock);
    } catch (const PortFailure& failure) {
        transfers_.lose(page, failure.error());
    }
}

void FaultThread::serve(Page page, const Fault& fault, Lock& lock) {
    switch (parts_.pages.state(page)) {
        case State::loading:
            return;  // the end of the load wakes all threads
        case State::mapped:
            answer_mapped(page, fault);
            return;
        case State::resting:
            use(page, fault);
            return;
        case State::ahead:
            use_ahead(page, fault);
            return;
        case State::absent:
            break;
    }
    if (parts_.pages.is_lost(page)) {
        parts_.userfault.poison(parts_.mapping.at(page));
    } else if (transfers_.make_room(1, true) == 0) {
        ++parts_.counters.waits_for_room;
        parked_.push_back({fault, monotonic_seconds()});
        parts_.parks = true;
    } else {
        demand(page, fault, lock);
    }
}

void FaultThread::demand(Page page, const Fault& fault, Lock& lock) {
    const bool fresh = !parts_.pages.is_stored(page);
    ++parts_.counters.demand_pages;
    if (!fresh && !parts_.lower.copies(page)) {
        transfers_.demand(page, fault.write);
        look_ahead(fault.thread, page, 1);
        return;
    }
    const std::byte* bytes = fresh ? parts_.zeros.data() : parts_.lower.address(page, 1);
    parts_.pages.begin_load(page);
    if (bytes == nullptr) {
        lock.unlock();
        std::optional<PortError> error;
        try {
            parts_.lower.read(page, 1, incoming_.data());
        } catch (const PortFailure& failure) {
            error = failure.error();
        }
        lock.lock();
        if (error) {
            throw PortFailure(*error);
        }
        bytes = incoming_.data();
    }
    parts_.counters.read_bytes += fresh ? 0 : page_nbytes;
    parts_.userfault.copy(parts_.mapping.at(page), bytes, page_nbytes, !fault.write);
    parts_.pages.end_load(page, State::mapped);
    if (fault.write) {
        parts_.pages.set_dirty(page);
    }
    parts_.changed.notify_all();
    look_ahead(fault.thread, page, 1);
}

void FaultThread::use_ahead(Page page, const Fault& fault) {
    Page count = 0;
    do {
        parts_.pages.map(page + count);
        if (fault.write) {
            parts_.pages.set_dirty(page + count);
        }
        ++count;
    } while (page + count < parts_.pages.pages() && parts_.pages.state(page + count) == State::ahead &&
             !parts_.pages.is_first(page + count));
    // The thread that waits for this page is woken last, when it finds all pages as it needs them.
    const Page seen = fault.kind == Fault::Kind::protected_ ? 0 : 1;
    if (fault.write && seen < count) {
        parts_.userfault.protect(parts_.mapping.at(page + seen), (count - seen) * page_nbytes, false);
    }
    if (seen == 1 && !parts_.userfault.map(parts_.mapping.at(page), page_nbytes, !fault.write)) {
        parts_.pages.set_dirty(page);
    }
    ++parts_.counters.reused;
    parts_.counters.ahead_used += count;
    parts_.streams.used(count);
    look_ahead(fault.thread, page, count, true);
}

void FaultThread::use(Page page, const Fault& fault) {
    const Page most = std::min(parts_.streams.expected(fault.thread, page), parts_.pages.pages() - page);
    Page count = 1;
    while (count < most && parts_.pages.state(page + count) == State::resting) {
        ++count;
    }
    const bool open = fault.write || (count == 1 && parts_.pages.is_dirty(page));
    for (Page one = page; one < page + count; ++one) {
        parts_.pages.map(one);
        if (fault.write) {
            parts_.pages.set_dirty(one);
        }
    }
    if (!parts_.userfault.map(parts_.mapping.at(page), count * page_nbytes, !open)) {
        for (Page one = page; one < page + count; ++one) {
            parts_.pages.set_dirty(one);
        }
    }
    ++parts_.counters.reused;
    if (most > 1) {
        look_ahead(fault.thread, page, count);
    }
}

void FaultThread::answer_mapped(Page page, const Fault& fault) {
    if (fault.kind == Fault::Kind::protected_) {
        ++parts_.counters.write_faults;
        const Page most = std::min(parts_.streams.note_write(fault.thread, page), parts_.pages.pages() - page);
        Page count = 0;
        do {
            parts_.pages.set_dirty(page + count);
            ++count;
        } while (count < most && parts_.pages.state(page + count) == State::mapped && !parts_.pages.is_dirty(page + count));
        parts_.userfault.protect(parts_.mapping.at(page), count * page_nbytes, false);
    } else if (fault.kind == Fault::Kind::unmapped) {
        // The program has given the mapping up (madvise), or the kernel has.
        const bool open = fault.write || parts_.pages.is_dirty(page);
        if (open) {
            parts_.pages.set_dirty(page);
        }
        if (!parts_.userfault.map(parts_.mapping.at(page), page_nbytes, !open)) {
            parts_.pages.set_dirty(page);
        }
    } else if (parts_.userfault.copy(parts_.mapping.at(page), parts_.zeros.data(), page_nbytes, false)) {
        // The program has removed the page itself (madvise with MADV_REMOVE). Otherwise, the page had come before this fault
        // was looked at, and the call has only woken the thread.
        parts_.pages.set_dirty(page);
    }
}

void FaultThread::retry_parked(Lock& lock) {
    if (monotonic_seconds() >= next_retry_) {
        transfers_.retry_saves();
        next_retry_ = monotonic_seconds() + retry_seconds;
    }
    for (const Parked& one : std::exchange(parked_, {})) {
        const Page page = parts_.mapping.page_of(one.fault.address);
        if (page < parts_.pages.pages() && parts_.pages.state(page) == State::absent && transfers_.make_room(1, true) == 0) {
            if (monotonic_seconds() < one.since + parts_.settings.timeout) {
                parked_.push_back(one);
            } else {
                transfers_.lose(page, transfers_.stuck());
            }
        } else {
            answer(one.fault, lock);
        }
    }
    parts_.parks = !parked_.empty();
}

void FaultThread::look_ahead(std::uint32_t thread, Page page, Page count, bool loaded) {
    const Advice advice = parts_.advices.at(page);
    if (advice == Advice::random) {
        return;
    }
    const Page most = parts_.pages.budget() / 8;  // unused pages must not fill the memory
    for (const Run& run : parts_.streams.note(thread, page, count, advice == Advice::sequential, loaded)) {
        Page first = run.first;
        const Page end =
            static_cast<Page>(std::min<std::uint64_t>(std::uint64_t{first} + std::min(run.count, most), parts_.pages.pages()));
        while (first < end && parts_.pages.state(first) != State::absent) {
            ++first;
        }
        if (first < end) {
            transfers_.load(first, end - first, Job::Kind::ahead, nullptr);
        }
    }
}

}  // namespace farpool::region
