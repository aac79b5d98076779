// The memory budget of a node: how much it may lend, how much is in use, and whose objects are evicted when room is needed.
//
// Each tenant has a share: the one set for it, or an equal part of the rest with all others that hold something. Use beyond
// the share is borrowed and evicted when another tenant needs the room. What lies within a share is never evicted by others.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <set>
#include <utility>

namespace farpool {

class Objects;

class Budget {
public:
    // Bytes that may be on their way to the NVMe file, and one object more; they are in use beside the limit. Not less for a
    // small node: with fewer under way it would forget objects that come faster than its file takes them.
    static constexpr std::uint64_t most_leaving = std::uint64_t{64} << 20;

    using Shares = std::map<std::uint32_t, std::uint64_t>;
    // Returns the bytes that the system can give to objects and leases in addition to those that it has given.
    using SystemLeft = std::function<std::uint64_t()>;

    // Without `system_left` the budget counts on the system's memory until the system refuses some.
    explicit Budget(std::uint64_t limit, Shares shares = {}, SystemLeft system_left = {})
        : limit(limit), shares_(std::move(shares)), system_left_(std::move(system_left)) {}

    const std::uint64_t limit;
    std::uint64_t used = 0;     // objects, their tables, leases
    std::uint64_t objects = 0;  // of `used`: objects
    std::uint64_t leaving = 0;  // beside `used`: bytes on their way to the NVMe file
    std::uint64_t backed = 0;   // memory that the system has given for objects, their holes included

    std::uint64_t left() const noexcept { return used < limit ? limit - used : 0; }
    // Bytes of memory that the system has given, for leases, tables and objects with their holes.
    std::uint64_t taken() const noexcept { return used - objects + backed; }

    void join(std::uint32_t tenant, Objects& objects) { tenants_[tenant].objects = &objects; }
    void leave(std::uint32_t tenant) { tenants_.at(tenant).objects = nullptr; }
    void lend(std::uint32_t tenant, std::uint64_t nbytes);
    void take_back(std::uint32_t tenant, std::uint64_t nbytes);

    std::uint64_t share(std::uint32_t tenant) const;
    std::uint64_t share_of_fixed(std::uint32_t tenant) const;
    // Bytes in use by a tenant, and the part of them that cannot be evicted.
    std::uint64_t use(std::uint32_t tenant) const;
    std::uint64_t fixed(std::uint32_t tenant) const;
    // Sets the tenants that may connect. Bytes that cannot be evicted leave room for their shares before they hold anything.
    void expect(std::set<std::uint32_t> tenants) { expected_ = std::move(tenants); }
    // True if `nbytes` more that cannot be evicted fit into the tenant's share, with shares kept for all expected tenants.
    bool may_fix(std::uint32_t tenant, std::uint64_t nbytes) const;
    // Bytes of that share that are left for objects, beside the tenant's leases.
    std::uint64_t share_of_objects(std::uint32_t tenant) const;
    // True if `nbytes` are free or can be freed by eviction.
    bool can_make_room(std::uint32_t tenant, std::uint64_t nbytes) const;
    // True if the system can back `nbytes` more with memory, if necessary after eviction: other programs use the same file
    // system, so it may have less than the limit. Call it before the first eviction.
    bool can_be_backed(std::uint32_t tenant, std::uint64_t nbytes) const;
    // Evicts until `nbytes` are free; false, and evicts nothing, if that is impossible.
    bool make_room(std::uint32_t tenant, std::uint64_t nbytes);
    // Makes sure that the system may give `nbytes` more memory: first by returning that of holes, then by evicting.
    bool make_backing_room(std::uint32_t tenant, std::uint64_t nbytes);
    // Evicts objects and returns their memory to the system, which had no `nbytes` more to give. Shares are then parts of the
    // memory that it has given. False, and evicts nothing, if all evictable objects have less than `nbytes` and `ahead`
    // together; `ahead` is the number of bytes that the same object or lease takes next.
    bool return_backing(std::uint32_t tenant, std::uint64_t nbytes, std::uint64_t ahead = 0);
    void trim();

private:
    struct Tenant {
        Objects* objects = nullptr;
        std::uint64_t lent = 0;
        std::uint64_t use() const;
        std::uint64_t reclaimable() const;
    };

    std::uint64_t common_share(std::uint32_t tenant, const std::set<std::uint32_t>& expected = {}) const;
    std::uint64_t share(std::uint32_t tenant, std::uint64_t common, double given = 1.0) const;
    // A way to evict: `given` is the part of the limit that the system has given, by which shares are multiplied; `at_once` if
    // there is no time for objects to go to the NVMe file.
    struct Way {
        double given = 1.0;
        bool at_once = false;
    };
    // Evicts an object of the tenant farthest above its share, counting `nbytes` that `tenant` is about to take; false where no
    // object may be evicted.
    bool evict_one(std::uint32_t tenant, std::uint64_t nbytes, Way way);
    // Evicts objects of `nbytes`, or as many as there are; false where not even one may be evicted.
    bool evict_some(std::uint32_t tenant, std::uint64_t nbytes, Way way);
    // Bytes of objects that could be evicted for a tenant.
    std::uint64_t evictable(std::uint32_t tenant, Way way) const;
    // The part of the limit that the system gives, if it has `more` bytes left.
    double given(std::uint64_t more) const;

    Shares shares_;
    SystemLeft system_left_;
    std::set<std::uint32_t> expected_;
    std::map<std::uint32_t, Tenant> tenants_;
};

}  // namespace farpool
