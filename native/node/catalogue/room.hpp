// The account of a tenant's objects: the bytes that they use, and the bytes that eviction cannot free.
#pragma once

#include <cstdint>

#include "node/budget.hpp"
#include "wire/segment.hpp"

namespace farpool {

class Room {
public:
    Room(Budget& budget, std::uint32_t tenant) : budget_(budget), tenant_(tenant) {}

    // Bytes that a node may lend, and the part of them that is free.
    std::uint64_t limit() const noexcept { return budget_.limit(); }
    std::uint64_t left() const noexcept { return budget_.left(); }
    // Bytes that the tenant's objects and tables use.
    std::uint64_t used() const noexcept { return used_; }
    std::uint64_t tables() const noexcept { return tables_; }
    // Bytes of objects in the index that eviction can free.
    std::uint64_t reclaimable() const noexcept { return (indexed_units_ - fixed_units_) * unit_nbytes; }

    // Take and release units of RAM.
    void take(std::uint32_t units) { count(units * unit_nbytes); }
    void release(std::uint32_t units) { count(0 - units * unit_nbytes); }
    // Counts units as moving to the lower medium and no longer as used, until end_move().
    void begin_move(std::uint32_t units) {
        release(units);
        budget_.count_moving(units * unit_nbytes);
    }
    void end_move(std::uint32_t units) { budget_.count_moving(0 - units * unit_nbytes); }
    bool may_move_more() const noexcept { return budget_.moving() < Budget::moving_bytes_max; }
    // Sets the bytes that the tables use, beyond the bytes that each tenant has from its start.
    void set_tables(std::uint64_t nbytes) {
        used_ += nbytes - tables_;
        budget_.count_tables(nbytes - tables_);
        tables_ = nbytes;
    }

    // An announced unit has a place, and gets its memory when its bytes arrive.
    void announce(std::uint32_t units) { announced_units_ += units; }
    void end_announcement(std::uint32_t units) { announced_units_ -= units; }
    bool may_announce(std::uint64_t nbytes) const { return announced_units_ * unit_nbytes + nbytes <= limit(); }
    bool has_announced() const noexcept { return announced_units_ > 0; }

    // Count an object that enters or leaves the index. A fixed object cannot be evicted; a firm one is kept or pinned.
    void enter(std::uint32_t units, bool fixed, bool firm) {
        indexed_units_ += units;
        fixed_units_ += fixed ? units : 0;
        firm_units_ += firm ? units : 0;
    }
    void leave(std::uint32_t units, bool fixed, bool firm) {
        indexed_units_ -= units;
        fixed_units_ -= fixed ? units : 0;
        firm_units_ -= firm ? units : 0;
    }
    // Count an object that becomes fixed or firm, or no longer is. Objects outside the index may be firm, but not fixed.
    void fix(std::uint32_t units) { fixed_units_ += units; }
    void unfix(std::uint32_t units) { fixed_units_ -= units; }
    void make_firm(std::uint32_t units) { firm_units_ += units; }
    void end_firm(std::uint32_t units) { firm_units_ -= units; }
    // Changes the count of bytes that unsent replies hold.
    void count_unsent(std::int64_t change) { unsent_ += static_cast<std::uint64_t>(change); }

    // True if `nbytes` more that cannot be evicted fit into the tenant's share.
    bool may_fix(std::uint64_t nbytes) const { return budget_.may_fix(tenant_, nbytes); }
    // True if kept, pinned and unsent objects may have `nbytes` more: they leave an eighth of the share to other objects. So a
    // program that may only read cannot prevent others from publishing.
    bool may_be_firm(std::uint64_t nbytes) const {
        const std::uint64_t share = budget_.share_of_objects(tenant_);
        return firm_units_ * unit_nbytes + unsent_ + nbytes <= share - share / 8;
    }
    // True if `nbytes` more are free or can be freed by eviction, and the system can back them with memory.
    bool can_take(std::uint64_t nbytes) const {
        return budget_.can_make_room(tenant_, nbytes) && budget_.can_be_backed(tenant_, nbytes);
    }
    // As in Budget.
    bool make_room(std::uint64_t nbytes) { return budget_.make_room(tenant_, nbytes); }
    bool make_backing_room(std::uint64_t nbytes) { return budget_.make_backing_room(tenant_, nbytes); }
    bool return_backing(std::uint64_t nbytes, std::uint64_t ahead = 0) {
        return budget_.return_backing(tenant_, nbytes, ahead);
    }
    void trim_all() { budget_.trim(); }
    // True if the system may give `nbytes` more without giving more than the node lends.
    bool may_back(std::uint64_t nbytes) const { return budget_.taken() + nbytes <= limit(); }
    void count_backed(std::uint64_t change) { budget_.count_backed(change); }

    void join(Evictable& objects) { budget_.join(tenant_, objects); }
    void leave_budget() { budget_.leave(tenant_); }

private:
    void count(std::uint64_t change) {
        used_ += change;
        budget_.count_objects(change);
    }

    Budget& budget_;
    const std::uint32_t tenant_;
    std::uint64_t used_ = 0;
    std::uint64_t tables_ = 0;  // bytes of `used_`
    std::uint64_t announced_units_ = 0;
    std::uint64_t indexed_units_ = 0;
    std::uint64_t fixed_units_ = 0;  // part of `indexed_units_`
    std::uint64_t firm_units_ = 0;
    std::uint64_t unsent_ = 0;  // bytes
};

}  // namespace farpool
