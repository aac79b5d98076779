// Which pages of a region are in memory, in what state, and which leave it next. No system calls, no locks, no clock.
//
// The program uses mapped pages without telling us. So a page does not leave at once: it *rests* first, in memory but unmapped.
// If the program uses it, that is one short fault, by which the policy learns of the use; if not, it leaves when it is the one
// that has rested longest. Dirty pages are saved while they rest, so that pages that leave are clean. (The idea comes from the
// free and modified page lists of VAX/VMS: Levy and Lipman, "Virtual Memory Management in the VAX/VMS Operating System",
// Computer 1982.)
//
// Pages that were loaded *ahead* come in runs. The program sees them at once, without the right to write, except the first page
// of each run: the fault there says that the run is used.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <utility>
#include <vector>

#include "policy/policy.hpp"
#include "policy/slot_list.hpp"
#include "region/mapping.hpp"

namespace farpool::region {

enum class State : std::uint8_t { absent, loading, mapped, resting, ahead };

class Residency {
public:
    // `budget`: pages that may be in memory.
    Residency(Page budget, std::string_view policy);

    void resize(Page pages);
    Page pages() const noexcept { return static_cast<Page>(table_.size()); }
    Page budget() const noexcept { return budget_; }
    // Pages in memory, those that are loading included.
    Page resident() const noexcept { return resident_; }
    Page room() const noexcept { return resident_ < budget_ ? budget_ - resident_ : 0; }
    // Pages that rest and may leave, at once or after the save that has begun.
    Page leaving() const noexcept { return static_cast<Page>(clean_.size() + saved_soon_.size()); }
    // Pages that rest, are dirty and are not being saved, because their last save has failed.
    std::vector<Page> unsaved() const;
    Page pinned() const noexcept { return pinned_; }

    State state(Page page) const { return table_[page].state; }
    bool is_dirty(Page page) const { return table_[page].dirty; }
    bool is_saving(Page page) const { return table_[page].saving; }
    bool is_stored(Page page) const { return table_[page].stored; }  // the lower tiers have bytes of it
    bool is_lost(Page page) const { return table_[page].lost; }
    bool is_pinned(Page page) const { return table_[page].pinned; }
    bool is_first(Page page) const { return table_[page].first; }  // of a run that was loaded ahead

    // absent -> loading -> `now` or absent. `first`: the page is the first of a run.
    void begin_load(Page page);
    void end_load(Page page, State now, bool first = false);
    void drop_load(Page page);
    // resting or ahead -> mapped: the program uses the page.
    void map(Page page);
    // mapped -> resting
    void rest(Page page);
    // The page that rests next, of those that `keep` does not keep; `policy::no_slot` if there is none.
    Page victim(policy::InUse keep) { return policy_->victim({}, keep); }
    // The page that leaves memory next becomes absent: of the clean resting pages, the one that has rested longest. It is one
    // that was loaded ahead, if these are many, if many others have left before them, or if there is no other and the need is
    // `urgent`. `policy::no_slot` if there is none.
    Page evict_next(bool urgent);
    // This page becomes absent. False if it is in use, dirty, being saved, pinned or absent already.
    bool evict(Page page);

    // Of a mapped page.
    void set_dirty(Page page) { table_[page].dirty = true; }
    // The page's bytes as they are now will be written below. It must be dirty and not being saved.
    void begin_save(Page page);
    void end_save(Page page, bool ok);
    void set_lost(Page page) { table_[page].lost = true; }
    void pin(Page page, bool on);
    // Any state but loading, and not being saved -> absent, as if the page had never been used.
    void forget(Page page);
    // Pages loaded ahead that have left unused since the last call.
    Page take_wasted() noexcept { return std::exchange(wasted_, 0); }

private:
    struct Entry {
        State state : 3 = State::absent;
        bool dirty : 1 = false;
        bool saving : 1 = false;
        bool stored : 1 = false;
        bool lost : 1 = false;
        bool pinned : 1 = false;
        bool first : 1 = false;
    };
    static_assert(sizeof(Entry) == 2);

    static bool is_listed(const Entry& entry) { return entry.state == State::resting || entry.state == State::ahead; }
    policy::SlotList& list_of(const Entry& entry);
    void leave(Page page);

    const Page budget_;
    Page resident_ = 0;
    Page pinned_ = 0;
    Page wasted_ = 0;
    Page passed_over_ = 0;  // clean pages that have left since a page that was loaded ahead came or was used
    std::vector<Entry> table_;
    std::unique_ptr<policy::Policy> policy_;  // of the mapped pages that are not pinned
    policy::Links links_;
    // Of the resting pages, and of those that were loaded ahead:
    policy::SlotList clean_{links_};  // those that may leave
    policy::SlotList saved_soon_{links_};
    policy::SlotList unsaved_{links_};
    policy::SlotList pinned_clean_{links_};
    policy::SlotList ahead_{links_};
};

}  // namespace farpool::region
