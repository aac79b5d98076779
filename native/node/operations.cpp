// What a node does when a frame has come: the operations of docs/wire.md.
#include <algorithm>
#include <cstring>

#include "node/server.hpp"

namespace farpool {

namespace {

constexpr std::size_t largest_pins = 1'000'000;  // of one session: the node remembers each

// One publish with a generation of the far future would make a whole class of keys refuse all others once it has gone.
constexpr std::uint64_t furthest_ahead = std::uint64_t{24 * 3600} * 1'000'000 << 12;

bool chooses_generation(Op op) { return op == Op::put || op == Op::prepare || op == Op::remove; }

template <typename T>
T number_at(const std::vector<std::byte>& meta, std::size_t offset) {
    T value{};
    std::memcpy(&value, meta.data() + offset, sizeof value);
    return value;
}

template <typename... T>
std::string packed(T... values) {
    std::string meta;
    (meta.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
    return meta;
}

// The key that meta ends with; empty where it is none.
std::string_view key_after(const std::vector<std::byte>& meta, std::size_t offset) {
    if (meta.size() <= offset || meta.size() - offset > largest_key) {
        return {};
    }
    return {reinterpret_cast<const char*>(meta.data()) + offset, meta.size() - offset};
}

}  // namespace

void Server::frame_begun(Peer& peer) {
    peer.left = peer.header.payload_nbytes;
    peer.into = nullptr;
    peer.crc = 0;
    peer.refusal = Status::done;
    if (peer.left > settings_.capacity) {
        reply(peer, Status::too_large);
        peer.closing = true;  // reading past so much would take as long as serving it
        peer.stage = Peer::Stage::header;
        peer.have = 0;
        return;
    }
    const auto op = static_cast<Op>(peer.header.op);
    if (peer.header.tenant != 0 && peer.header.tenant != peer.tenant) {
        drop_payload(peer, Status::denied);
    } else if (peer.header.epoch != 0) {
        drop_payload(peer, Status::bad_request, 0, "expected epoch 0: epochs are not used yet");
    } else if (chooses_generation(op) && peer.header.generation > now_generation() + furthest_ahead) {
        drop_payload(peer, Status::bad_request, 0, "expected a generation that lies at most a day ahead of this node's clock");
    } else if (op == Op::put) {
        begin_put(peer);
    } else if (op == Op::write) {
        begin_write(peer);
    } else if (peer.left > 0) {
        drop_payload(peer, Status::bad_request, 0, "expected no payload with this operation");
    }
    peer.stage = Peer::Stage::payload;
    if (peer.left == 0) {
        payload_complete(peer);
    }
}

void Server::payload_complete(Peer& peer) {
    if ((peer.header.flags & checksum_follows) != 0) {
        peer.stage = Peer::Stage::checksum;
        peer.have = 0;
    } else {
        frame_complete(peer);
    }
}

void Server::drop_payload(Peer& peer, Status status, std::uint64_t generation, std::string text) {
    peer.into = nullptr;
    peer.refusal = status;
    peer.refusal_generation = generation;
    peer.refusal_text = std::move(text);
}

void Server::frame_complete(Peer& peer) {
    peer.stage = Peer::Stage::header;
    peer.have = 0;
    peer.into = nullptr;
    if (peer.refusal != Status::done) {
        reply(peer, peer.refusal, peer.refusal_generation, std::move(peer.refusal_text));
    } else {
        answer(peer);
    }
}

bool Server::may(Peer& peer, std::uint32_t right) {
    if ((peer.rights & right) != 0) {
        return true;
    }
    reply(peer, Status::denied);
    return false;
}

// The key that the request ends with; empty where it has been refused: without the right, or because there is no such key.
std::string_view Server::key_or_refuse(Peer& peer, std::uint32_t right, std::size_t offset, const char* expected) {
    if (!may(peer, right)) {
        return {};
    }
    const std::string_view key = key_after(peer.meta, offset);
    if (key.empty()) {
        reply(peer, Status::bad_request, 0, std::string("expected ") + expected + " of 1 to 256 bytes");
    }
    return key;
}

void Server::answer(Peer& peer) {
    switch (static_cast<Op>(peer.header.op)) {
        case Op::get: return answer_get(peer);
        case Op::stat: return answer_stat(peer);
        case Op::put: return finish_put(peer);
        case Op::remove: return answer_delete(peer);
        case Op::touch: return answer_touch(peer);
        case Op::pin: return answer_pin(peer);
        case Op::unpin: return answer_unpin(peer);
        case Op::prepare: return answer_prepare(peer);
        case Op::commit: return answer_commit(peer);
        case Op::abort: return answer_abort(peer);
        case Op::forget: return answer_forget(peer);
        case Op::read: return answer_read(peer);
        case Op::write: return finish_write(peer);
        case Op::ping: return reply(peer, Status::done);
        default: return reply(peer, Status::bad_request, 0, "an operation that this node does not know");
    }
}

void Server::begin_put(Peer& peer) {
    const std::string_view key = key_after(peer.meta, sizeof(std::uint64_t));
    if ((peer.rights & rights::publish) == 0) {
        return drop_payload(peer, Status::denied);
    }
    if (key.empty()) {
        return drop_payload(peer, Status::bad_request, 0, "expected an expiry and a key of 1 to 256 bytes");
    }
    const Prepared prepared =
        peer.objects->prepare(key, peer.left, number_at<std::uint64_t>(peer.meta, 0), peer.header.generation);
    if (prepared.status != Status::done) {
        return drop_payload(peer, prepared.status, prepared.generation);
    }
    peer.prepared = prepared.offset;
    peer.into = peer.objects->at(prepared.payload);
}

void Server::finish_put(Peer& peer) {
    const std::uint64_t offset = std::exchange(peer.prepared, 0);
    if (peer.crc != peer.header.payload_crc) {
        peer.objects->abort(offset, peer.header.generation);
        ++counts_.checksum_errors;
        return reply(peer, Status::checksum);
    }
    const Outcome outcome = peer.objects->commit(offset, peer.header.generation, peer.crc);
    counts_.puts += outcome.status == Status::done ? 1 : 0;
    reply(peer, outcome.status, outcome.generation);
}

void Server::answer_get(Peer& peer) {
    const std::string_view key = key_or_refuse(peer, rights::read);
    if (key.empty()) {
        return;
    }
    ++counts_.gets;
    const Found found = peer.objects->find(key, true);
    if (found.status != Status::done) {
        return reply(peer, found.status, found.generation);
    }
    ++counts_.hits;
    if (found.shelved) {
        return fetch(peer, found, key);
    }
    reply(peer, Status::done, found.generation);
    Reply& answer = peer.replies.back();
    answer.header.payload_nbytes = found.nbytes;
    answer.header.payload_crc = found.crc;
    seal(answer.header, nullptr, 0);
    if (found.nbytes > 0) {
        answer.payload = peer.objects->at(found.payload);
        answer.held_object = found.offset;
        peer.objects->hold(found);
    }
}

void Server::answer_stat(Peer& peer) {
    const std::string_view key = key_or_refuse(peer, rights::read);
    if (key.empty()) {
        return;
    }
    const Found found = peer.objects->find(key, false);
    reply(peer, found.status, found.generation,
          found.status == Status::done ? packed(found.nbytes, found.expiry, found.crc, found.pins) : std::string());
}

void Server::answer_delete(Peer& peer) {
    const std::string_view key = key_or_refuse(peer, rights::publish);
    if (key.empty()) {
        return;
    }
    const Outcome outcome = peer.objects->remove(key, peer.header.generation);
    counts_.deletes += outcome.status == Status::done ? 1 : 0;
    reply(peer, outcome.status, outcome.generation);
}

void Server::answer_touch(Peer& peer) {
    const std::string_view key = key_or_refuse(peer, rights::publish, sizeof(std::uint64_t), "an expiry and a key");
    if (key.empty()) {
        return;
    }
    const Outcome outcome = peer.objects->touch(key, number_at<std::uint64_t>(peer.meta, 0));
    reply(peer, outcome.status, outcome.generation);
}

void Server::answer_forget(Peer& peer) {
    const std::string_view key = key_or_refuse(peer, rights::publish);
    if (key.empty()) {
        return;
    }
    const Outcome outcome = peer.objects->forget(key, peer.header.generation);
    reply(peer, outcome.status, outcome.generation);
}

void Server::answer_pin(Peer& peer) {
    const std::string_view key = key_or_refuse(peer, rights::read);
    if (key.empty()) {
        return;
    }
    if (sessions_[peer.session].pins.size() >= largest_pins) {
        return reply(peer, Status::full, 0, "expected at most " + std::to_string(largest_pins) + " pins of one session");
    }
    const Found found = peer.objects->find(key, true);
    if (found.status != Status::done) {
        return reply(peer, found.status, found.generation);
    }
    if (found.shelved) {
        return fetch(peer, found, key);
    }
    reply(peer, Status::done, found.generation);
    pin(peer, found, peer.replies.back());
}

void Server::pin(Peer& peer, const Found& found, Reply& answer) {
    peer.objects->hold(found);
    peer.objects->count_lent_out(1);
    sessions_[peer.session].pins.emplace(Place{peer.tenant, found.payload}, Pinned{found.offset, found.generation});
    answer.meta = packed(found.payload, found.nbytes, found.crc, std::uint32_t{0});
    seal(answer.header, answer.meta.data(), static_cast<std::uint32_t>(answer.meta.size()));
}

void Server::answer_unpin(Peer& peer) {
    if (peer.meta.size() != sizeof(std::uint64_t)) {
        return reply(peer, Status::bad_request, 0, "expected the offset of a pinned payload");
    }
    auto& pins = sessions_[peer.session].pins;
    const auto [first, last] = pins.equal_range(Place{peer.tenant, number_at<std::uint64_t>(peer.meta, 0)});
    const auto found =
        std::find_if(first, last, [&](const auto& pin) { return pin.second.generation == peer.header.generation; });
    if (found == last) {
        return reply(peer, Status::unknown);
    }
    peer.objects->drop(found->second.extent);
    peer.objects->count_lent_out(-1);
    pins.erase(found);
    reply(peer, Status::done);
}

void Server::answer_prepare(Peer& peer) {
    constexpr std::size_t fixed = 2 * sizeof(std::uint64_t);
    const std::string_view key = key_or_refuse(peer, rights::publish, fixed, "a length, an expiry and a key");
    if (key.empty()) {
        return;
    }
    const Prepared prepared =
        peer.objects->prepare(key, number_at<std::uint64_t>(peer.meta, 0),
                              number_at<std::uint64_t>(peer.meta, sizeof(std::uint64_t)), peer.header.generation);
    if (prepared.status != Status::done) {
        return reply(peer, prepared.status, prepared.generation);
    }
    sessions_[peer.session].prepared.emplace(Place{peer.tenant, prepared.payload},
                                             Preparing{prepared.offset, prepared.generation, peer.serial});
    peer.objects->count_lent_out(1);
    reply(peer, Status::done, prepared.generation, packed(prepared.payload));
}

// What the session has prepared where the request says; null where it has been refused: there is none of that generation.
const Server::Session::Promise* Server::prepared_or_refuse(Peer& peer) {
    const auto& prepared = sessions_[peer.session].prepared;
    const auto found = prepared.find(Place{peer.tenant, number_at<std::uint64_t>(peer.meta, 0)});
    if (found == prepared.end() || found->second.generation != peer.header.generation) {
        reply(peer, Status::unknown);
        return nullptr;
    }
    return &*found;
}

void Server::answer_commit(Peer& peer) {
    if (peer.meta.size() != 2 * sizeof(std::uint64_t)) {
        return reply(peer, Status::bad_request, 0, "expected an offset and a checksum");
    }
    const Session::Promise* found = prepared_or_refuse(peer);
    if (found == nullptr) {
        return;
    }
    peer.objects->count_lent_out(-1);
    const Outcome outcome = peer.objects->commit(found->second.extent, peer.header.generation,
                                                 number_at<std::uint32_t>(peer.meta, sizeof(std::uint64_t)));
    sessions_[peer.session].prepared.erase(found->first);
    counts_.puts += outcome.status == Status::done ? 1 : 0;
    reply(peer, outcome.status, outcome.generation);
}

void Server::answer_abort(Peer& peer) {
    if (peer.meta.size() != sizeof(std::uint64_t)) {
        return reply(peer, Status::bad_request, 0, "expected the offset of a prepared payload");
    }
    const Session::Promise* found = prepared_or_refuse(peer);
    if (found == nullptr) {
        return;
    }
    end_preparation(found->first, found->second);
    sessions_[peer.session].prepared.erase(found->first);
    reply(peer, Status::done);
}

void Server::begin_write(Peer& peer) {
    if ((peer.rights & rights::write) == 0) {
        return drop_payload(peer, Status::denied);
    }
    if (peer.meta.size() != sizeof(std::uint64_t)) {
        return drop_payload(peer, Status::bad_request, 0, "expected an offset");
    }
    std::shared_ptr<Lease> lease = leases_.find(peer.session, peer.header.lease);
    if (lease == nullptr) {
        return drop_payload(peer, Status::unknown);
    }
    const auto offset = number_at<std::uint64_t>(peer.meta, 0);
    if (offset > lease->nbytes() || peer.left > lease->nbytes() - offset) {
        return drop_payload(peer, Status::bad_request, 0,
                            "expected a range inside the lease of " + std::to_string(lease->nbytes()) + " bytes");
    }
    peer.into = lease->segment.data() + offset;
    peer.written_lease = std::move(lease);
}

void Server::finish_write(Peer& peer) {
    const std::shared_ptr<Lease> lease = std::exchange(peer.written_lease, nullptr);
    if (peer.crc != peer.header.payload_crc) {
        ++counts_.checksum_errors;
        return reply(peer, Status::checksum);
    }
    reply(peer, Status::done);
}

void Server::answer_read(Peer& peer) {
    if (!may(peer, rights::write)) {
        return;
    }
    if (peer.meta.size() != 2 * sizeof(std::uint64_t)) {
        return reply(peer, Status::bad_request, 0, "expected an offset and a length");
    }
    std::shared_ptr<Lease> lease = leases_.find(peer.session, peer.header.lease);
    if (lease == nullptr) {
        return reply(peer, Status::unknown);
    }
    const auto offset = number_at<std::uint64_t>(peer.meta, 0);
    const auto nbytes = number_at<std::uint64_t>(peer.meta, sizeof(std::uint64_t));
    if (offset > lease->nbytes() || nbytes > lease->nbytes() - offset) {
        return reply(peer, Status::bad_request, 0, "expected a range inside the lease of " + std::to_string(lease->nbytes()) +
                                                       " bytes");
    }
    reply(peer, Status::done);
    Reply& answer = peer.replies.back();
    answer.header.payload_nbytes = nbytes;
    seal(answer.header, nullptr, 0);
    answer.payload = lease->segment.data() + offset;
    answer.held_lease = std::move(lease);
}

}  // namespace farpool
