#include "node/sessions.hpp"

#include <algorithm>
#include <chrono>
#include <tuple>

#include "core/hash.hpp"
#include "node/refusals.hpp"

namespace farpool {

namespace {

// Stands for an access key, also in the name of a lease's file.
std::uint64_t owner_of(std::string_view key) { return key.empty() ? 0 : hash64(key.data(), key.size(), 0); }

}  // namespace

void Sessions::expect_keys(const std::map<std::string, ExpectedKey>& keys) {
    std::map<Quotas::Owner, Quotas::Key> found;
    key_tenants_.clear();
    key_names_.clear();
    for (const auto& [name, expected] : keys) {
        found.emplace(Quotas::Owner{expected.tenant, owner_of(name)}, expected.key);
        key_tenants_.emplace(name, expected.tenant);
        key_names_.emplace(Quotas::Owner{expected.tenant, owner_of(name)}, name);
    }
    quotas_.expect(std::move(found));
}

std::map<std::string, Sessions::KeyStats> Sessions::keys() const {
    std::map<std::string, KeyStats> found;
    for (const auto& [name, tenant] : key_tenants_) {
        found.emplace(name, KeyStats{tenant, quotas_.of_key({tenant, owner_of(name)})});
    }
    return found;
}

Quotas::Owner Sessions::bind(std::uint64_t session, std::uint32_t tenant, std::string_view key) {
    const Quotas::Owner owner{tenant, owner_of(key)};
    if (sessions_.try_emplace(session, Session{owner}).first->second.owner != owner) {
        throw Denied("the session belongs to another access key or tenant");
    }
    return owner;
}

Quotas::Owner Sessions::open(std::uint64_t session, std::uint32_t tenant) {
    Session& found = sessions_.try_emplace(session, Session{{tenant, 0}}).first->second;
    if (found.owner.first != tenant) {
        throw Denied("the session belongs to another tenant");
    }
    note_empty(found);
    return found.owner;
}

void Sessions::adopt(const Lease& lease) {
    sessions_.try_emplace(lease.session, Session{{lease.tenant, lease.owner}}).first->second.empty_since = deadlines_.now();
}

void Sessions::connect(std::uint64_t session, bool refuses) {
    Session& found = sessions_.at(session);
    if (const std::string refusal = refuses ? quotas_.connection_refusal(found.owner) : std::string(); !refusal.empty()) {
        throw Busy(refusal);
    }
    ++found.connections;
    quotas_.connect(found.owner);
}

void Sessions::disconnect(std::uint64_t session) {
    const auto found = sessions_.find(session);
    if (found == sessions_.end() || found->second.connections == 0) {
        return;
    }
    quotas_.disconnect(found->second.owner);
    --found->second.connections;
    note_empty(found->second);
}

void Sessions::leave(const Client& client) {
    for (auto& [place, preparation] : sessions_.at(client.session).prepared) {
        if (preparation.connection == client.number) {
            preparation.left_at = deadlines_.now();
        }
    }
    disconnect(client.session);
}

int Sessions::open_visits(std::uint64_t session, std::uint32_t tenant) {
    open(session, tenant);
    Visits& visits = tenants_.of(tenant).visits();
    const std::uint64_t nbytes = visits.has(session) ? 0 : visits.session_nbytes();
    if (nbytes > 0 && (visits.sessions() >= Visits::sessions_max || !budget_.may_fix(tenant, nbytes) ||
                       !budget_.make_room(tenant, nbytes) || !budget_.make_backing_room(tenant, nbytes))) {
        throw Busy("at most " + std::to_string(Visits::sessions_max) +
                   " sessions of a tenant may map its objects, and each takes " + std::to_string(nbytes) +
                   " bytes of its share for marks of visits");
    }
    const int file = visits.open(session);
    budget_.lend(tenant, nbytes);
    return file;
}

std::shared_ptr<Lease> Sessions::lease(std::uint64_t session, std::uint64_t lease) const {
    const auto found = sessions_.find(session);
    return found == sessions_.end() ? nullptr : lending_.find(session, found->second.owner, lease);
}

std::shared_ptr<Lease> Sessions::lease_or_extent(std::uint64_t session, std::uint64_t lease) const {
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) {
        return nullptr;
    }
    const auto claim = found->second.claims.find(lease);
    return claim != found->second.claims.end() ? claim->second.present() : this->lease(session, lease);
}

void Sessions::add_lease(std::shared_ptr<Lease> lease) {
    note_empty(sessions_.try_emplace(lease->session, Session{{lease->tenant, lease->owner}}).first->second);
    lending_.add(std::move(lease));
}

LeaseAccess Sessions::access(std::uint64_t session, std::uint64_t lease, std::uint32_t right, Clock::time_point now) const {
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) {
        return {};
    }
    const Quotas::Owner& owner = found->second.owner;
    if (std::shared_ptr<Lease> own = lending_.find(session, owner, lease)) {
        return {std::move(own), Status::done};
    }
    if (const auto claim = found->second.claims.find(lease); claim != found->second.claims.end()) {
        return claim->second.access(right, now);
    }
    const std::shared_ptr<Extent> extent = lending_.extents().find(lease);
    if (extent == nullptr || Quotas::Owner{extent->tenant, extent->owner} != owner) {
        return {};
    }
    return {nullptr, Status::lapsed, "this session has shown no ticket for the extent since the node started; show it again"};
}

void Sessions::claim(std::uint64_t session, const PoolLease& lease, std::vector<Claim> claims) {
    Session& found = sessions_.at(session);
    // Claims of ended extents go, too, or a session that lives for long would gather them.
    std::erase_if(found.claims,
                  [&](const auto& entry) { return entry.second.lease == lease || entry.second.present() == nullptr; });
    for (Claim& claim : claims) {
        if (const std::shared_ptr<Extent> extent = claim.present()) {
            found.claims.insert_or_assign(extent->id, std::move(claim));
        }
    }
}

bool Sessions::release_claim(std::uint64_t session, std::uint64_t lease) {
    const auto found = sessions_.find(session);
    return found != sessions_.end() && found->second.claims.erase(lease) > 0;
}

std::size_t Sessions::end_claims(std::uint64_t lease) {
    std::size_t ended = 0;
    for (auto& [number, session] : sessions_) {
        ended += session.claims.erase(lease);
    }
    return ended;
}

std::vector<std::shared_ptr<Extent>> Sessions::claimed(std::uint64_t session) const {
    std::vector<std::shared_ptr<Extent>> extents;
    if (const auto found = sessions_.find(session); found != sessions_.end()) {
        for (const auto& [lease, claim] : found->second.claims) {
            if (std::shared_ptr<Extent> extent = claim.present()) {
                extents.push_back(std::move(extent));
            }
        }
    }
    return extents;
}

std::string Sessions::key_of(const Quotas::Owner& owner) const {
    const auto found = key_names_.find(owner);
    return found == key_names_.end() ? std::string() : found->second;
}

Sessions::Pin Sessions::pin(const Client& client, const Found& found, std::uint64_t ttl_ms) {
    Session& session = sessions_.at(client.session);
    const std::uint64_t nbytes = client.objects.ram_nbytes(found);
    if (std::string refusal = quotas_.pin_refusal(session.owner, session.pins.size(), found.offset, nbytes); !refusal.empty()) {
        return {0, std::move(refusal)};
    }
    if (!client.objects.may_fix(found)) {
        return {0, beyond_share};
    }
    session.last_pin += session.last_pin + 1 == 0 ? 2 : 1;  // never 0, which stands for any pin
    const PinPlace place{client.tenant, found.payload, session.last_pin};
    const auto ending = ttl_ms == 0 ? endings_.end()
                                    : endings_.emplace(deadlines_.now() + seconds(static_cast<double>(ttl_ms) / 1000),
                                                       std::pair(client.session, place));
    client.objects.pin(found);
    client.objects.count_lent_out(1);
    quotas_.pin(session.owner, found.offset, nbytes);
    session.pins.emplace(place, Pinned{found.offset, found.serial, ending});
    if (session.pins.size() == 1) {
        pinning_.emplace(client.tenant, client.session);
    }
    return {session.last_pin};
}

bool Sessions::unpin(const Client& client, std::uint64_t payload, std::uint64_t serial, std::uint64_t number) {
    Session& session = sessions_.at(client.session);
    constexpr std::uint32_t last_number = ~std::uint32_t{0};
    if (number > last_number) {
        return false;
    }
    const auto first = session.pins.lower_bound({client.tenant, payload, static_cast<std::uint32_t>(number)});
    const auto last =
        session.pins.upper_bound({client.tenant, payload, number == 0 ? last_number : static_cast<std::uint32_t>(number)});
    const auto found = std::find_if(first, last, [&](const auto& pin) { return pin.second.serial == serial; });
    if (found == last) {
        return false;
    }
    unpin(client.session, session, found);
    return true;
}

void Sessions::unpin(std::uint64_t id, Session& session, Pins::iterator pin) {
    const auto& [place, pinned] = *pin;
    const std::uint32_t tenant = std::get<0>(place);
    Catalogue& objects = tenants_.at(tenant);
    objects.unpin(pinned.extent);
    objects.count_lent_out(-1);
    if (!pinned.ended) {
        quotas_.unpin(session.owner, pinned.extent);
    }
    if (session.pins.size() == 1) {
        pinning_.erase({tenant, id});
    }
    if (pinned.ending != endings_.end()) {
        endings_.erase(pinned.ending);
    }
    session.pins.erase(pin);
}

ListedPin Sessions::listed(std::uint64_t id, const Session& session, const Pins::value_type& pin) const {
    const auto& [place, pinned] = pin;
    const auto& [tenant, payload, number] = place;
    ListedPin found{{tenant, id, payload, number}, pinned.serial, key_of(session.owner), {}, 0, {}, pinned.ended};
    std::tie(found.key, found.nbytes) = tenants_.at(tenant).held(pinned.extent);
    if (pinned.ending != endings_.end()) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(pinned.ending->first - deadlines_.now());
        found.left_ms = static_cast<std::uint64_t>(std::max<std::int64_t>(left.count(), 0));
    }
    return found;
}

std::vector<ListedPin> Sessions::pins(std::optional<std::uint32_t> tenant, const PinId& after, std::size_t limit) const {
    const auto& [of, in, payload, number] = after;
    std::vector<ListedPin> found;
    const std::pair<std::uint32_t, std::uint64_t> from{of, in};
    for (auto one = pinning_.lower_bound(tenant && *tenant > of ? std::pair{*tenant, std::uint64_t{0}} : from);
         one != pinning_.end() && (!tenant || one->first == *tenant) && found.size() < limit; ++one) {
        const Session& session = sessions_.at(one->second);
        auto pin = *one == from ? session.pins.upper_bound({of, payload, number}) : session.pins.begin();
        for (; pin != session.pins.end() && found.size() < limit; ++pin) {
            found.push_back(listed(one->second, session, *pin));
        }
    }
    return found;
}

std::optional<ListedPin> Sessions::end_pin(const PinId& id, std::uint64_t serial, std::string_view reason) {
    const auto& [tenant, number_of_session, payload, number] = id;
    const auto session = sessions_.find(number_of_session);
    if (session == sessions_.end()) {
        return std::nullopt;
    }
    const auto [first, last] = session->second.pins.equal_range({tenant, payload, number});
    const auto pin = std::find_if(first, last, [&](const auto& one) { return one.second.serial == serial; });
    if (pin == last) {
        return std::nullopt;
    }
    ListedPin before = listed(session->first, session->second, *pin);
    if (!pin->second.ended) {
        quotas_.unpin(session->second.owner, pin->second.extent);
        pin->second.ended = true;
        events_.note("pin_ended", session->first,
                     "an administrator ended a pin of " + std::to_string(before.nbytes) + " bytes of tenant " +
                         std::to_string(tenant) + ": " + std::string(reason));
    }
    return before;
}

std::string Sessions::preparation_refusal(const Client& client, std::uint64_t nbytes) const {
    return quotas_.preparation_refusal(client.owner, sessions_.at(client.session).prepared.size(), nbytes);
}

void Sessions::add_preparation(const Client& client, const Found& prepared, std::uint64_t nbytes) {
    sessions_.at(client.session)
        .prepared.emplace(Place{client.tenant, prepared.payload},
                          Preparation{prepared.offset, prepared.serial, client.number, nbytes});
    quotas_.prepare(client.owner, nbytes);
    client.objects.count_lent_out(1);
}

const Sessions::Preparation* Sessions::preparation(const Client& client, std::uint64_t payload, std::uint64_t serial) const {
    const auto& prepared = sessions_.at(client.session).prepared;
    const auto found = prepared.find(Place{client.tenant, payload});
    return found == prepared.end() || found->second.serial != serial ? nullptr : &found->second;
}

void Sessions::end_preparation(const Client& client, std::uint64_t payload) {
    Session& session = sessions_.at(client.session);
    const auto found = session.prepared.find(Place{client.tenant, payload});
    uncharge(session, found->first, found->second);
    session.prepared.erase(found);
}

void Sessions::uncharge(const Session& session, const Place& place, const Preparation& preparation) {
    Catalogue& objects = tenants_.at(place.first);
    objects.abort(preparation.extent, preparation.serial);
    objects.count_lent_out(-1);
    quotas_.end_preparation(session.owner, preparation.nbytes);
}

std::string Sessions::charge_area(const Client& client, std::uint64_t nbytes) {
    Session& session = sessions_.at(client.session);
    std::string refusal = quotas_.area_refusal(session.owner, session.areas, nbytes);
    if (refusal.empty() && (!budget_.may_fix(client.tenant, nbytes) || !budget_.make_room(client.tenant, nbytes) ||
                            !budget_.make_backing_room(client.tenant, nbytes))) {
        refusal = "the tenant's share has no room for a publish area of " + std::to_string(nbytes) + " bytes";
    }
    if (refusal.empty()) {
        budget_.lend(client.tenant, nbytes);
        ++session.areas;
        quotas_.lend_area(session.owner, nbytes);
    }
    return refusal;
}

void Sessions::uncharge_area(const Client& client, std::uint64_t nbytes) {
    Session& session = sessions_.at(client.session);
    budget_.take_back(client.tenant, nbytes);
    --session.areas;
    quotas_.end_area(session.owner, nbytes);
}

void Sessions::tidy() {
    end_pins();
    const Clock::time_point now = deadlines_.now();
    for (auto session = sessions_.begin(); session != sessions_.end();) {
        if (session->second.connections == 0 && now - session->second.empty_since > deadlines_.grace()) {
            close(session->first, session->second);
            session = sessions_.erase(session);
        } else {
            end_left(session->second);
            ++session;
        }
    }
}

void Sessions::end_pins() {
    const Clock::time_point until = deadlines_.now();
    while (!endings_.empty() && endings_.begin()->first <= until) {
        const auto ending = endings_.begin();
        Session& session = sessions_.at(ending->second.first);
        const auto [first, last] = session.pins.equal_range(ending->second.second);
        unpin(ending->second.first, session,
              std::find_if(first, last, [&](const auto& pin) { return pin.second.ending == ending; }));
    }
}

// Ends preparations of closed connections. We wait before we do, because the program may still be writing there.
void Sessions::end_left(Session& session) {
    for (auto found = session.prepared.begin(); found != session.prepared.end();) {
        const auto& [place, preparation] = *found;
        if (preparation.left_at && deadlines_.now() - *preparation.left_at > deadlines_.grace()) {
            uncharge(session, place, preparation);
            found = session.prepared.erase(found);
        } else {
            ++found;
        }
    }
}

void Sessions::close(std::uint64_t id, Session& session) {
    const std::size_t pins = session.pins.size();
    while (!session.pins.empty()) {
        unpin(id, session, session.pins.begin());
    }
    for (const auto& [place, preparation] : session.prepared) {
        uncharge(session, place, preparation);
    }
    const std::uint32_t tenant = session.owner.first;
    if (Catalogue* const objects = tenants_.find(tenant); objects != nullptr && objects->visits().has(id)) {
        objects->end_visits(id);
        budget_.take_back(tenant, objects->visits().session_nbytes());
    }
    const std::size_t leases = lending_.end_all(id);
    if (pins > 0 || !session.prepared.empty() || leases > 0) {
        events_.note("freed", id,
                     "a session that has gone held " + std::to_string(pins) + " pins, " +
                         std::to_string(session.prepared.size()) + " unfinished publishes and " + std::to_string(leases) +
                         " leases");
    }
}

}  // namespace farpool
