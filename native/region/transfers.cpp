#include "region/transfers.hpp"

#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <optional>
#include <string>

namespace farpool::region {

namespace {

constexpr Page rest_at_once = 64;  // few enough that the fault that finds memory full does not wait long

}  // namespace

Transfers::Transfers(Parts& parts)
    : parts_(parts),
      workers_(parts.settings.workers, parts.settings.longest * page_nbytes, [this](const Job& job, std::byte* staging) {
          job.kind == Job::Kind::save ? run_save(job, staging) : run_load(job, staging);
      }) {}

void Transfers::demand(Page page, bool write) {
    parts_.pages.begin_load(page);
    workers_.add({.kind = Job::Kind::demand, .first = page, .count = 1, .write = write});
}

Page Transfers::load(Page first, Page count, Job::Kind kind, const std::shared_ptr<Ticket>& ticket) {
    const bool fresh = !parts_.pages.is_stored(first);
    Page alike = 0;
    while (alike < count && parts_.pages.state(first + alike) == State::absent &&
           parts_.pages.is_stored(first + alike) != fresh && !parts_.pages.is_lost(first + alike)) {
        ++alike;
    }
    alike = std::min(parts_.lower.together(first, alike), parts_.settings.longest);
    const Page got = alike == 0 ? 0 : make_room(alike, kind != Job::Kind::ahead);
    if (got == 0) {
        return 0;
    }
    for (Page page = first; page < first + got; ++page) {
        parts_.pages.begin_load(page);
    }
    if (ticket) {
        ++ticket->pending;
    }
    parts_.counters.ahead_pages += kind == Job::Kind::ahead ? got : 0;
    workers_.add({.kind = kind, .first = first, .count = got, .fresh = fresh, .ticket = ticket});
    return got;
}

Page Transfers::make_room(Page wanted, bool urgent) {
    wanted = std::min(wanted, std::max<Page>(parts_.pages.budget() / 8, 1));
    if (parts_.pages.room() < wanted) {
        evict(wanted - parts_.pages.room(), urgent);
    }
    // An eighth of the memory rests, once memory is full: enough to see uses, and few enough that faults on them are rare.
    const Page target = std::max<Page>(parts_.pages.budget() / 8, 1);
    const Page leaving = parts_.pages.leaving();
    if (parts_.pages.room() < target && leaving < target) {
        const auto keep = [&](Page page) { return parts_.pages.is_dirty(page) && failing(page) != nullptr; };
        std::vector<Page> chosen;
        const Page most = std::min(target - leaving, std::max(rest_at_once, 2 * wanted));
        while (chosen.size() < most) {
            const Page page = parts_.pages.victim(keep);
            if (page == policy::no_slot) {
                break;
            }
            parts_.pages.rest(page);
            chosen.push_back(page);
        }
        rest(std::move(chosen));
    }
    if (parts_.pages.room() < wanted) {
        evict(wanted - parts_.pages.room(), urgent);
    }
    parts_.counters.peak_pages =
        std::max<std::uint64_t>(parts_.counters.peak_pages, parts_.pages.resident() + std::min(wanted, parts_.pages.room()));
    return std::min(wanted, parts_.pages.room());
}

void Transfers::evict(Page count, bool urgent) {
    std::vector<Page> leaving;
    while (leaving.size() < count) {
        const Page page = parts_.pages.evict_next(urgent);
        if (page == policy::no_slot) {
            break;
        }
        leaving.push_back(page);
    }
    std::ranges::sort(leaving);
    for_runs(leaving, [&](Page first, Page run) { parts_.mapping.punch(first, run); });
    parts_.counters.evicted_pages += leaving.size();
    const Page wasted = parts_.pages.take_wasted();
    parts_.counters.ahead_wasted += wasted;
    if (wasted > 0) {
        parts_.streams.wasted(wasted);
    }
}

void Transfers::rest(std::vector<Page> chosen) {
    std::ranges::sort(chosen);
    for_runs(chosen, [&](Page first, Page run) { parts_.mapping.unmap(first, run); });
    std::erase_if(chosen, [&](Page page) { return !parts_.pages.is_dirty(page) || parts_.pages.is_saving(page); });
    save(chosen, nullptr);
}

void Transfers::save(const std::vector<Page>& pages, const std::shared_ptr<Ticket>& ticket) {
    for_runs(pages, [&](Page first, Page count) {
        for (Page done = 0; done < count;) {
            const Page part = parts_.lower.together(first + done, std::min(count - done, parts_.settings.longest));
            save_run(first + done, part, ticket);
            done += part;
        }
    });
}

void Transfers::save_run(Page first, Page count, const std::shared_ptr<Ticket>& ticket) {
    bool mapped = false;
    for (Page page = first; page < first + count; ++page) {
        mapped = mapped || parts_.pages.state(page) == State::mapped;
        parts_.pages.begin_save(page);
    }
    if (mapped) {
        parts_.userfault.protect(parts_.mapping.at(first), count * page_nbytes, true);
    }
    if (ticket) {
        ++ticket->pending;
    }
    workers_.add({.kind = Job::Kind::save, .first = first, .count = count, .ticket = ticket});
}

void Transfers::retry_saves() {
    const std::vector<Page> again = parts_.pages.unsaved();
    std::vector<Page> trials;
    for (const auto& [port, error] : failing_) {
        const auto is_other = [&](Page page) { return !parts_.pages.is_dirty(page) || parts_.lower.port(page) != port; };
        if (std::ranges::all_of(again, is_other)) {
            const Page page = parts_.pages.victim(is_other);
            if (page != policy::no_slot) {
                parts_.pages.rest(page);
                trials.push_back(page);
            }
        }
    }
    save(again, nullptr);
    rest(std::move(trials));
}

PortError Transfers::stuck() const {
    return failing_.empty() ? PortError{ErrorKind::tier, "no page left memory in time", {}, 0, {}} : failing_.begin()->second;
}

const PortError* Transfers::failing(Page page) const {
    const auto found = failing_.empty() ? failing_.end() : failing_.find(parts_.lower.port(page));
    return found == failing_.end() ? nullptr : &found->second;
}

void Transfers::lose(Page page, const PortError& error) {
    if (parts_.pages.state(page) == State::loading) {
        parts_.pages.drop_load(page);
    }
    const std::uint64_t begin = std::uint64_t{page} * page_nbytes;
    // Not through the program's buffers: its thread may hold the lock of stderr while it waits for this page.
    const std::string text = "farpool: " + parts_.settings.name + ": bytes " + std::to_string(begin) + " to " +
                             std::to_string(begin + page_nbytes) +
                             " cannot be read: " + (error.tier.empty() ? "tier " + parts_.lower.tier(page) + ": " : "") +
                             error.message + ". Accesses to them end with SIGBUS.\n";
    [[maybe_unused]] const ssize_t wrote = write(STDERR_FILENO, text.data(), text.size());
    parts_.pages.set_lost(page);
    ++parts_.counters.lost_pages;
    parts_.userfault.poison(parts_.mapping.at(page));
    parts_.changed.notify_all();
}

const std::byte* Transfers::fetch(const Job& job, std::byte* staging) const {
    if (job.fresh) {
        return parts_.zeros.data();
    }
    if (const std::byte* const place = parts_.lower.address(job.first, job.count)) {
        return place;
    }
    parts_.lower.read(job.first, job.count, staging);
    return staging;
}

void Transfers::show(const Job& job, const std::byte* bytes) const {
    std::byte* const begin = parts_.mapping.at(job.first);
    if (job.kind == Job::Kind::demand) {
        parts_.userfault.copy(begin, bytes, page_nbytes, !job.write);
        return;
    }
    // A thread that waits for one of the pages sleeps until the end of the load, when it cannot miss the fault by which we
    // learn that the pages are used.
    parts_.userfault.copy(begin, bytes, job.count * page_nbytes, true, true);
    parts_.mapping.unmap(job.first, job.kind == Job::Kind::ahead ? 1 : job.count);
}

void Transfers::end_load(const Job& job, const std::optional<PortError>& error) {
    if (job.kind == Job::Kind::demand) {
        if (error) {
            lose(job.first, *error);
            return;
        }
        parts_.pages.end_load(job.first, State::mapped);
        if (job.write) {
            parts_.pages.set_dirty(job.first);
        }
        return;
    }
    // A thread that waits for one of the pages repeats its access, and then finds the page in memory, or demands it alone.
    if (error) {
        parts_.mapping.punch(job.first, job.count);
    }
    const State now = job.kind == Job::Kind::ahead ? State::ahead : State::resting;
    for (Page page = job.first; page < job.first + job.count; ++page) {
        error ? parts_.pages.drop_load(page) : parts_.pages.end_load(page, now, now == State::ahead && page == job.first);
    }
    parts_.userfault.wake(parts_.mapping.at(job.first), job.count * page_nbytes);
}

void Transfers::run_load(const Job& job, std::byte* staging) {
    std::optional<PortError> error;
    const std::byte* bytes = nullptr;
    // A demanded page is shown only with the lock: its thread goes on at once, and its next fault must find the page mapped.
    std::unique_lock lock(parts_.mutex, std::defer_lock);
    try {
        bytes = fetch(job, staging);
        if (job.kind == Job::Kind::demand) {
            lock.lock();
        }
        show(job, bytes);
    } catch (const PortFailure& failure) {
        error = failure.error();
    }
    if (!lock.owns_lock()) {
        lock.lock();
    }
    if (!error) {
        parts_.counters.read_bytes += job.fresh ? 0 : job.count * page_nbytes;
    }
    end_load(job, error);
    if (job.ticket) {
        --job.ticket->pending;
        job.ticket->error = job.ticket->error ? job.ticket->error : error;
    }
    if (parts_.parks) {
        parts_.nudge();
    }
    parts_.changed.notify_all();
}

void Transfers::run_save(const Job& job, std::byte* staging) {
    std::optional<PortError> error;
    try {
        std::byte* const place = parts_.lower.address(job.first, job.count);
        parts_.mapping.save(job.first, job.count, place != nullptr ? place : staging);
        if (place == nullptr) {
            parts_.lower.write(job.first, job.count, staging);
        }
    } catch (const PortFailure& failure) {
        error = failure.error();
    }
    const std::lock_guard lock(parts_.mutex);
    std::vector<Page> again;
    for (Page page = job.first; page < job.first + job.count; ++page) {
        parts_.pages.end_save(page, !error);
        if (parts_.pages.state(page) == State::resting && parts_.pages.is_dirty(page)) {
            again.push_back(page);  // written since, and unmapped again
        }
    }
    if (error) {
        failing_.insert_or_assign(parts_.lower.port(job.first), *error);
    } else {
        parts_.counters.written_bytes += job.count * page_nbytes;
        parts_.counters.saved_pages += job.count;
        save(again, nullptr);
        if (failing_.erase(parts_.lower.port(job.first)) > 0) {
            retry_saves();  // the tier takes pages again
        }
    }
    if (job.ticket) {
        --job.ticket->pending;
        job.ticket->error = job.ticket->error ? job.ticket->error : error;
    }
    if (parts_.parks && !error) {
        parts_.nudge();
    }
    parts_.changed.notify_all();
}

}  // namespace farpool::region
