// Sessions: the leases, pins and preparations that programs hold at a node, and when they lose them.
#include <algorithm>
#include <cerrno>
#include <system_error>

#include "node/hold.hpp"
#include "node/server.hpp"

namespace farpool {

namespace {

// Names an access key in a lease's file.
std::uint64_t owner_of(std::string_view key) { return key.empty() ? 0 : hash64(key.data(), key.size(), 0); }

}  // namespace

Server::Session& Server::bind(std::uint64_t session, std::uint32_t tenant, std::string_view key) {
    const std::uint64_t owner = owner_of(key);
    Session& found = sessions_.try_emplace(session, Session{tenant, owner}).first->second;
    if (found.tenant != tenant || found.owner != owner) {
        throw Denied("the session belongs to another access key or tenant");
    }
    return found;
}

void Server::expect_keys(const std::map<std::string, ExpectedKey>& keys) {
    const Hold hold(mutex_);
    std::map<Quotas::Owner, Quotas::Key> found;
    key_tenants_.clear();
    for (const auto& [name, expected] : keys) {
        found.emplace(Quotas::Owner{expected.tenant, owner_of(name)}, expected.key);
        key_tenants_.emplace(name, expected.tenant);
    }
    quotas_.expect(std::move(found));
}

std::map<std::string, Server::KeyStats> Server::keys() {
    const Hold hold(mutex_);
    std::map<std::string, KeyStats> found;
    for (const auto& [name, tenant] : key_tenants_) {
        found.emplace(name, KeyStats{tenant, quotas_.of_key({tenant, owner_of(name)})});
    }
    return found;
}

// Finds or makes a session, which may have no connection yet.
Server::Session& Server::session_of(std::uint64_t session, std::uint32_t tenant) {
    Session& found = sessions_.try_emplace(session, Session{tenant, 0}).first->second;
    if (found.tenant != tenant) {
        throw Denied("the session belongs to another tenant");
    }
    if (found.connections == 0) {
        found.empty_since = now();
    }
    return found;
}

void Server::hold(std::uint64_t session, std::uint32_t tenant, std::string_view key) {
    const Hold hold(mutex_);
    Session& holder = bind(session, tenant, key);
    if (const std::string refusal = quotas_.connection_refusal(holder.charged()); !refusal.empty()) {
        throw Busy(refusal);
    }
    ++holder.connections;
    quotas_.connect(holder.charged());
}

void Server::drop(std::uint64_t session) {
    const Hold hold(mutex_);
    const auto found = sessions_.find(session);
    if (found == sessions_.end() || found->second.connections == 0) {
        return;
    }
    quotas_.disconnect(found->second.charged());
    if (--found->second.connections == 0) {
        found->second.empty_since = now();
    }
}

std::uint64_t Server::lend(std::uint64_t session, std::uint32_t tenant, std::uint64_t nbytes) {
    std::uint64_t owner = 0;
    {
        const Hold hold(mutex_);
        owner = session_of(session, tenant).owner;
        if (stopped_ || nbytes > budget_.limit()) {
            return 0;
        }
        if (const std::string refusal = quotas_.lease_refusal({tenant, owner}, leases_.of(session).size(), nbytes);
            !refusal.empty()) {
            throw Busy(refusal);
        }
        if (!budget_.may_fix(tenant, nbytes)) {
            throw Busy("what the tenant holds so that it cannot be evicted would be more than its share of " +
                       std::to_string(budget_.share_of_fixed(tenant)) + " bytes");
        }
        if (!budget_.can_be_backed(tenant, segment_header_nbytes + nbytes)) {
            throw std::system_error(ENOSPC, std::generic_category(), settings_.folder);
        }
        if (!budget_.make_room(tenant, nbytes) || !budget_.make_backing_room(tenant, nbytes)) {
            return 0;
        }
        lent_ += nbytes;
        quotas_.lend({tenant, owner}, nbytes);
        budget_.lend(tenant, nbytes);
    }
    // Backing a lease with memory takes long, and the loop goes on meanwhile.
    std::shared_ptr<Lease> lease;
    try {
        // If the system has less memory than the node lends, evict objects for the lease, as for new objects.
        lease = leases_.make(session, tenant, owner, nbytes, [&](std::uint64_t lacking) {
            const Hold hold(mutex_);
            return !stopped_ && budget_.return_backing(tenant, lacking);
        });
    } catch (...) {
        const Hold hold(mutex_);
        uncharge_lease({tenant, owner}, nbytes);
        throw;
    }
    const Hold hold(mutex_);
    if (stopped_) {  // nobody would remove it, or learn of it
        take_lease_back(*lease);
        return 0;
    }
    leases_.add(lease);
    Session& holder = sessions_.try_emplace(session, Session{tenant, owner}).first->second;
    if (holder.connections == 0) {
        holder.empty_since = now();
    }
    return lease->id;
}

void Server::uncharge_lease(const Quotas::Owner& owner, std::uint64_t nbytes) {
    lent_ -= nbytes;
    quotas_.take_back(owner, nbytes);
    budget_.take_back(owner.first, nbytes);
}

std::shared_ptr<Lease> Server::lease_of(std::uint64_t session, std::uint64_t lease) const {
    const auto holder = sessions_.find(session);
    return holder == sessions_.end() ? nullptr : leases_.find(session, holder->second.tenant, holder->second.owner, lease);
}

void Server::take_lease_back(Lease& lease) {
    uncharge_lease({lease.tenant, lease.owner}, lease.nbytes);
    leases_.remove(lease);
}

// Takes back leases whose files were extended or truncated, which a session can do as it may write its lease's file.
void Server::check_leases() {
    for (auto& lease : leases_.all()) {
        if (!lease->is_as_lent()) {
            note("taken_back", lease->session,
                 "the file of a lease of " + std::to_string(lease->nbytes) +
                     " bytes was made longer or cut off, so the lease has ended");
            take_lease_back(*lease);
            freeing_->let_go(std::move(lease));
        }
    }
}

bool Server::release(std::uint64_t session, std::uint64_t lease) {
    std::shared_ptr<Lease> found;  // its memory is freed when the loop goes on: for gigabytes that takes seconds
    const Hold hold(mutex_);
    found = lease_of(session, lease);
    if (found == nullptr) {
        return false;
    }
    take_lease_back(*found);
    return true;
}

std::vector<std::pair<std::uint64_t, std::uint64_t>> Server::leases(std::uint64_t session) {
    const Hold hold(mutex_);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> found;
    for (const auto& lease : leases_.of(session)) {
        if (lease_of(session, lease->id) != nullptr) {
            found.emplace_back(lease->id, lease->nbytes);
        }
    }
    return found;
}

std::string Server::lease_path(std::uint64_t session, std::uint64_t lease) {
    const Hold hold(mutex_);
    const std::shared_ptr<Lease> found = lease_of(session, lease);
    return found == nullptr ? std::string() : found->segment.path;
}

int Server::lease_file(std::uint64_t session, std::uint64_t lease) {
    const Hold hold(mutex_);
    const std::shared_ptr<Lease> found = lease_of(session, lease);
    return found == nullptr ? -1 : found->segment.file.duplicate();
}

void Server::end_preparation(const Session& session, const Place& place, const Preparing& preparing) {
    objects_.at(place.first)->abort(preparing.extent, preparing.serial);
    objects_.at(place.first)->count_lent_out(-1);
    quotas_.end_preparation(session.charged(), preparing.nbytes);
}

void Server::unpin(Session& session, std::multimap<Place, Pinned>::iterator pin) {
    const auto& [place, pinned] = *pin;
    objects_.at(place.first)->unpin(pinned.extent);
    objects_.at(place.first)->count_lent_out(-1);
    quotas_.unpin(session.charged(), pinned.extent);
    if (pinned.ending != endings_.end()) {
        endings_.erase(pinned.ending);
    }
    session.pins.erase(pin);
}

// Frees the pins whose time to live has ended.
void Server::end_pins() {
    const Clock::time_point until = now();
    while (!endings_.empty() && endings_.begin()->first <= until) {
        const auto ending = endings_.begin();
        Session& session = sessions_.at(ending->second.first);
        const auto [first, last] = session.pins.equal_range(ending->second.second);
        unpin(session, std::find_if(first, last, [&](const auto& pin) { return pin.second.ending == ending; }));
    }
}

// Ends preparations left by closed connections. Not at once, as the program may still be writing there.
void Server::abort_left_alone(Session& session) {
    for (auto found = session.prepared.begin(); found != session.prepared.end();) {
        const auto& [place, preparing] = *found;
        if (preparing.left_alone && now() - *preparing.left_alone > seconds(settings_.grace)) {
            end_preparation(session, place, preparing);
            found = session.prepared.erase(found);
        } else {
            ++found;
        }
    }
}

void Server::free_session(std::uint64_t id, Session& session) {
    const std::size_t pins = session.pins.size();
    while (!session.pins.empty()) {
        unpin(session, session.pins.begin());
    }
    for (const auto& [place, preparing] : session.prepared) {
        end_preparation(session, place, preparing);
    }
    if (const auto objects = objects_.find(session.tenant); objects != objects_.end() && objects->second->visits().has(id)) {
        objects->second->end_visits(id);
        budget_.take_back(session.tenant, objects->second->visits().session_nbytes());
    }
    auto leases = leases_.of(id);
    for (auto& lease : leases) {
        take_lease_back(*lease);
        freeing_->let_go(std::move(lease));
    }
    if (pins > 0 || !session.prepared.empty() || !leases.empty()) {
        note("freed", id,
             "a session that has gone held " + std::to_string(pins) + " pins, " + std::to_string(session.prepared.size()) +
                 " unfinished publishes and " + std::to_string(leases.size()) + " leases");
    }
}

}  // namespace farpool
