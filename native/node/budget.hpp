// What a node may lend altogether, how much of it is in use, and whose objects go when somebody needs room.
//
// Each tenant has a share: what was set for it, or an equal part of the rest with all others that hold something. What lies beyond
// its share it has borrowed: it goes when another one needs the room. Nobody evicts another's objects from within its share.
#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <utility>

namespace farpool {

class Objects;

class Budget {
public:
    // Bytes that may be on their way to the NVMe file, and one object more. They are in use beside the limit. As many for a small node:
    // one that may have fewer under way forgets objects that come faster than its file takes them.
    static constexpr std::uint64_t most_leaving = std::uint64_t{64} << 20;

    using Shares = std::map<std::uint32_t, std::uint64_t>;

    explicit Budget(std::uint64_t limit, Shares shares = {}) : limit(limit), shares_(std::move(shares)) {}

    const std::uint64_t limit;
    std::uint64_t used = 0;     // objects, their tables, leases
    std::uint64_t objects = 0;  // of that
    std::uint64_t leaving = 0;  // not of that
    std::uint64_t backed = 0;   // memory that the system has given for objects, their holes included

    std::uint64_t left() const noexcept { return used < limit ? limit - used : 0; }
    // Memory that the system has given.
    std::uint64_t taken() const noexcept { return used - objects + backed; }

    void join(std::uint32_t tenant, Objects& objects) { tenants_[tenant].objects = &objects; }
    void leave(std::uint32_t tenant) { tenants_.at(tenant).objects = nullptr; }
    void lend(std::uint32_t tenant, std::uint64_t nbytes);
    void take_back(std::uint32_t tenant, std::uint64_t nbytes);

    std::uint64_t share(std::uint32_t tenant) const;
    std::uint64_t share_of_fixed(std::uint32_t tenant) const;
    // Bytes in use by a tenant, and those of them that cannot be evicted.
    std::uint64_t use(std::uint32_t tenant) const;
    std::uint64_t fixed(std::uint32_t tenant) const;
    // Those that may come. What cannot be evicted leaves room for their shares before they hold anything.
    void expect(std::set<std::uint32_t> tenants) { expected_ = std::move(tenants); }
    // Whether so many bytes more that cannot be evicted lie within the tenant's share beside those of all who may come.
    bool may_fix(std::uint32_t tenant, std::uint64_t nbytes) const;
    // What is left of that beside its leases.
    std::uint64_t share_of_objects(std::uint32_t tenant) const;
    // Whether evicting can leave so many bytes.
    bool can_make_room(std::uint32_t tenant, std::uint64_t nbytes) const;
    // Evicts until so many bytes are left; false, and nothing is evicted, where that cannot be.
    bool make_room(std::uint32_t tenant, std::uint64_t nbytes);
    // Sees to it that the system may give so many bytes more: by returning what it gave for holes, then by evicting.
    bool make_backing_room(std::uint32_t tenant, std::uint64_t nbytes);
    void trim();

private:
    struct Tenant {
        Objects* objects = nullptr;
        std::uint64_t lent = 0;
        std::uint64_t use() const;
        std::uint64_t reclaimable() const;
    };

    std::uint64_t common_share(std::uint32_t tenant, const std::set<std::uint32_t>& expected = {}) const;
    std::uint64_t share(std::uint32_t tenant, std::uint64_t common) const;
    // Of the tenant that lies farthest above its share, counting what `tenant` is about to take; false where nobody has any.
    bool evict_one(std::uint32_t tenant, std::uint64_t nbytes);

    Shares shares_;
    std::set<std::uint32_t> expected_;
    std::map<std::uint32_t, Tenant> tenants_;
};

}  // namespace farpool
