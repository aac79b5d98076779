#include "region/region.hpp"

#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>

#include "core/clock.hpp"
#include "core/relax.hpp"
#include "core/signals_blocked.hpp"

namespace farpool::region {

namespace {

constexpr double spin_seconds = 50e-6;  // waking a sleeping thread costs about this much
constexpr double retry_seconds = 0.05;  // between attempts to save pages that a tier has refused
constexpr Page rest_at_once = 64;       // few enough that the fault that finds memory full does not wait long

// Calls `use(first, count)` for each stretch of consecutive pages among sorted ones.
template <typename Use>
void for_runs(const std::vector<Page>& pages, const Use& use) {
    for (std::size_t begin = 0; begin < pages.size();) {
        std::size_t end = begin + 1;
        while (end < pages.size() && pages[end] == pages[end - 1] + 1) {
            ++end;
        }
        use(pages[begin], static_cast<Page>(end - begin));
        begin = end;
    }
}

Settings checked(Settings settings) {
    if (sysconf(_SC_PAGESIZE) != static_cast<long>(page_nbytes)) {
        throw PortFailure({ErrorKind::unsupported,
                           "Region: this system has pages of " + std::to_string(sysconf(_SC_PAGESIZE)) +
                               " bytes; regions need pages of 4096 bytes",
                           {},
                           0,
                           {}});
    }
    return settings;
}

int new_event() {
    const int event = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    if (event < 0) {
        fail_tier("fast", "Region: the kernel makes no event: " + reason(errno), errno);
    }
    return event;
}

}  // namespace

Region::Region(Settings settings)
    : settings_(checked(std::move(settings))),
      owner_(getpid()),
      mapping_(settings_.most),
      zeros_(page_nbytes),
      incoming_(page_nbytes),
      nudged_(new_event()),
      pages_(settings_.budget, settings_.policy),
      streams_(settings_.longest) {
    std::memset(zeros_.data(), 0, page_nbytes);
    advices_[0] = Advice::normal;
    try {
        workers_.emplace(settings_.workers, settings_.longest * page_nbytes,
                         [this](const Job& job, std::byte* staging) { run(job, staging); });
        const SignalsBlocked blocked;
        listener_ = std::thread([this] { listen(); });
    } catch (...) {
        ::close(nudged_);
        throw;
    }
    pthread_setname_np(listener_.native_handle(), "farpool-faults");
}

Region::~Region() {
    close();
    ::close(nudged_);
}

void Region::close() noexcept {
    closing_ = true;
    nudge();
    if (listener_.joinable()) {
        listener_.join();
    }
    workers_->close();
}

bool Region::ours() const noexcept { return getpid() == owner_; }

Page Region::pages() const {
    const std::lock_guard lock(mutex_);
    return pages_.pages();
}

void Region::grow(Page pages, std::vector<Extent> extents) {
    const std::lock_guard size(size_);
    const std::lock_guard lock(mutex_);
    const Page before = pages_.pages();
    mapping_.grow(before, pages);
    try {
        userfault_.add(mapping_.at(before), (pages - before) * page_nbytes);
        pages_.resize(pages);
    } catch (...) {
        mapping_.shrink(pages, before);
        throw;
    }
    for (Extent& extent : extents) {
        lower_.append(std::move(extent));
    }
}

Page Region::shrink(Page pages) {
    const std::lock_guard size(size_);
    Lock lock(mutex_);
    const Page before = pages_.pages();
    const auto moves = [&] {
        for (Page page = pages; page < before; ++page) {
            if (pages_.state(page) == State::loading || pages_.is_saving(page)) {
                return true;
            }
        }
        return false;
    };
    changed_.wait(lock, [&] { return !moves(); });
    for (Page page = pages; page < before; ++page) {
        pages_.forget(page);
    }
    userfault_.remove(mapping_.at(pages), (before - pages) * page_nbytes);
    mapping_.shrink(before, pages);
    pages_.resize(pages);
    lower_.cut(pages);
    return lower_.pages();
}

// ---- the fault thread
// ----------------------------------------------------------------------------------------------------------

void Region::listen() {
    std::array<Fault, 16> faults;
    double spin_until = 0;
    for (unsigned attempt = 1; !closing_;) {
        const std::span<Fault> taken = userfault_.take(faults);
        if (!taken.empty()) {
            Lock lock(mutex_);
            for (const Fault& fault : taken) {
                answer(fault, lock);
            }
            spin_until = monotonic_seconds() + spin_seconds;
            attempt = 1;
            continue;
        }
        std::uint64_t nudges = 0;
        const bool is_nudged = read(nudged_, &nudges, sizeof nudges) > 0;
        if (parks_ && (is_nudged || monotonic_seconds() >= next_retry_)) {
            Lock lock(mutex_);
            retry_parked(lock);
        }
        if (monotonic_seconds() < spin_until) {
            for (int pause = 0; pause < 8; ++pause) {
                relax(attempt++);
            }
        } else if (!closing_) {
            userfault_.wait(nudged_, parks_ ? static_cast<int>(retry_seconds * 1000) : -1);
        }
    }
}

void Region::answer(const Fault& fault, Lock& lock) {
    ++counters_.faults;
    const Page page = mapping_.page_of(fault.address);
    if (page >= pages_.pages()) {
        userfault_.wake(mapping_.at(page), page_nbytes);  // the region has become smaller since
        return;
    }
    try {
        serve(page, fault, lock);
    } catch (const PortFailure& failure) {
        lose(page, failure.error());
    }
}

void Region::serve(Page page, const Fault& fault, Lock& lock) {
    switch (pages_.state(page)) {
        case State::loading:
            return;  // the end of the load wakes all threads
        case State::mapped:
            answer_mapped(page, fault);
            return;
        case State::resting:
            use(page, fault);
            return;
        case State::absent:
            break;
    }
    if (pages_.is_lost(page)) {
        userfault_.poison(mapping_.at(page));
    } else if (make_room(1) == 0) {
        ++counters_.waits_for_room;
        parked_.push_back({fault, monotonic_seconds()});
        parks_ = true;
    } else {
        demand(page, fault, lock);
    }
}

void Region::demand(Page page, const Fault& fault, Lock& lock) {
    const bool fresh = !pages_.is_stored(page);
    ++counters_.demand_pages;
    if (!fresh && !lower_.copies(page)) {
        pages_.begin_load(page);
        workers_->add({.kind = Job::Kind::demand, .first = page, .count = 1, .write = fault.write});
        look_ahead(fault.thread, page, 1);
        return;
    }
    pages_.begin_load(page);
    if (!fresh) {
        lock.unlock();
        std::optional<PortError> error;
        try {
            lower_.read(page, 1, incoming_.data());
        } catch (const PortFailure& failure) {
            error = failure.error();
        }
        lock.lock();
        if (error) {
            throw PortFailure(*error);
        }
        counters_.read_bytes += page_nbytes;
    }
    userfault_.copy(mapping_.at(page), fresh ? zeros_.data() : incoming_.data(), page_nbytes, !fault.write);
    pages_.end_load(page, true, false);
    if (fault.write) {
        pages_.set_dirty(page);
    }
    changed_.notify_all();
    look_ahead(fault.thread, page, 1);
}

// Maps a page that rests, and those behind it that the thread needs next.
void Region::use(Page page, const Fault& fault) {
    const bool ahead = pages_.is_ahead(page);
    const Page most = std::min(ahead ? settings_.longest : streams_.expected(fault.thread, page), pages_.pages() - page);
    Page count = 1;
    while (count < most && pages_.state(page + count) == State::resting && pages_.is_ahead(page + count) == ahead) {
        ++count;
    }
    const bool open = fault.write || (count == 1 && pages_.is_dirty(page));
    for (Page one = page; one < page + count; ++one) {
        pages_.map(one);
        if (fault.write) {
            pages_.set_dirty(one);
        }
    }
    if (!userfault_.map(mapping_.at(page), count * page_nbytes, !open)) {
        for (Page one = page; one < page + count; ++one) {
            pages_.set_dirty(one);
        }
    }
    ++counters_.reused;
    if (ahead) {
        counters_.ahead_used += count;
        streams_.used(count);
    }
    if (ahead || most > 1) {
        look_ahead(fault.thread, page, count);
    }
}

void Region::answer_mapped(Page page, const Fault& fault) {
    if (fault.kind == Fault::Kind::protected_) {
        ++counters_.write_faults;
        const Page most = std::min(streams_.note_write(fault.thread, page), pages_.pages() - page);
        Page count = 0;
        do {
            pages_.set_dirty(page + count);
            ++count;
        } while (count < most && pages_.state(page + count) == State::mapped && !pages_.is_dirty(page + count));
        userfault_.protect(mapping_.at(page), count * page_nbytes, false);
    } else if (fault.kind == Fault::Kind::unmapped) {
        // The program has given the mapping up (madvise), or the kernel has.
        const bool open = fault.write || pages_.is_dirty(page);
        if (open) {
            pages_.set_dirty(page);
        }
        if (!userfault_.map(mapping_.at(page), page_nbytes, !open)) {
            pages_.set_dirty(page);
        }
    } else if (userfault_.copy(mapping_.at(page), zeros_.data(), page_nbytes, false)) {
        // The program has removed the page itself (madvise with MADV_REMOVE). Otherwise, the page had come before this fault
        // was looked at, and the call has only woken the thread.
        pages_.set_dirty(page);
    }
}

void Region::retry_parked(Lock& lock) {
    retry_saves();
    next_retry_ = monotonic_seconds() + retry_seconds;
    for (const Parked& one : std::exchange(parked_, {})) {
        const Page page = mapping_.page_of(one.fault.address);
        if (page < pages_.pages() && pages_.state(page) == State::absent && make_room(1) == 0) {
            if (monotonic_seconds() < one.since + settings_.timeout) {
                parked_.push_back(one);
            } else {
                lose(page, failing_.value_or(PortError{ErrorKind::tier, "no page left memory in time", {}, 0, {}}));
            }
        } else {
            answer(one.fault, lock);
        }
    }
    parks_ = !parked_.empty();
}

void Region::look_ahead(std::uint32_t thread, Page page, Page count) {
    const Advice advice = advice_at(page);
    if (advice == Advice::random) {
        return;
    }
    const Page most = pages_.budget() / 8;  // unused pages must not fill the memory
    for (const Run& run : streams_.note(thread, page, count, advice == Advice::sequential)) {
        Page first = run.first;
        const Page end =
            static_cast<Page>(std::min<std::uint64_t>(std::uint64_t{first} + std::min(run.count, most), pages_.pages()));
        while (first < end && pages_.state(first) != State::absent) {
            ++first;
        }
        if (first < end) {
            load(first, end - first, Job::Kind::ahead, nullptr);
        }
    }
}

// ---- with the lock
// -------------------------------------------------------------------------------------------------------------

// Begins to load absent pages as far as they have the same source and there is room; the number of pages.
Page Region::load(Page first, Page count, Job::Kind kind, const std::shared_ptr<Ticket>& ticket) {
    const bool fresh = !pages_.is_stored(first);
    Page alike = 0;
    while (alike < count && pages_.state(first + alike) == State::absent && pages_.is_stored(first + alike) != fresh &&
           !pages_.is_lost(first + alike)) {
        ++alike;
    }
    alike = std::min(lower_.together(first, alike), settings_.longest);
    const Page got = alike == 0 ? 0 : make_room(alike);
    if (got == 0) {
        return 0;
    }
    for (Page page = first; page < first + got; ++page) {
        pages_.begin_load(page);
    }
    if (ticket) {
        ++ticket->pending;
    }
    counters_.ahead_pages += kind == Job::Kind::ahead ? got : 0;
    workers_->add({.kind = kind, .first = first, .count = got, .fresh = fresh, .ticket = ticket});
    return got;
}

// Makes room for at most `wanted` pages without waiting; the number of pages for which there is room.
Page Region::make_room(Page wanted) {
    wanted = std::min(wanted, std::max<Page>(pages_.budget() / 8, 1));
    if (pages_.room() < wanted) {
        evict(wanted - pages_.room());
    }
    // An eighth of the memory rests, once memory is full: enough to see uses, and few enough that faults on them are rare.
    const Page target = std::max<Page>(pages_.budget() / 8, 1);
    const Page resting = failing_ ? pages_.clean() : pages_.resting();
    if (pages_.room() < target && resting < target) {
        std::vector<Page> chosen;
        const Page most = std::min(target - resting, std::max(rest_at_once, 2 * wanted));
        while (chosen.size() < most) {
            const Page page = pages_.victim(failing_.has_value());
            if (page == policy::no_slot) {
                break;
            }
            pages_.rest(page);
            chosen.push_back(page);
        }
        rest(std::move(chosen));
    }
    if (pages_.room() < wanted) {
        evict(wanted - pages_.room());
    }
    counters_.peak_pages = std::max<std::uint64_t>(counters_.peak_pages, pages_.resident() + std::min(wanted, pages_.room()));
    return std::min(wanted, pages_.room());
}

void Region::evict(Page count) {
    std::vector<Page> leaving;
    while (leaving.size() < count) {
        const Page page = pages_.evict();
        if (page == policy::no_slot) {
            break;
        }
        leaving.push_back(page);
    }
    std::ranges::sort(leaving);
    for_runs(leaving, [&](Page first, Page run) { mapping_.punch(first, run); });
    counters_.evicted_pages += leaving.size();
    const Page wasted = pages_.take_wasted();
    counters_.ahead_wasted += wasted;
    if (wasted > 0) {
        streams_.wasted(wasted);
    }
}

// Unmaps pages that have just begun to rest, and saves the dirty ones.
void Region::rest(std::vector<Page> chosen) {
    std::ranges::sort(chosen);
    for_runs(chosen, [&](Page first, Page run) { mapping_.unmap(first, run); });
    std::erase_if(chosen, [&](Page page) { return !pages_.is_dirty(page) || pages_.is_saving(page); });
    save_dirty(chosen, nullptr);
}

// Saves pages that are sorted, dirty and not being saved.
void Region::save_dirty(const std::vector<Page>& pages, const std::shared_ptr<Ticket>& ticket) {
    for_runs(pages, [&](Page first, Page count) {
        for (Page done = 0; done < count;) {
            const Page part = lower_.together(first + done, std::min(count - done, settings_.longest));
            save(first + done, part, ticket);
            done += part;
        }
    });
}

void Region::save(Page first, Page count, const std::shared_ptr<Ticket>& ticket) {
    bool mapped = false;
    for (Page page = first; page < first + count; ++page) {
        mapped = mapped || pages_.state(page) == State::mapped;
        pages_.begin_save(page);
    }
    if (mapped) {
        userfault_.protect(mapping_.at(first), count * page_nbytes, true);
    }
    if (ticket) {
        ++ticket->pending;
    }
    workers_->add({.kind = Job::Kind::save, .first = first, .count = count, .ticket = ticket});
}

void Region::retry_saves() {
    std::vector<Page> again;
    for (const Run& run : std::exchange(failed_, {})) {
        for (Page page = run.first; page < std::min(run.first + run.count, pages_.pages()); ++page) {
            if (pages_.state(page) == State::resting && pages_.is_dirty(page) && !pages_.is_saving(page)) {
                again.push_back(page);
            }
        }
    }
    std::ranges::sort(again);
    save_dirty(again, nullptr);
}

// Answers accesses to a page that cannot come with SIGBUS, and says why.
void Region::lose(Page page, const PortError& error) {
    if (pages_.state(page) == State::loading) {
        pages_.drop_load(page);
    }
    const std::uint64_t begin = std::uint64_t{page} * page_nbytes;
    // Not through the program's buffers: its thread may hold the lock of stderr while it waits for this page.
    const std::string text = "farpool: " + settings_.name + ": bytes " + std::to_string(begin) + " to " +
                             std::to_string(begin + page_nbytes) +
                             " cannot be read: " + (error.tier.empty() ? "tier " + lower_.tier(page) + ": " : "") +
                             error.message + ". Accesses to them end with SIGBUS.\n";
    [[maybe_unused]] const ssize_t wrote = write(STDERR_FILENO, text.data(), text.size());
    pages_.set_lost(page);
    ++counters_.lost_pages;
    userfault_.poison(mapping_.at(page));
    changed_.notify_all();
}

Advice Region::advice_at(Page page) const { return std::prev(advices_.upper_bound(page))->second; }

void Region::set_advice(Page first, Page end, Advice advice) {
    const Advice after = advice_at(end);
    advices_.erase(advices_.lower_bound(first), advices_.upper_bound(end));
    advices_[first] = advice;
    advices_[end] = after;
}

// ---- the workers
// ---------------------------------------------------------------------------------------------------------------

void Region::run(const Job& job, std::byte* staging) {
    job.kind == Job::Kind::save ? run_save(job, staging) : run_load(job, staging);
}

void Region::run_load(const Job& job, std::byte* staging) {
    std::optional<PortError> error;
    try {
        if (job.fresh) {
            mapping_.zero(job.first, job.count);
        } else {
            lower_.read(job.first, job.count, staging);
            if (job.kind != Job::Kind::demand) {
                mapping_.load(job.first, job.count, staging);
            }
        }
    } catch (const PortFailure& failure) {
        error = failure.error();
    }
    const std::lock_guard lock(mutex_);
    if (!error) {
        counters_.read_bytes += job.fresh ? 0 : job.count * page_nbytes;
    }
    if (job.kind == Job::Kind::demand) {
        try {
            if (error) {
                throw PortFailure(*error);
            }
            userfault_.copy(mapping_.at(job.first), staging, page_nbytes, !job.write);
            pages_.end_load(job.first, true, false);
            if (job.write) {
                pages_.set_dirty(job.first);
            }
        } catch (const PortFailure& failure) {
            lose(job.first, failure.error());
        }
    } else {
        // Whoever waits for one of the pages repeats the access, and then finds it resting, or demands it alone.
        if (error) {
            mapping_.punch(job.first, job.count);
        }
        for (Page page = job.first; page < job.first + job.count; ++page) {
            error ? pages_.drop_load(page) : pages_.end_load(page, false, job.kind == Job::Kind::ahead);
        }
        userfault_.wake(mapping_.at(job.first), job.count * page_nbytes);
    }
    if (job.ticket) {
        --job.ticket->pending;
        job.ticket->error = job.ticket->error ? job.ticket->error : error;
    }
    if (parks_) {
        nudge();
    }
    changed_.notify_all();
}

void Region::run_save(const Job& job, std::byte* staging) {
    std::optional<PortError> error;
    try {
        mapping_.save(job.first, job.count, staging);
        lower_.write(job.first, job.count, staging);
    } catch (const PortFailure& failure) {
        error = failure.error();
    }
    const std::lock_guard lock(mutex_);
    std::vector<Page> again;
    for (Page page = job.first; page < job.first + job.count; ++page) {
        pages_.end_save(page, !error);
        if (pages_.state(page) == State::resting && pages_.is_dirty(page)) {
            again.push_back(page);  // written since, and unmapped again
        }
    }
    if (error) {
        failing_ = error;
        failed_.push_back({job.first, job.count});
    } else {
        failing_.reset();
        counters_.written_bytes += job.count * page_nbytes;
        counters_.saved_pages += job.count;
        save_dirty(again, nullptr);
    }
    if (job.ticket) {
        --job.ticket->pending;
        job.ticket->error = job.ticket->error ? job.ticket->error : error;
    }
    if (parks_ && !error) {
        nudge();
    }
    changed_.notify_all();
}

void Region::nudge() const noexcept {
    const std::uint64_t one = 1;
    [[maybe_unused]] const ssize_t wrote = write(nudged_, &one, sizeof one);
}

// ---- what the program asks for
// -------------------------------------------------------------------------------------------------

void Region::sync(Page first, Page count) {
    const std::shared_lock size(size_);
    const auto ticket = std::make_shared<Ticket>();
    Lock lock(mutex_);
    std::vector<Page> dirty;
    std::vector<Page> moving;  // what is being written now may be older than the program's last write
    for (Page page = first; page < std::min(first + count, pages_.pages()); ++page) {
        if (pages_.is_saving(page)) {
            moving.push_back(page);
        } else if (pages_.is_dirty(page)) {
            dirty.push_back(page);
        }
    }
    save_dirty(dirty, ticket);
    const auto settled = [&] {
        return ticket->pending == 0 && std::ranges::none_of(moving, [&](Page page) { return pages_.is_saving(page); });
    };
    changed_.wait(lock, settled);
    std::erase_if(moving, [&](Page page) { return !pages_.is_dirty(page); });
    save_dirty(moving, ticket);
    changed_.wait(lock, [&] { return ticket->pending == 0; });
    if (ticket->error) {
        throw PortFailure(*ticket->error);
    }
}

void Region::advise(Page first, Page count, Advice advice) {
    const std::lock_guard lock(mutex_);
    set_advice(first, first + count, advice);
}

void Region::will_need(Page first, Page count) {
    const std::shared_lock size(size_);
    const std::lock_guard lock(mutex_);
    const Page end = std::min(first + count, pages_.pages());
    for (Page begun = 0; first < end && begun < pages_.budget() / 2;) {
        if (pages_.state(first) != State::absent || pages_.is_lost(first)) {
            ++first;
            continue;
        }
        const Page got = load(first, end - first, Job::Kind::fill, nullptr);
        if (got == 0) {
            return;
        }
        first += got;
        begun += got;
    }
}

void Region::dont_need(Page first, Page count) {
    const std::shared_lock size(size_);
    const std::lock_guard lock(mutex_);
    const Page end = std::min(first + count, pages_.pages());
    std::vector<Page> chosen;
    for (Page page = first; page < end; ++page) {
        if (pages_.state(page) == State::mapped && !pages_.is_pinned(page)) {
            pages_.rest(page);
            chosen.push_back(page);
        }
    }
    rest(std::move(chosen));
    std::vector<Page> leaving;
    for (Page page = first; page < end; ++page) {
        if (pages_.evict(page)) {
            leaving.push_back(page);
        }
    }
    for_runs(leaving, [&](Page begin, Page run) { mapping_.punch(begin, run); });
    counters_.evicted_pages += leaving.size();
    counters_.ahead_wasted += pages_.take_wasted();  // the program's doing: no guess was wrong
}

bool Region::pin(Page first, Page count) {
    const std::shared_lock size(size_);
    Lock lock(mutex_);
    const Page end = std::min(first + count, pages_.pages());
    std::vector<Page> fresh;
    for (Page page = first; page < end; ++page) {
        if (!pages_.is_pinned(page)) {
            fresh.push_back(page);
        }
    }
    if (pages_.pinned() + fresh.size() > pages_.budget() / 2) {
        return false;
    }
    for (const Page page : fresh) {
        pages_.pin(page, true);
    }
    const auto ticket = std::make_shared<Ticket>();
    const double deadline = monotonic_seconds() + settings_.timeout;
    const auto give_up = [&](const PortError& error) {
        for (const Page page : fresh) {
            pages_.pin(page, false);
        }
        throw PortFailure(error);
    };
    for (Page page = first; page < end;) {
        if (pages_.state(page) == State::absent && pages_.is_lost(page)) {
            give_up({ErrorKind::tier, "page " + std::to_string(page) + " is lost", lower_.tier(page), 0, {}});
        } else if (pages_.state(page) == State::absent && load(page, end - page, Job::Kind::fill, ticket) == 0) {
            // The memory is full of dirty pages, which are being saved.
            retry_saves();
            changed_.wait_for(lock, std::chrono::duration<double>(retry_seconds));
            if (monotonic_seconds() >= deadline) {
                give_up(failing_.value_or(PortError{ErrorKind::tier, "no page left memory in time", {}, 0, {}}));
            }
        } else if (pages_.state(page) == State::loading) {
            changed_.wait(lock, [&] { return pages_.state(page) != State::loading; });
            if (ticket->error) {
                give_up(*ticket->error);
            }
        } else if (pages_.state(page) != State::absent) {
            ++page;
        }
    }
    return true;
}

void Region::unpin(Page first, Page count) {
    const std::shared_lock size(size_);
    const std::lock_guard lock(mutex_);
    for (Page page = first; page < std::min(first + count, pages_.pages()); ++page) {
        pages_.pin(page, false);
    }
}

Counters Region::counters() const {
    const std::lock_guard lock(mutex_);
    Counters counters = counters_;
    counters.resident_pages = pages_.resident();
    counters.backed_bytes = mapping_.backed();
    return counters;
}

}  // namespace farpool::region
