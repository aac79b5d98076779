#include "region/residency.hpp"

#include <algorithm>

#include "policy/policies.hpp"

namespace farpool::region {

using policy::Leaving;

Residency::Residency(Page budget, std::string_view policy) : budget_(budget), policy_(policy::make(policy, budget)) {}

void Residency::resize(Page pages) { table_.resize(pages); }

policy::SlotList& Residency::list_of(const Entry& entry) {
    policy::SlotList& leaving = entry.state == State::ahead ? ahead_ : clean_;
    return entry.saving ? saved_soon_ : entry.dirty ? unsaved_ : entry.pinned ? pinned_clean_ : leaving;
}

void Residency::begin_load(Page page) {
    table_[page].state = State::loading;
    ++resident_;
}

void Residency::end_load(Page page, State now, bool first) {
    Entry& entry = table_[page];
    entry.state = now;
    entry.first = first;
    if (is_listed(entry)) {
        list_of(entry).push(page);
    } else if (!entry.pinned) {
        policy_->insert(page, {.key = page});
    }
    passed_over_ = now == State::ahead ? 0 : passed_over_;
}

void Residency::drop_load(Page page) {
    table_[page].state = State::absent;
    --resident_;
}

void Residency::map(Page page) {
    Entry& entry = table_[page];
    const bool again = entry.state == State::resting;
    list_of(entry).remove(page);
    entry.state = State::mapped;
    entry.first = false;
    if (!entry.pinned) {
        policy_->insert(page, {.key = page});
        if (again) {
            policy_->touch(page);
        }
    }
    passed_over_ = again ? passed_over_ : 0;
}

void Residency::rest(Page page) {
    Entry& entry = table_[page];
    policy_->remove(page, Leaving::evicted);
    entry.state = State::resting;
    list_of(entry).push(page);
}

std::vector<Page> Residency::unsaved() const {
    std::vector<Page> pages;
    for (Page page = unsaved_.oldest(); page != policy::no_slot; page = unsaved_.newer(page)) {
        pages.push_back(page);
    }
    std::ranges::sort(pages);
    return pages;
}

Page Residency::evict_next(bool urgent) {
    const Page many = budget_ / 4;
    const bool idle = ahead_.size() > many || passed_over_ > many || (clean_.empty() && urgent);
    const bool ahead = idle && !ahead_.empty();
    const Page page = (ahead ? ahead_ : clean_).oldest();
    if (page != policy::no_slot) {
        passed_over_ += ahead || ahead_.empty() ? 0 : 1;
        leave(page);
    }
    return page;
}

bool Residency::evict(Page page) {
    const Entry& entry = table_[page];
    if (!is_listed(entry) || entry.dirty || entry.saving || entry.pinned) {
        return false;
    }
    leave(page);
    return true;
}

void Residency::leave(Page page) {
    Entry& entry = table_[page];
    list_of(entry).remove(page);
    wasted_ += entry.state == State::ahead ? 1 : 0;
    entry.state = State::absent;
    entry.first = false;
    --resident_;
}

void Residency::begin_save(Page page) {
    Entry& entry = table_[page];
    if (entry.state == State::resting) {
        list_of(entry).remove(page);
        saved_soon_.push(page);
    }
    entry.dirty = false;
    entry.saving = true;
}

void Residency::end_save(Page page, bool ok) {
    Entry& entry = table_[page];
    const bool rests = entry.state == State::resting;
    if (rests) {
        list_of(entry).remove(page);
    }
    entry.saving = false;
    entry.stored = entry.stored || ok;
    entry.dirty = entry.dirty || !ok;
    if (rests) {
        list_of(entry).push(page);
    }
}

void Residency::forget(Page page) {
    pin(page, false);
    Entry& entry = table_[page];
    if (entry.state == State::mapped) {
        policy_->remove(page, Leaving::deleted);
    } else if (is_listed(entry)) {
        list_of(entry).remove(page);
    }
    resident_ -= entry.state == State::absent ? 0 : 1;
    entry = Entry{};
}

void Residency::pin(Page page, bool on) {
    Entry& entry = table_[page];
    if (entry.pinned == on) {
        return;
    }
    if (is_listed(entry)) {
        list_of(entry).remove(page);
    }
    entry.pinned = on;
    pinned_ += on ? 1 : -1;
    if (is_listed(entry)) {
        list_of(entry).push(page);
    } else if (entry.state == State::mapped) {
        if (on) {
            policy_->remove(page, Leaving::deleted);
        } else {
            policy_->insert(page, {.key = page});
        }
    }
}

}  // namespace farpool::region
