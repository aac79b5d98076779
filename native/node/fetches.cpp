// Replies whose payload lies in the file: they keep their place in the order of a connection and are completed when it has been read.
#include "node/server.hpp"

namespace farpool {

namespace {

// Bytes that one connection may have read from the file and not taken yet; one object may always.
constexpr std::uint64_t most_fetched = std::uint64_t{16} << 20;

}  // namespace

void Server::fetch(Peer& peer, const Found& found) {
    reply(peer, Status::done, found.generation);
    Reply& answer = peer.replies.back();
    answer.held_object = found.offset;
    peer.objects->hold(found);
    // What is asked for a second time comes back into memory; a pin needs it there.
    const bool promote = found.visited || static_cast<Op>(peer.header.op) == Op::pin;
    const Fetch fetch{peer.socket.fd(),  peer.serial,      ++tickets_,   peer.tenant, found.offset,
                      found.generation, found.nbytes, found.block, promote};
    answer.header.payload_nbytes = found.nbytes;
    answer.header.payload_crc = found.crc;
    if (found.aside != nullptr) {
        answer.aside = found.aside;
        complete(peer, answer, fetch, true);
        return;
    }
    answer.ticket = fetch.ticket;
    peer.waiting.push_back(fetch);
    start_fetches(peer);
}

void Server::start_fetches(Peer& peer) {
    while (!peer.waiting.empty()) {
        const Fetch fetch = peer.waiting.front();
        if (peer.fetching > 0 && peer.fetching + fetch.nbytes > most_fetched) {
            return;
        }
        peer.waiting.pop_front();
        for (Reply& answer : peer.replies) {
            if (answer.ticket == fetch.ticket) {
                answer.aside = std::make_shared<Aside>(fetch.nbytes);
                answer.fetched = fetch.nbytes;
                peer.fetching += fetch.nbytes;
                fetches_.emplace(shelf_->read(fetch.block, answer.aside), fetch);
            }
        }
    }
}

void Server::finish_jobs() {
    if (shelf_ == nullptr) {
        return;
    }
    for (const Shelf::Done& done : shelf_->done()) {
        bool known = false;
        for (const auto& [tenant, objects] : objects_) {
            known = known || objects->written(done.job, done.ok);
        }
        if (!known) {
            fetched(done.job, done.ok);
        }
    }
}

void Server::fetched(std::uint64_t job, bool ok) {
    const auto found = fetches_.find(job);
    const Fetch fetch = found->second;
    fetches_.erase(found);
    if (!ok) {
        note("lost", 0, "an object could not be read from the file " + settings_.shelf);
        objects_.at(fetch.tenant)->lose(fetch.offset, fetch.generation);
    }
    const auto peer = peers_.find(fetch.fd);
    if (peer == peers_.end() || peer->second->serial != fetch.serial || peer->second->dead) {
        return;
    }
    for (Reply& answer : peer->second->replies) {
        if (answer.ticket == fetch.ticket) {
            complete(*peer->second, answer, fetch, ok);
        }
    }
    flush(*peer->second);
    if (!peer->second->dead) {
        watch(*peer->second);
    }
}

void Server::complete(Peer& peer, Reply& answer, const Fetch& fetch, bool ok) {
    answer.ticket = 0;
    const bool pins = static_cast<Op>(answer.header.op) == Op::pin;
    const std::optional<Found> promoted =
        ok && fetch.promote ? peer.objects->promote(fetch.offset, fetch.generation, *answer.aside) : std::nullopt;
    if (ok && !pins) {
        answer.payload = answer.aside->data();
        seal(answer.header, nullptr, 0);
        return;
    }
    answer.header.payload_nbytes = 0;
    answer.header.payload_crc = 0;
    answer.aside = nullptr;
    let_go(peer, answer);
    if (promoted) {
        pin(peer, *promoted, answer);
        return;
    }
    answer.header.status = static_cast<std::uint16_t>(ok ? Status::full : Status::missing);
    seal(answer.header, nullptr, 0);
}

}  // namespace farpool
