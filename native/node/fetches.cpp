// Replies whose payload lies in the NVMe file: they keep their place in a connection's order and are completed once it is read.
#include "node/hold.hpp"
#include "node/server.hpp"

namespace farpool {

namespace {

// Bytes read from the file that one connection may have waiting in replies; one object is always allowed.
constexpr std::uint64_t most_fetched = std::uint64_t{16} << 20;

}  // namespace

void Server::fetch(Peer& peer, const Found& found, std::string_view key, std::uint64_t ttl_ms) {
    peer.waiting.push_back(expect(peer, peer.replies.back(), found, key, ttl_ms));
    start_fetches(peer);
}

// Marks a reply as waiting for its payload from the NVMe file, and returns the read to make for it.
Fetch Server::expect(Peer& peer, Reply& answer, const Found& found, std::string_view key, std::uint64_t ttl_ms) {
    peer.objects->hold(found);
    answer.held_object = found.offset;
    answer.header.serial = found.serial;
    answer.header.payload_nbytes = found.nbytes;
    answer.header.payload_crc = found.crc;
    answer.ticket = ++tickets_;
    seal(answer.header, answer.meta.data(), static_cast<std::uint32_t>(answer.meta.size()));
    // An object that is asked for a second time comes back into memory; a pin needs it there.
    const bool promote = found.visited || static_cast<Op>(answer.header.op) == Op::pin;
    return {peer.socket.fd(), peer.number, answer.ticket, std::string(key), found.offset, found.nbytes,
            found.block,      promote,     ttl_ms};
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
                start_fetch(peer, answer, fetch);
            }
        }
    }
}

void Server::start_fetch(Peer& peer, Reply& answer, const Fetch& fetch) {
    const Place place{peer.tenant, fetch.offset};
    auto reading = readings_.find(place);
    if (reading == readings_.end()) {
        auto into = std::make_shared<AlignedBuffer>(fetch.nbytes);
        reading = readings_.emplace(place, Reading{into, {}}).first;
        peer.objects->hold_again(
            fetch.offset);  // its blocks stay its own until they have been read, also if the connection is closed
        peer.objects->read(fetch.block, into, [this, place](bool ok) { fetched(place, ok); });
    }
    reading->second.waiting.push_back(fetch);
    answer.aside = reading->second.into;
    answer.fetched = fetch.nbytes;
    peer.fetching += fetch.nbytes;
}

void Server::finish_jobs() {
    if (shelf_ == nullptr) {
        return;
    }
    for (const auto& then : shelf_->finished()) {
        guarded(then);  // each by itself: what one holds must not stay held because another failed
    }
}

void Server::fetched(const Place& place, bool ok) {
    const Reading reading = std::move(readings_.extract(place).mapped());
    Catalogue& objects = *objects_.at(place.first);
    if (!ok) {
        objects.lose(place.second);
    }
    objects.release(place.second);
    for (const Fetch& fetch : reading.waiting) {
        const auto found = peers_.find(fetch.fd);
        if (found == peers_.end() || found->second->number != fetch.peer || found->second->dead) {
            continue;
        }
        Peer& peer = *found->second;
        try {
            deliver(peer, fetch, ok);
        } catch (const std::exception& error) {
            note("error", peer.session, error.what());
            close_peer(peer);
        }
    }
    if (!ok) {
        note("lost", 0, "an object could not be read from the file " + settings_.shelf);
    }
}

void Server::deliver(Peer& peer, const Fetch& fetch, bool ok) {
    for (Reply& answer : peer.replies) {
        if (answer.ticket == fetch.ticket) {
            complete(peer, answer, fetch, ok);
            break;
        }
    }
    watch(peer);
}

void Server::complete(Peer& peer, Reply& answer, const Fetch& fetch, bool ok) {
    answer.ticket = 0;
    if (&answer == &peer.replies.front()) {
        peer.receiving.begin(now(), seconds(settings_.stall));
    }
    const bool pins = static_cast<Op>(answer.header.op) == Op::pin;
    const std::optional<Found> promoted =
        ok && fetch.promote ? peer.objects->promote(fetch.offset, answer.aside->data()) : std::nullopt;
    if (promoted) {
        turns_.charge(*peer.seat, fetch.nbytes);
    }
    if (ok && !pins) {
        answer.payload = answer.aside->data();
        return;
    }
    answer.header.payload_nbytes = 0;
    answer.aside = nullptr;
    let_go(peer, answer);
    if (promoted) {
        pin(peer, *promoted, answer, fetch.ttl_ms);
    } else if (pins) {
        pin_again(peer, answer, fetch);
    } else {
        refuse(answer, Status::missing);
    }
}

// Retries a pin whose object did not come back into memory. Another request may have brought it there, or changed it.
void Server::pin_again(Peer& peer, Reply& answer, const Fetch& fetch) {
    const Found found = peer.objects->find(fetch.key, true);
    if (found.status == Status::done && found.is_mapped_by_readers) {
        pin(peer, found, answer, fetch.ttl_ms);
    } else if (found.status == Status::done && found.offset != fetch.offset) {
        // Not behind others: theirs may be the replies that wait for this one to go.
        start_fetch(peer, answer, expect(peer, answer, found, fetch.key, fetch.ttl_ms));
    } else {
        refuse(answer, found.status == Status::done ? Status::full : found.status);
    }
}

}  // namespace farpool
