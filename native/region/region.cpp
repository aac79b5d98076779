#include "region/region.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <string>

#include "core/clock.hpp"

namespace farpool::region {

Region::Region(Settings settings)
    : owner_(getpid()), parts_(std::move(settings)), transfers_(parts_), faults_(parts_, transfers_) {}

Region::~Region() { close(); }

void Region::close() noexcept {
    faults_.close();
    transfers_.close();
}

bool Region::ours() const noexcept { return getpid() == owner_; }

Page Region::pages() const {
    const std::lock_guard lock(parts_.mutex);
    return parts_.pages.pages();
}

void Region::grow(Page pages, std::vector<Extent> extents) {
    const std::lock_guard size(size_);
    const std::lock_guard lock(parts_.mutex);
    const Page before = parts_.pages.pages();
    parts_.mapping.grow(before, pages);
    try {
        parts_.userfault.add(parts_.mapping.at(before), (pages - before) * page_nbytes);
        parts_.pages.resize(pages);
    } catch (...) {
        parts_.mapping.shrink(pages, before);
        throw;
    }
    for (Extent& extent : extents) {
        parts_.lower.append(std::move(extent));
    }
}

Page Region::shrink(Page pages) {
    const std::lock_guard size(size_);
    Lock lock(parts_.mutex);
    const Page before = parts_.pages.pages();
    const auto moves = [&] {
        for (Page page = pages; page < before; ++page) {
            if (parts_.pages.state(page) == State::loading || parts_.pages.is_saving(page)) {
                return true;
            }
        }
        return false;
    };
    parts_.changed.wait(lock, [&] { return !moves(); });
    for (Page page = pages; page < before; ++page) {
        parts_.pages.forget(page);
    }
    parts_.userfault.remove(parts_.mapping.at(pages), (before - pages) * page_nbytes);
    parts_.mapping.shrink(before, pages);
    parts_.pages.resize(pages);
    parts_.lower.cut(pages);
    return parts_.lower.pages();
}

void Region::sync(Page first, Page count) {
    const std::shared_lock size(size_);
    const auto ticket = std::make_shared<Ticket>();
    Lock lock(parts_.mutex);
    std::vector<Page> dirty;
    std::vector<Page> moving;  // the bytes on their way below may be older than the program's last write
    for (Page page = first; page < std::min(first + count, parts_.pages.pages()); ++page) {
        if (parts_.pages.is_saving(page)) {
            moving.push_back(page);
        } else if (parts_.pages.is_dirty(page)) {
            dirty.push_back(page);
        }
    }
    transfers_.save(dirty, ticket);
    const auto settled = [&] {
        return ticket->pending == 0 && std::ranges::none_of(moving, [&](Page page) { return parts_.pages.is_saving(page); });
    };
    parts_.changed.wait(lock, settled);
    std::vector<Page> again = moving;
    std::erase_if(again, [&](Page page) { return !parts_.pages.is_dirty(page) || parts_.pages.is_saving(page); });
    transfers_.save(again, ticket);
    parts_.changed.wait(lock, settled);
    if (ticket->error) {
        throw PortFailure(*ticket->error);
    }
    for (const Page page : moving) {
        if (parts_.pages.is_dirty(page) && transfers_.failing(page) != nullptr) {
            throw PortFailure(*transfers_.failing(page));
        }
    }
}

void Region::advise(Page first, Page count, Advice advice) {
    const std::lock_guard lock(parts_.mutex);
    parts_.advices.set(first, first + count, advice);
}

void Region::will_need(Page first, Page count) {
    const std::shared_lock size(size_);
    const std::lock_guard lock(parts_.mutex);
    const Page end = std::min(first + count, parts_.pages.pages());
    for (Page begun = 0; first < end && begun < parts_.pages.budget() / 2;) {
        if (parts_.pages.state(first) != State::absent || parts_.pages.is_lost(first)) {
            ++first;
            continue;
        }
        const Page got = transfers_.load(first, end - first, Job::Kind::fill, nullptr);
        if (got == 0) {
            return;
        }
        first += got;
        begun += got;
    }
}

void Region::dont_need(Page first, Page count) {
    const std::shared_lock size(size_);
    const std::lock_guard lock(parts_.mutex);
    const Page end = std::min(first + count, parts_.pages.pages());
    std::vector<Page> chosen;
    for (Page page = first; page < end; ++page) {
        if (parts_.pages.state(page) == State::mapped && !parts_.pages.is_pinned(page)) {
            parts_.pages.rest(page);
            chosen.push_back(page);
        }
    }
    transfers_.rest(std::move(chosen));
    std::vector<Page> leaving;
    for (Page page = first; page < end; ++page) {
        if (parts_.pages.evict(page)) {
            leaving.push_back(page);
        }
    }
    for_runs(leaving, [&](Page begin, Page run) { parts_.mapping.punch(begin, run); });
    parts_.counters.evicted_pages += leaving.size();
    parts_.counters.ahead_wasted += parts_.pages.take_wasted();  // the program's doing: no guess was wrong
}

bool Region::pin(Page first, Page count) {
    const std::shared_lock size(size_);
    Lock lock(parts_.mutex);
    const Page end = std::min(first + count, parts_.pages.pages());
    std::vector<Page> fresh;
    for (Page page = first; page < end; ++page) {
        if (!parts_.pages.is_pinned(page)) {
            fresh.push_back(page);
        }
    }
    if (parts_.pages.pinned() + fresh.size() > parts_.pages.budget() / 2) {
        return false;
    }
    for (const Page page : fresh) {
        parts_.pages.pin(page, true);
    }
    const auto ticket = std::make_shared<Ticket>();
    const double deadline = monotonic_seconds() + parts_.settings.timeout;
    const auto give_up = [&](const PortError& error) {
        for (const Page page : fresh) {
            parts_.pages.pin(page, false);
        }
        throw PortFailure(error);
    };
    for (Page page = first; page < end;) {
        if (parts_.pages.state(page) == State::absent && parts_.pages.is_lost(page)) {
            give_up({ErrorKind::tier, "page " + std::to_string(page) + " is lost", parts_.lower.tier(page), 0, {}});
        } else if (parts_.pages.state(page) == State::absent &&
                   transfers_.load(page, end - page, Job::Kind::fill, ticket) == 0) {
            // The memory is full of dirty pages, which are being saved.
            transfers_.retry_saves();
            parts_.changed.wait_for(lock, std::chrono::milliseconds(50));
            if (monotonic_seconds() >= deadline) {
                give_up(transfers_.stuck());
            }
        } else if (parts_.pages.state(page) == State::loading) {
            parts_.changed.wait(lock, [&] { return parts_.pages.state(page) != State::loading; });
            if (ticket->error) {
                give_up(*ticket->error);
            }
        } else if (parts_.pages.state(page) != State::absent) {
            ++page;
        }
    }
    return true;
}

void Region::unpin(Page first, Page count) {
    const std::shared_lock size(size_);
    const std::lock_guard lock(parts_.mutex);
    for (Page page = first; page < std::min(first + count, parts_.pages.pages()); ++page) {
        parts_.pages.pin(page, false);
    }
}

Counters Region::counters() const {
    const std::lock_guard lock(parts_.mutex);
    Counters counters = parts_.counters;
    counters.resident_pages = parts_.pages.resident();
    counters.backed_bytes = parts_.mapping.backed();
    return counters;
}

}  // namespace farpool::region
