#include "node/quotas.hpp"

#include <sys/resource.h>

#include <algorithm>

namespace farpool {

namespace {

std::string counted(std::uint64_t count, const char* things) { return std::to_string(count) + " " + things; }

// Number of files that the process may have open. We ask each time, because other programs can change it.
std::uint64_t files_max() {
    rlimit limit{};
    return getrlimit(RLIMIT_NOFILE, &limit) == 0 ? limit.rlim_cur : 1024;
}

}  // namespace

void Quotas::expect(std::map<Owner, Key> keys) {
    keys_ = std::move(keys);
    tenants_.clear();
    for (const auto& [owner, key] : keys_) {
        Expected& of_tenant = tenants_[owner.first];
        ++of_tenant.keys;
        of_tenant.memory_keys += key.has_memory ? 1 : 0;
    }
}

Quotas::Expected Quotas::expected_of(std::uint32_t tenant) const {
    const auto found = tenants_.find(tenant);
    return found == tenants_.end() ? Expected{} : found->second;
}

Quotas::Charges Quotas::of_key(const Owner& owner) const {
    const auto found = usages_.find(owner);
    return found == usages_.end() ? Charges{} : found->second.charges;
}

Quotas::Charges Quotas::of_tenant(std::uint32_t tenant) const {
    const auto found = of_tenants_.find(tenant);
    return found == of_tenants_.end() ? Charges{} : found->second;
}

void Quotas::charge(const Owner& owner, std::size_t Charges::* what, std::uint64_t nbytes) {
    Charges& of_key = usages_[owner].charges;
    ++(of_key.*what);
    of_key.nbytes += nbytes;
    ++(of_tenants_[owner.first].*what);
}

void Quotas::discharge(const Owner& owner, std::size_t Charges::* what, std::uint64_t nbytes) {
    Charges& of_key = usages_.at(owner).charges;
    --(of_key.*what);
    of_key.nbytes -= nbytes;
    --(of_tenants_.at(owner.first).*what);
    if (of_key.pins + of_key.preparations + of_key.leases + of_key.connections + of_key.areas == 0) {
        usages_.erase(owner);
    }
}

void Quotas::pin(const Owner& owner, std::uint64_t extent, std::uint64_t nbytes) {
    Pinned& object = usages_[owner].pinned.try_emplace(extent, Pinned{nbytes, 0}).first->second;
    charge(owner, &Charges::pins, object.pins++ == 0 ? nbytes : 0);
}

void Quotas::unpin(const Owner& owner, std::uint64_t extent) {
    auto& pinned = usages_.at(owner).pinned;
    const auto object = pinned.find(extent);
    std::uint64_t nbytes = 0;
    if (--object->second.pins == 0) {
        nbytes = object->second.nbytes;
        pinned.erase(object);
    }
    discharge(owner, &Charges::pins, nbytes);
}

std::string Quotas::refusal(const Owner& owner, std::size_t Charges::* what, std::size_t of_session, const char* things) const {
    const std::size_t of_tenant = tenant_max.*what;
    const std::size_t of_key = expected_of(owner.first).memory_keys > 1 ? of_tenant / 2 : of_tenant;
    if (of_session >= session_max.*what) {
        return "the session has " + counted(of_session, things) + ", and may not have more";
    }
    if (this->of_key(owner).*what >= of_key) {
        return "the access key has " + counted(of_key, things) + ", and may not have more in all its sessions";
    }
    if (this->of_tenant(owner.first).*what >= of_tenant) {
        return "the tenant has " + counted(of_tenant, things) + ", and may not have more with all its access keys";
    }
    return {};
}

// Reason to refuse a key `nbytes` more; empty if they are allowed. Pins leave an eighth to publishes, as in a tenant's share.
// One publish is always allowed.
std::string Quotas::nbytes_refusal(const Owner& owner, std::uint64_t nbytes, Use use) const {
    const auto key = keys_.find(owner);
    const bool is_told = key != keys_.end() && key->second.nbytes > 0;
    if (!is_told && expected_of(owner.first).memory_keys <= 1) {
        return {};  // only the tenant's share limits it
    }
    if (nbytes > budget_.limit()) {
        return {};  // the caller refuses it for another reason
    }
    const std::uint64_t all = is_told ? key->second.nbytes : budget_.share_of_fixed(owner.first) / 2;
    const std::uint64_t most = use == Use::pin ? all - all / 8 : all;
    const std::uint64_t has = of_key(owner).nbytes;
    if ((nbytes <= most && has <= most - nbytes) || (use == Use::publish && has == 0)) {
        return {};
    }
    const std::string rule = is_told ? "its bytes in the node's keys file"
                                     : "half of its tenant's share; its bytes in the node's keys file may say more";
    return "the access key may hold " + counted(most, "bytes") +
           (use == Use::pin ? " before it pins more (7/8 of " : " in leases, pins and unfinished publishes (") + rule +
           "), it has " + std::to_string(has) + " and asks for " + std::to_string(nbytes);
}

// Reason to refuse one more descriptor; empty if it is allowed. Each tenant that may connect has an equal part of three
// quarters of the process's descriptors. The rest is for handshakes and for the tenants' own files.
std::string Quotas::descriptor_refusal(const Owner& owner) const {
    const std::uint64_t files = files_max();
    const std::uint64_t of_tenant = files / 4 * 3 / std::max<std::uint64_t>(tenants_.size(), 1);
    const std::uint64_t of_key = expected_of(owner.first).keys > 1 ? of_tenant / 2 : of_tenant;
    const auto has = [](const Charges& charges) { return charges.connections + charges.leases + charges.areas; };
    const bool is_key = has(this->of_key(owner)) >= of_key;
    if (!is_key && has(this->of_tenant(owner.first)) < of_tenant) {
        return {};
    }
    return std::string(is_key ? "the access key" : "the tenant") + " has " +
           counted(is_key ? of_key : of_tenant, "connections, leases and publish areas") + ", its part of the " +
           counted(files, "files that the node may have open");
}

std::string Quotas::pin_refusal(const Owner& owner, std::size_t of_session, std::uint64_t extent, std::uint64_t nbytes) const {
    std::string text = refusal(owner, &Charges::pins, of_session, "pins");
    if (text.empty()) {
        const auto usage = usages_.find(owner);
        const bool is_pinned = usage != usages_.end() && usage->second.pinned.contains(extent);
        text = is_pinned ? std::string() : nbytes_refusal(owner, nbytes, Use::pin);
    }
    return text;
}

std::string Quotas::preparation_refusal(const Owner& owner, std::size_t of_session, std::uint64_t nbytes) const {
    std::string text = refusal(owner, &Charges::preparations, of_session, "unfinished publishes");
    return text.empty() ? nbytes_refusal(owner, nbytes, Use::publish) : text;
}

std::string Quotas::lease_refusal(const Owner& owner, std::size_t of_session, std::uint64_t nbytes) const {
    std::string text = refusal(owner, &Charges::leases, of_session, "leases");
    text = text.empty() ? nbytes_refusal(owner, nbytes, Use::lease) : text;
    return text.empty() ? descriptor_refusal(owner) : text;
}

std::string Quotas::area_refusal(const Owner& owner, std::size_t of_session, std::uint64_t nbytes) const {
    std::string text = refusal(owner, &Charges::areas, of_session, "publish areas");
    text = text.empty() ? nbytes_refusal(owner, nbytes, Use::lease) : text;
    return text.empty() ? descriptor_refusal(owner) : text;
}

std::string Quotas::connection_refusal(const Owner& owner) const {
    const std::size_t of_tenant = tenant_max.connections;
    const std::size_t of_key = expected_of(owner.first).keys > 1 ? of_tenant / 2 : of_tenant;
    if (this->of_key(owner).connections >= of_key) {
        return "the access key has " + counted(of_key, "connections open, and may not have more");
    }
    if (this->of_tenant(owner.first).connections >= of_tenant) {
        return "the tenant has " + counted(of_tenant, "connections open, and may not have more with all its access keys");
    }
    return descriptor_refusal(owner);
}

}  // namespace farpool
