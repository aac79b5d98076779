// LIRS (Jiang and Zhang, "LIRS: an efficient low inter-reference recency set replacement policy", SIGMETRICS 2002): objects are
// ranked by the number of other objects used between their last two uses, not by the time of the last use. Objects with the
// shortest such distances (LIR) fill 99 % of the capacity; all others (HIR) pass through the rest, in a queue of their own.
//
// Names follow the paper: stack S, in order of use, holds the LIR objects and all objects used since the oldest of them was
// used, evicted ones included (called ghosts here); queue Q holds the HIR objects in the cache. A HIR object that is used while
// it is in S becomes LIR, and the LIR object at the bottom of S becomes HIR in its place.
//
// Details on which counts depend: S holds at most twice the capacity, and forgets the ghosts that were evicted first. A HIR
// object that is used after S has forgotten it stays HIR, as in the paper; then the bottom of S becomes HIR too and leaves its
// place among the LIR objects to the next inserted object, as in libCacheSim (in the paper it would stay; this changes less
// than 0.03 % of the misses on a block trace).
#pragma once

#include "policy/id_map.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class Lirs final : public Policy {
public:
    explicit Lirs(std::uint64_t capacity);

private:
    enum class State : std::uint8_t { lir, hir, ghost };
    // An object or a ghost. Ghosts have no slot, so entries have numbers of their own.
    struct Entry {
        std::uint64_t key;
        std::uint64_t size;
        Slot slot;
        State state;
        bool in_s;
    };

    void on_touch(Slot slot, std::int64_t next_use) override;
    void on_insert(Slot slot, const Item& item) override;
    Slot on_victim(const Item& incoming, const InUse& in_use) override;
    void on_remove(Slot slot, Leaving why) override;

    Slot create(const Entry& entry);
    void forget(Slot number);
    void enter_s(Slot number);
    void leave_s(Slot number);
    void become_lir(Slot number);
    void demote_to(std::uint64_t room);
    void prune();
    void limit_s();

    std::uint64_t capacity_;
    std::uint64_t lir_capacity_;
    std::vector<Entry> entries_;
    std::vector<Slot> unused_;
    std::vector<Slot> numbers_;  // of the entries, by slot
    Links s_links_;
    Links q_links_;
    SlotList s_{s_links_};
    SlotList q_{q_links_};
    SlotList ghosts_{q_links_};  // in the order in which they were evicted
    IdMap ghost_numbers_;
    std::uint64_t lir_nbytes_ = 0;
    std::uint64_t s_nbytes_ = 0;
};

}  // namespace farpool::policy
