// What programs hold at a node: leases, pins, preparations, and when they lose them.
#include "node/hold.hpp"
#include "node/server.hpp"

namespace farpool {

void Server::hold(std::uint64_t session) {
    const Hold hold(mutex_);
    ++sessions_[session].connections;
}

void Server::drop(std::uint64_t session) {
    const Hold hold(mutex_);
    const auto found = sessions_.find(session);
    if (found != sessions_.end() && found->second.connections > 0 && --found->second.connections == 0) {
        found->second.empty_since = Clock::now();
    }
}

std::uint64_t Server::reclaimable() const {
    std::uint64_t nbytes = 0;
    for (const auto& [tenant, objects] : objects_) {
        nbytes += objects->reclaimable();
    }
    return nbytes;
}

std::uint64_t Server::lend(std::uint64_t session, std::uint32_t tenant, std::uint64_t nbytes) {
    {
        const Hold hold(mutex_);
        if (stopped_ || nbytes > budget_.limit || budget_.left() + reclaimable() < nbytes) {
            return 0;
        }
        std::uint64_t physical = lent_ + nbytes;
        for (const auto& [owner, objects] : objects_) {
            objects->make_room(nbytes);
            physical += objects->backed();
        }
        if (budget_.left() < nbytes) {
            return 0;
        }
        if (physical > budget_.limit) {
            for (const auto& [owner, objects] : objects_) {
                objects->trim();
            }
        }
        lent_ += nbytes;
        budget_.used += nbytes;
    }
    // Backing a lease with memory takes long, and the loop goes on meanwhile.
    std::shared_ptr<Lease> lease;
    try {
        lease = leases_.make(session, tenant, nbytes);
    } catch (...) {
        const Hold hold(mutex_);
        lent_ -= nbytes;
        budget_.used -= nbytes;
        throw;
    }
    const Hold hold(mutex_);
    if (stopped_) {  // nobody would remove it, or learn of it
        take_lease_back(*lease);
        return 0;
    }
    leases_.add(lease);
    Session& owner = sessions_[session];
    if (owner.connections == 0) {
        owner.empty_since = Clock::now();
    }
    return lease->id;
}

void Server::take_lease_back(const Lease& lease) {
    lent_ -= lease.nbytes();
    budget_.used -= lease.nbytes();
    leases_.remove(lease);
}

bool Server::release(std::uint64_t session, std::uint64_t lease) {
    std::shared_ptr<Lease> found;  // its memory is freed when the loop goes on: for gigabytes that takes seconds
    const Hold hold(mutex_);
    found = leases_.find(session, lease);
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
        found.emplace_back(lease->id, lease->nbytes());
    }
    return found;
}

std::string Server::lease_path(std::uint64_t session, std::uint64_t lease) {
    const Hold hold(mutex_);
    const std::shared_ptr<Lease> found = leases_.find(session, lease);
    return found == nullptr ? std::string() : found->segment.path;
}

void Server::end_preparation(const Place& place, const Preparing& preparing) {
    objects_.at(place.first)->abort(preparing.extent, preparing.generation);
    objects_.at(place.first)->count_lent_out(-1);
}

// A connection that was given up leaves its preparations behind. Not ended at once: the program may be writing there still.
void Server::abort_left_alone(Session& session) {
    const Clock::time_point now = Clock::now();
    for (auto found = session.prepared.begin(); found != session.prepared.end();) {
        const auto& [place, preparing] = *found;
        if (preparing.left_alone && now - *preparing.left_alone > seconds(settings_.grace)) {
            end_preparation(place, preparing);
            found = session.prepared.erase(found);
        } else {
            ++found;
        }
    }
}

void Server::free_session(std::uint64_t id, Session& session) {
    for (const auto& [place, pin] : session.pins) {
        objects_.at(place.first)->drop(pin.extent);
        objects_.at(place.first)->count_lent_out(-1);
    }
    for (const auto& [place, preparing] : session.prepared) {
        end_preparation(place, preparing);
    }
    auto leases = leases_.of(id);
    for (auto& lease : leases) {
        take_lease_back(*lease);
        freeing_->let_go(std::move(lease));
    }
    if (!session.pins.empty() || !session.prepared.empty() || !leases.empty()) {
        note("freed", id, "a session that has gone held " + std::to_string(session.pins.size()) + " pins, " +
                              std::to_string(session.prepared.size()) + " unfinished publishes and " +
                              std::to_string(leases.size()) + " leases");
    }
}

}  // namespace farpool
