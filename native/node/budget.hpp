// The memory budget of a node: how much it may lend, how much is in use, and whose objects are evicted when room is needed.
//
// Each tenant has a share: the one that was set for it, or an equal part of the rest with all other tenants that use something.
// A tenant may borrow beyond its share, up to its burst if it has one. Borrowed bytes are evicted when another tenant needs the
// room, those of the lowest priority first; bytes within a share are never evicted for another tenant.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>

namespace farpool {

// The objects of one tenant, as the budget evicts them.
class Evictable {
public:
    // Bytes of the budget that the objects use, and the part of them that eviction could free.
    virtual std::uint64_t used() const noexcept = 0;
    virtual std::uint64_t reclaimable() const noexcept = 0;
    // Evicts one object; `at_once`: its memory is free when the call returns. False if all objects are in use or kept.
    virtual bool evict_one(bool at_once) = 0;
    // Returns the memory of holes to the system.
    virtual void trim() = 0;

protected:
    ~Evictable() = default;
};

class Budget {
public:
    // At most this many bytes, and one more object, may be on their way to a lower medium. They are in use in addition to the
    // limit. A small node has the same bound: with fewer bytes it would forget objects that arrive faster than its file takes
    // them.
    static constexpr std::uint64_t moving_bytes_max = std::uint64_t{64} << 20;

    using Shares = std::map<std::uint32_t, std::uint64_t>;
    // What a policy gives a tenant. Without a guarantee of its own (0), the tenant keeps the share that it has without a
    // policy.
    struct Allowance {
        std::uint64_t guaranteed = 0;
        std::uint64_t burst = 0;  // most bytes that the tenant may use; 0 for no limit
        std::int32_t priority = 0;
    };
    using Allowances = std::map<std::uint32_t, Allowance>;
    // Returns the bytes that the system can give to objects and leases in addition to those that it has given.
    using SystemLeft = std::function<std::uint64_t()>;

    // Without `system_left` the budget counts on the system's memory until the system refuses some.
    explicit Budget(std::uint64_t limit, Shares shares = {}, SystemLeft system_left = {})
        : limit_(limit), first_shares_(std::move(shares)), shares_(first_shares_), system_left_(std::move(system_left)) {}

    std::uint64_t limit() const noexcept { return limit_; }
    // Bytes of objects, their tables and leases.
    std::uint64_t used() const noexcept { return used_; }
    std::uint64_t left() const noexcept { return used_ < limit_ ? limit_ - used_ : 0; }
    // Bytes, in addition to used(), of objects on their way to a lower medium.
    std::uint64_t moving() const noexcept { return moving_; }
    // Bytes of memory that the system has given for objects, their holes included.
    std::uint64_t backed() const noexcept { return backed_; }
    // Bytes of memory that the system has given for leases, tables and objects with their holes.
    std::uint64_t taken() const noexcept { return used_ - objects_ + backed_; }

    // Count changes; a negative change is passed as its two's complement.
    void count_objects(std::uint64_t change) noexcept {
        used_ += change;
        objects_ += change;
    }
    void count_tables(std::uint64_t change) noexcept { used_ += change; }
    void count_moving(std::uint64_t change) noexcept { moving_ += change; }
    void count_backed(std::uint64_t change) noexcept { backed_ += change; }

    void join(std::uint32_t tenant, Evictable& objects) { tenants_[tenant].objects = &objects; }
    void leave(std::uint32_t tenant) { tenants_.at(tenant).objects = nullptr; }
    void lend(std::uint32_t tenant, std::uint64_t nbytes);
    void take_back(std::uint32_t tenant, std::uint64_t nbytes);

    // Replaces all allowances. A tenant's guarantee takes the place of the share that it got at the start. Evicts nothing; if
    // `evicts`, evict_above_bursts() does. Otherwise a tenant that is above a lowered burst keeps its objects until it stores
    // others, because nobody wanted to take something from it: the pool's other members have grown.
    void allow(Allowances allowances, bool evicts = true);
    const Allowances& allowances() const noexcept { return allowances_; }
    Allowance allowance(std::uint32_t tenant) const;
    // Evicts objects, at most this many, of tenants that use more than their bursts, which were lowered or which tables have
    // passed. Returns how many. Evicts none while as many bytes move to the lower medium as may: they would be forgotten.
    std::size_t evict_above_bursts(std::size_t objects_max);

    std::uint64_t share(std::uint32_t tenant) const;
    std::uint64_t share_of_fixed(std::uint32_t tenant) const;
    // Bytes in use by a tenant, and the part of them that cannot be evicted.
    std::uint64_t use(std::uint32_t tenant) const;
    std::uint64_t fixed(std::uint32_t tenant) const;
    // Sets the tenants that may connect. Bytes that cannot be evicted leave room for the shares of these tenants, even before
    // they use anything.
    void expect(std::set<std::uint32_t> tenants) { expected_ = std::move(tenants); }
    // True if `nbytes` more that cannot be evicted fit into the tenant's share, with shares reserved for all expected tenants.
    bool may_fix(std::uint32_t tenant, std::uint64_t nbytes) const;
    // Bytes of that share that the tenant's leases leave for objects.
    std::uint64_t share_of_objects(std::uint32_t tenant) const;
    // True if `nbytes` are free or can be freed by eviction, and the tenant's burst allows them. Bytes that a manager has
    // granted are not held to the burst, because the manager has compared them with the limits of the whole pool.
    bool can_make_room(std::uint32_t tenant, std::uint64_t nbytes, bool granted = false) const;
    // True if the system can back `nbytes` more with memory, if necessary after eviction: other programs use the same file
    // system, so it may have less than the limit. Call it before the first eviction.
    bool can_be_backed(std::uint32_t tenant, std::uint64_t nbytes) const;
    // Evicts until `nbytes` are free, first the tenant's own objects if it would pass its burst. If that is impossible, returns
    // false and evicts nothing.
    bool make_room(std::uint32_t tenant, std::uint64_t nbytes, bool granted = false);
    // Makes sure that the system may give `nbytes` more memory: first returns the memory of holes, then evicts.
    bool make_backing_room(std::uint32_t tenant, std::uint64_t nbytes);
    // Evicts objects and returns their memory to the system, which refused to give `nbytes` more. Shares are then parts of the
    // memory that the system has given. `ahead` is the number of bytes that the same object or lease takes next. If all
    // evictable objects have less than `nbytes` and `ahead` together, returns false and evicts nothing.
    bool return_backing(std::uint32_t tenant, std::uint64_t nbytes, std::uint64_t ahead = 0);
    void trim();

private:
    struct Tenant {
        Evictable* objects = nullptr;
        std::uint64_t lent = 0;
        std::uint64_t use() const { return lent + (objects == nullptr ? 0 : objects->used()); }
        std::uint64_t reclaimable() const { return objects == nullptr ? 0 : objects->reclaimable(); }
    };

    std::uint64_t common_share(std::uint32_t tenant, const std::set<std::uint32_t>& expected = {}) const;
    std::uint64_t share(std::uint32_t tenant, std::uint64_t common, double given = 1.0) const;
    // A way to evict: `given` is the part of the limit that the system has given, by which shares are multiplied; `at_once` if
    // there is no time to move objects to a lower medium.
    struct Way {
        double given = 1.0;
        bool at_once = false;
    };
    // Evicts an object of a tenant above its share, counting `nbytes` that `tenant` is about to take: of the lowest priority,
    // and among these of the one that is farthest above. If there is none, an object of `tenant`. False if no object may be
    // evicted.
    bool evict_one(std::uint32_t tenant, std::uint64_t nbytes, Way way);
    // Bytes by which the tenant's own use has to fall before it may take `nbytes`.
    std::uint64_t own_excess(std::uint32_t tenant, std::uint64_t nbytes) const;
    // Most bytes that the tenant may use.
    std::uint64_t burst(std::uint32_t tenant) const;
    // Evicts objects of `nbytes`, or as many as there are. False if not even one may be evicted.
    bool evict_some(std::uint32_t tenant, std::uint64_t nbytes, Way way);
    // Bytes of objects that could be evicted for a tenant.
    std::uint64_t evictable(std::uint32_t tenant, Way way) const;
    // The part of the limit that the system gives, if it has `more` bytes left.
    double given(std::uint64_t more) const;

    const std::uint64_t limit_;
    std::uint64_t used_ = 0;
    std::uint64_t objects_ = 0;  // bytes of `used_`
    std::uint64_t moving_ = 0;
    std::uint64_t backed_ = 0;
    const Shares first_shares_;
    Allowances allowances_;
    std::map<std::uint32_t, std::uint64_t> evicted_to_;  // bytes in use, above which evict_above_bursts() evicts
    Shares shares_;  // `first_shares_`, with the guarantees of `allowances_` in their places
    SystemLeft system_left_;
    std::set<std::uint32_t> expected_;
    std::map<std::uint32_t, Tenant> tenants_;
};

}  // namespace farpool
