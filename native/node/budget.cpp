#include "node/budget.hpp"

#include <algorithm>
#include <limits>
#include <tuple>
#include <utility>

namespace farpool {

namespace {

constexpr std::uint64_t page_nbytes = 4096;

}  // namespace

void Budget::lend(std::uint32_t tenant, std::uint64_t nbytes) {
    used_ += nbytes;
    tenants_[tenant].lent += nbytes;
}

void Budget::take_back(std::uint32_t tenant, std::uint64_t nbytes) {
    used_ -= nbytes;
    tenants_.at(tenant).lent -= nbytes;
}

void Budget::allow(Allowances allowances, bool evicts) {
    allowances_ = std::move(allowances);
    shares_ = first_shares_;
    const auto before = std::exchange(evicted_to_, {});
    for (const auto& [tenant, allowance] : allowances_) {
        const auto former = before.find(tenant);
        if (allowance.burst > 0 && (evicts || former != before.end())) {
            evicted_to_[tenant] = evicts ? allowance.burst : std::max(allowance.burst, former->second);
        }
        if (allowance.guaranteed > 0) {
            shares_[tenant] = std::min(allowance.guaranteed, limit_);
        }
    }
}

Budget::Allowance Budget::allowance(std::uint32_t tenant) const {
    const auto found = allowances_.find(tenant);
    return found == allowances_.end() ? Allowance{} : found->second;
}

std::uint64_t Budget::burst(std::uint32_t tenant) const {
    const std::uint64_t nbytes = allowance(tenant).burst;
    return nbytes == 0 ? std::numeric_limits<std::uint64_t>::max() : nbytes;
}

// A tenant above a burst that was lowered gives twice what it takes, so that its use falls, but one request does not evict for
// all of the difference: the node would serve nobody else until then.
std::uint64_t Budget::own_excess(std::uint32_t tenant, std::uint64_t nbytes) const {
    const std::uint64_t most = burst(tenant);
    const std::uint64_t use = this->use(tenant);
    return use + nbytes <= most ? 0 : std::min(use + nbytes - most, 2 * nbytes);
}

std::size_t Budget::evict_above_bursts(std::size_t objects_max) {
    std::size_t evicted = 0;
    for (const auto& [tenant, most] : evicted_to_) {
        const auto found = tenants_.find(tenant);
        if (found == tenants_.end() || found->second.objects == nullptr) {
            continue;
        }
        while (evicted < objects_max && moving_ < moving_bytes_max && found->second.use() > most &&
               found->second.objects->evict_one(false)) {
            ++evicted;
        }
    }
    return evicted;
}

// The share of each tenant without a share of its own. `tenant` and all expected tenants count as if they used something
// already.
std::uint64_t Budget::common_share(std::uint32_t tenant, const std::set<std::uint32_t>& expected) const {
    std::uint64_t rest = limit_;
    for (const auto& [owner, nbytes] : shares_) {
        rest -= std::min(rest, nbytes);
    }
    const auto is_other = [&](std::uint32_t owner) { return owner != tenant && !shares_.contains(owner); };
    std::uint64_t count = shares_.contains(tenant) ? 0 : 1;
    for (const auto& [owner, account] : tenants_) {
        count += is_other(owner) && (account.use() > 0 || expected.contains(owner)) ? 1 : 0;
    }
    for (const std::uint32_t owner : expected) {
        count += is_other(owner) && !tenants_.contains(owner) ? 1 : 0;
    }
    return rest / std::max<std::uint64_t>(count, 1);
}

std::uint64_t Budget::share(std::uint32_t tenant, std::uint64_t common, double given) const {
    const auto found = shares_.find(tenant);
    const std::uint64_t own = std::min(found == shares_.end() ? common : found->second, burst(tenant));
    return given < 1.0 ? static_cast<std::uint64_t>(static_cast<double>(own) * given) : own;
}

std::uint64_t Budget::share(std::uint32_t tenant) const { return share(tenant, common_share(tenant)); }

std::uint64_t Budget::share_of_fixed(std::uint32_t tenant) const { return share(tenant, common_share(tenant, expected_)); }

std::uint64_t Budget::use(std::uint32_t tenant) const {
    const auto found = tenants_.find(tenant);
    return found == tenants_.end() ? 0 : found->second.use();
}

std::uint64_t Budget::fixed(std::uint32_t tenant) const {
    const auto found = tenants_.find(tenant);
    return found == tenants_.end() ? 0 : found->second.use() - found->second.reclaimable();
}

bool Budget::may_fix(std::uint32_t tenant, std::uint64_t nbytes) const {
    const std::uint64_t own = share_of_fixed(tenant);
    return own >= limit_ || fixed(tenant) + nbytes <= own;  // a tenant that has the node for itself may try
}

std::uint64_t Budget::share_of_objects(std::uint32_t tenant) const {
    const auto found = tenants_.find(tenant);
    const std::uint64_t own = share_of_fixed(tenant);
    return own - std::min(own, found == tenants_.end() ? 0 : found->second.lent);
}

bool Budget::evict_one(std::uint32_t tenant, std::uint64_t nbytes, Way way) {
    const std::uint64_t common = common_share(tenant);
    Evictable* victim = nullptr;
    // Borrowed bytes before bytes within a share, then the lowest priority, then the farthest above its share.
    std::tuple<bool, std::int32_t, std::int64_t> first{};
    for (const auto& [owner, account] : tenants_) {
        const bool own = owner == tenant;
        const auto above = static_cast<std::int64_t>(account.use() + (own ? nbytes : 0)) -
                           static_cast<std::int64_t>(share(owner, common, way.given));
        if ((own || above > 0) && account.reclaimable() > 0) {
            const std::tuple rank(above <= 0, allowance(owner).priority, -above);
            if (victim == nullptr || rank < first) {
                victim = account.objects;
                first = rank;
            }
        }
    }
    return victim != nullptr && victim->evict_one(way.at_once);
}

bool Budget::evict_some(std::uint32_t tenant, std::uint64_t nbytes, Way way) {
    const std::uint64_t enough = used_ - std::min(used_, nbytes);
    bool evicted = false;
    while (used_ > enough && evict_one(tenant, nbytes, way)) {
        evicted = true;
    }
    return evicted;
}

std::uint64_t Budget::evictable(std::uint32_t tenant, Way way) const {
    const std::uint64_t common = common_share(tenant);
    std::uint64_t found = 0;
    for (const auto& [owner, account] : tenants_) {
        const std::uint64_t use = account.use();
        const std::uint64_t own = share(owner, common, way.given);
        found += owner == tenant ? account.reclaimable() : std::min(account.reclaimable(), use > own ? use - own : 0);
    }
    return found;
}

bool Budget::can_make_room(std::uint32_t tenant, std::uint64_t nbytes, bool granted) const {
    if (const std::uint64_t excess = granted ? 0 : own_excess(tenant, nbytes); excess > 0) {
        const auto found = tenants_.find(tenant);
        if (found == tenants_.end() || found->second.reclaimable() < excess) {
            return false;
        }
    }
    return left() >= nbytes || left() + evictable(tenant, {}) >= nbytes;
}

bool Budget::can_be_backed(std::uint32_t tenant, std::uint64_t nbytes) const {
    const std::uint64_t holes = backed_ - std::min(backed_, objects_ + moving_);
    if (!system_left_ || nbytes <= holes || nbytes <= holes + evictable(tenant, {})) {
        return true;  // without a system call
    }
    const std::uint64_t left = system_left_();
    const std::uint64_t lacking = nbytes - holes - std::min(nbytes - holes, left);
    // One page more, because the extent may begin and end within a page.
    return lacking == 0 || lacking + page_nbytes <= evictable(tenant, {given(left)});
}

double Budget::given(std::uint64_t more) const {
    return std::min(1.0, (static_cast<double>(taken()) + static_cast<double>(more)) / static_cast<double>(limit_));
}

bool Budget::make_room(std::uint32_t tenant, std::uint64_t nbytes, bool granted) {
    if (!can_make_room(tenant, nbytes, granted)) {
        return false;
    }
    if (const std::uint64_t excess = granted ? 0 : own_excess(tenant, nbytes); excess > 0) {
        const Tenant& own = tenants_.at(tenant);
        const std::uint64_t enough = own.use() - excess;
        while (own.use() > enough) {
            if (!own.objects->evict_one(false)) {
                return false;
            }
        }
    }
    while (left() < nbytes) {
        if (!evict_one(tenant, nbytes, {})) {
            return false;
        }
    }
    return true;
}

bool Budget::make_backing_room(std::uint32_t tenant, std::uint64_t nbytes) {
    // The last page of a segment may be incomplete.
    const auto fits = [&] { return taken() + nbytes < limit_ + page_nbytes + moving_; };
    if (fits()) {
        return true;
    }
    trim();
    while (!fits()) {  // the holes share pages with objects
        if (!evict_some(tenant, std::max(nbytes, limit_ / 64), {})) {
            return false;
        }
        trim();
    }
    return true;
}

bool Budget::return_backing(std::uint32_t tenant, std::uint64_t nbytes, std::uint64_t ahead) {
    nbytes = std::max<std::uint64_t>(nbytes, 1);
    const std::uint64_t before = backed_;
    trim();
    if (backed_ < before) {  // holes had memory, so there is no need to evict yet
        return true;
    }
    const double part = given(0);
    if (evictable(tenant, {part}) < nbytes + ahead || !evict_some(tenant, nbytes, {part, true})) {
        return false;
    }
    evict_some(tenant, used_ / 64, {part});  // room for the next put; there is time to move these objects
    trim();
    return true;
}

void Budget::trim() {
    for (const auto& [owner, account] : tenants_) {
        if (account.objects != nullptr) {
            account.objects->trim();
        }
    }
}

}  // namespace farpool
