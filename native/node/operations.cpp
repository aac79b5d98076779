// The operations of docs/wire.md: how a node handles each kind of frame.
#include <algorithm>
#include <bit>
#include <cstring>
#include <system_error>

#include "core/crc32c.hpp"
#include "node/hold.hpp"
#include "node/server.hpp"
#include "wire/looked_up.hpp"

namespace farpool {

namespace {

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

// The key at the end of meta; empty where that is not a valid key.
std::string_view key_after(const std::vector<std::byte>& meta, std::size_t offset) {
    if (meta.size() <= offset || meta.size() - offset > largest_key) {
        return {};
    }
    return {reinterpret_cast<const char*>(meta.data()) + offset, meta.size() - offset};
}

// Size of a publish area: a small part of the node's capacity, and no more than stays in a processor's cache.
std::uint64_t area_nbytes(std::uint64_t capacity) {
    return std::clamp(std::bit_floor(capacity / 64), std::uint64_t{4} << 10, std::uint64_t{1} << 20);
}

constexpr const char* beyond_share =
    "what the tenant holds so that it cannot be evicted would be more than its share, or pins and kept objects more than 7/8 "
    "of it";

// Meta of the reply to a publish that was not made: the object that is already there, or why there can be none.
std::string unfinished(const Found& found) {
    return found.status == Status::present ? packed(found.nbytes, found.crc, std::uint32_t{0}, found.head)
           : found.status == Status::busy  ? beyond_share
                                           : "";
}

}  // namespace

void Server::frame_begun(Peer& peer) {
    peer.left = peer.header.payload_nbytes;
    peer.into = nullptr;
    peer.room = 0;
    peer.crc = 0;
    peer.refusal = Status::done;
    peer.told = 0;
    if (peer.by_area() && (static_cast<Op>(peer.header.op) != Op::put || !peer.has_area())) {
        return bad_frame(peer, "a payload in a publish area that the connection does not have, or that is not put");
    }
    if (peer.left > settings_.capacity) {
        reply(peer, Status::too_large);
        peer.closing = true;  // reading past so much would take as long as serving it
        peer.stage = Peer::Stage::header;
        peer.have = 0;
        return;
    }
    const auto op = static_cast<Op>(peer.header.op);
    const bool admitted = peer.header.tenant == 0 || peer.header.tenant == peer.tenant;
    // A program that may publish could also drop everything.
    if (admitted && is_behind(peer) && (peer.rights & rights::publish) != 0) {
        rotate(peer, peer.header.epoch);
    }
    if (!admitted) {
        drop_payload(peer, Status::denied);
    } else if (op == Op::put) {
        begin_put(peer);
    } else if (op == Op::write) {
        begin_write(peer);
    } else if (peer.left > 0) {
        drop_payload(peer, Status::bad_request, 0, "expected no payload with this operation");
    }
    peer.stage = Peer::Stage::payload;
    peer.have = 0;
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

void Server::drop_payload(Peer& peer, Status status, std::uint64_t serial, std::string meta) {
    peer.into = nullptr;
    peer.room = 0;
    peer.refusal = status;
    peer.refusal_serial = serial;
    peer.refusal_meta = std::move(meta);
}

void Server::frame_complete(Peer& peer) {
    peer.stage = Peer::Stage::header;
    peer.have = 0;
    peer.into = nullptr;
    turn_.spend(work::frame);
    if (peer.refusal != Status::done) {
        reply(peer, peer.refusal, peer.refusal_serial, std::move(peer.refusal_meta));
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
        case Op::get:
            return answer_get(peer);
        case Op::stat:
            return answer_stat(peer);
        case Op::put:
            return finish_put(peer);
        case Op::drop:
            return answer_drop(peer);
        case Op::touch:
            return answer_touch(peer);
        case Op::pin:
            return answer_pin(peer);
        case Op::unpin:
            return answer_unpin(peer);
        case Op::prepare:
            return answer_prepare(peer);
        case Op::commit:
            return answer_commit(peer);
        case Op::abort:
            return answer_abort(peer);
        case Op::area:
            return answer_area(peer);
        case Op::demote:
            return answer_demote(peer);
        case Op::lookup:
            return answer_lookup(peer);
        case Op::rotate:
            return answer_rotate(peer);
        case Op::read:
            return answer_read(peer);
        case Op::write:
            return finish_write(peer);
        case Op::ping:
            return reply(peer, Status::done);
        default:
            return reply(peer, Status::bad_request, 0, "an operation that this node does not know");
    }
}

void Server::begin_put(Peer& peer) {
    const std::string_view key = key_after(peer.meta, sizeof(ObjectHead));
    if ((peer.rights & rights::publish) == 0) {
        return drop_payload(peer, Status::denied);
    }
    if (key.empty()) {
        return drop_payload(peer, Status::bad_request, 0, "expected what the object is, and a key of 1 to 256 bytes");
    }
}

// Aborts the put that has been silent for longest, of those that announced more bytes than have come; false if there is none.
bool Server::give_up_a_put(const Catalogue& objects) {
    Peer* silent = nullptr;
    for (const auto& [fd, peer] : peers_) {
        const bool announces = peer->objects == &objects && peer->prepared != 0 && peer->left > peer->room;
        if (announces && (silent == nullptr || peer->sending.end() < silent->sending.end())) {
            silent = peer.get();
        }
    }
    if (silent == nullptr) {
        return false;
    }
    silent->objects->abort(std::exchange(silent->prepared, 0), silent->prepared_serial);
    drop_payload(*silent, Status::full);
    return true;
}

// Takes memory for the next slice of a put, evicting other objects, as its bytes come and not when a header announces them.
void Server::extend_put(Peer& peer) {
    const std::uint64_t received = peer.header.payload_nbytes - peer.left;
    if (peer.prepared == 0) {
        const std::string_view key = key_after(peer.meta, sizeof(ObjectHead));
        const auto prepare = [&] {
            return peer.objects->prepare(key, peer.header.payload_nbytes, number_at<ObjectHead>(peer.meta, 0),
                                         Catalogue::Arrival::in_slices);
        };
        Found prepared = prepare();
        // Give up another put only if this one can continue then.
        while (prepared.status == Status::full && !peer.objects->may_announce(peer.header.payload_nbytes) &&
               give_up_a_put(*peer.objects)) {
            prepared = prepare();
        }
        if (prepared.status != Status::done) {
            return drop_payload(peer, prepared.status, prepared.serial, unfinished(prepared));
        }
        peer.prepared = prepared.offset;
        peer.prepared_serial = prepared.serial;
        peer.into = peer.objects->at(prepared.payload);
    } else if (const Status status = peer.objects->extend(peer.prepared); status != Status::done) {
        peer.objects->abort(std::exchange(peer.prepared, 0), peer.prepared_serial);
        return drop_payload(peer, status, 0, status == Status::busy ? beyond_share : "");
    }
    peer.room = peer.objects->writable(peer.prepared) - received;
    turn_.spend(work::backed_byte * peer.room);
}

void Server::finish_put(Peer& peer) {
    if (peer.prepared == 0) {  // no byte was to come
        extend_put(peer);
        if (peer.refusal != Status::done) {
            return reply(peer, peer.refusal, peer.refusal_serial, std::move(peer.refusal_meta));
        }
    }
    const std::uint64_t offset = std::exchange(peer.prepared, 0);
    if (peer.crc != peer.header.payload_crc) {
        peer.objects->abort(offset, peer.prepared_serial);
        ++counts_.checksum_errors;
        return reply(peer, Status::checksum);
    }
    finish(peer, offset, peer.prepared_serial, peer.crc);
}

void Server::finish(Peer& peer, std::uint64_t offset, std::uint64_t serial, std::uint32_t crc) {
    turn_.spend(work::publish);
    const Found found = peer.objects->commit(offset, serial, crc);
    counts_.puts += found.status == Status::done ? 1 : 0;
    reply(peer, found.status, found.serial, unfinished(found));
}

// The object that a request is for; empty where a refusal has been sent, as there is none or the request is not a good one.
std::optional<Found> Server::found_or_refuse(Peer& peer, std::string_view key, bool visit) {
    if (key.empty()) {
        return std::nullopt;
    }
    // To whoever knows of a later epoch, and may not tell this node of it, everything here is of an earlier one.
    Found found = is_behind(peer) ? Found{} : peer.objects->find(key, visit);
    if (found.status != Status::done) {
        reply(peer, found.status);
        return std::nullopt;
    }
    return found;
}

void Server::answer_get(Peer& peer) {
    const std::string_view key = key_or_refuse(peer, rights::read);
    if (!key.empty()) {
        peer.objects->count_get();
    }
    const std::optional<Found> found = found_or_refuse(peer, key, true);
    if (!found) {
        return;
    }
    peer.objects->count_hit();
    reply(peer, Status::done, found->serial, packed(found->head));
    if (found->view == nullptr) {
        return fetch(peer, *found, key, 0);
    }
    Reply& answer = peer.replies.back();
    if (peer.held_back.empty() && has_room(peer, *found)) {
        return send_object(peer, answer, found->visited ? peer.objects->copy_to_ram(*found) : *found, key);
    }
    answer.ticket = ++tickets_;
    peer.held_back.emplace_back(answer.ticket, key);
    if (!peer.in_line) {
        send_held_back(peer);
    }
}

void Server::answer_stat(Peer& peer) {
    if (const auto found = found_or_refuse(peer, key_or_refuse(peer, rights::read), false)) {
        reply(peer, Status::done, found->serial, packed(found->nbytes, found->crc, found->pins, found->head));
    }
}

void Server::answer_drop(Peer& peer) {
    const std::string_view key = key_or_refuse(peer, rights::publish);
    if (key.empty()) {
        return;
    }
    const Status status = peer.objects->remove(key);
    counts_.drops += status == Status::done ? 1 : 0;
    reply(peer, status);
}

void Server::answer_demote(Peer& peer) {
    if (const auto found = found_or_refuse(peer, key_or_refuse(peer, rights::publish), false)) {
        reply(peer, peer.objects->demote(*found));
    }
}

void Server::answer_touch(Peer& peer) {
    constexpr std::size_t fixed = 2 * sizeof(std::uint64_t);
    const std::string_view key = key_or_refuse(peer, rights::publish, fixed, "a time to live, what to do with it, and a key");
    if (key.empty()) {
        return;
    }
    const auto keep = number_at<std::uint64_t>(peer.meta, sizeof(std::uint64_t));
    if (keep > static_cast<std::uint64_t>(Keep::let_go)) {
        return reply(peer, Status::bad_request, 0, "expected 0 (as it is), 1 (keep) or 2 (let go) behind the time to live");
    }
    const Touched touched =
        peer.objects->touch(key, number_at<std::uint64_t>(peer.meta, 0), static_cast<Keep>(keep), peer.header.serial);
    reply(peer, touched.status, touched.mark, touched.status == Status::busy ? beyond_share : "");
}

// The keys of a lookup follow its flags and their number.
constexpr std::size_t first_key_at = 2 * sizeof(std::uint32_t);
constexpr const char* expected_keys =
    "expected flags 0 or 1, a count, and as many keys of 1 to 256 bytes, each behind its length";

void Server::answer_lookup(Peer& peer) {
    if (!may(peer, rights::read)) {
        return;
    }
    const std::size_t nbytes = peer.meta.size();
    const std::uint32_t flags = nbytes < first_key_at ? 2 : number_at<std::uint32_t>(peer.meta, 0);
    const std::uint32_t count = nbytes < first_key_at ? 0 : number_at<std::uint32_t>(peer.meta, sizeof flags);
    if (flags > 1 || LookedUp::nbytes(count) > largest_meta) {
        return reply(peer, Status::bad_request, 0,
                     flags > 1 ? expected_keys : "expected fewer keys: the answer would be too long");
    }
    peer.lookup.emplace(Lookup{count, flags == 1, peer.objects->epoch(), LookedUp(count), 0, first_key_at});
    go_on_with_lookup(peer);
}

// Looks up as many of the next keys as the turn has room for, and answers after the last key.
void Server::go_on_with_lookup(Peer& peer) {
    Lookup& lookup = *peer.lookup;
    if (lookup.epoch != peer.objects->epoch()) {  // the objects found so far are outdated
        lookup = Lookup{lookup.count, lookup.visits, peer.objects->epoch(), LookedUp(lookup.count), 0, first_key_at};
    }
    const std::size_t nbytes = peer.meta.size();
    for (; lookup.number < lookup.count; ++lookup.number) {
        if (turn_.is_read_out()) {
            return;
        }
        std::uint16_t length = 0;
        if (nbytes - lookup.at >= sizeof length) {
            length = number_at<std::uint16_t>(peer.meta, lookup.at);
            lookup.at += sizeof length;
        }
        if (length == 0 || length > largest_key || length > nbytes - lookup.at) {
            peer.lookup.reset();
            return reply(peer, Status::bad_request, 0, expected_keys);
        }
        turn_.spend(work::key);
        const std::string_view key(reinterpret_cast<const char*>(peer.meta.data()) + lookup.at, length);
        const Found found = peer.objects->find(key, lookup.visits);
        if (found.status == Status::done && !is_behind(peer)) {
            lookup.answer.add(lookup.number, found.nbytes);
        }
        lookup.at += length;
    }
    const bool whole = lookup.at == nbytes;
    std::string answer = std::move(lookup.answer.meta);
    peer.lookup.reset();
    if (!whole) {
        return reply(peer, Status::bad_request, 0, expected_keys);
    }
    reply(peer, Status::done, 0, std::move(answer));
}

void Server::rotate(Peer& peer, std::uint32_t epoch) {
    peer.objects->rotate(epoch);
    if (const std::uint64_t gone = peer.objects->begun().objects; gone > 0) {
        note("rotated", peer.session,
             "tenant " + std::to_string(peer.tenant) + " is in epoch " + std::to_string(epoch) + ": " + std::to_string(gone) +
                 " objects can no longer be read");
    }
}

void Server::answer_rotate(Peer& peer) {
    if ((peer.rights & rights::publish) == 0 || (peer.rights & rights::admin) == 0) {
        return reply(peer, Status::denied, 0, "an access key needs the rights 'publish' and 'admin' to rotate its tenant");
    }
    if (peer.meta.size() != sizeof(std::uint32_t)) {
        return reply(peer, Status::bad_request, 0, "expected an epoch");
    }
    const auto epoch = number_at<std::uint32_t>(peer.meta, 0);
    if (epoch > peer.objects->epoch()) {
        rotate(peer, epoch);
    }
    // Another program may have told this epoch a moment before.
    const Rotated gone = epoch == peer.objects->epoch() ? peer.objects->begun() : Rotated{};
    reply(peer, Status::done, 0, packed(peer.objects->epoch(), std::uint32_t{0}, gone.objects, gone.nbytes));
}

void Server::answer_pin(Peer& peer) {
    constexpr std::size_t fixed = sizeof(std::uint64_t);
    const std::string_view key = key_or_refuse(peer, rights::read, fixed, "a time to live and a key");
    const std::optional<Found> found = found_or_refuse(peer, key, true);
    if (!found) {
        return;
    }
    const auto ttl_ms = number_at<std::uint64_t>(peer.meta, 0);
    reply(peer, Status::done, found->serial);
    if (found->view == nullptr) {
        return fetch(peer, *found, key, ttl_ms);
    }
    const Found in_ram = peer.objects->copy_to_ram(*found);
    if (!in_ram.is_mapped_by_readers) {
        return refuse(peer.replies.back(), Status::full);
    }
    pin(peer, in_ram, peer.replies.back(), ttl_ms);
}

void Server::pin(Peer& peer, const Found& found, Reply& answer, std::uint64_t ttl_ms) {
    Session& session = sessions_.at(peer.session);
    const std::uint64_t room = peer.objects->ram_nbytes(found);
    if (std::string refusal = quotas_.pin_refusal(session.charged(), session.pins.size(), found.offset, room);
        !refusal.empty()) {
        return refuse(answer, Status::busy, std::move(refusal));
    }
    if (!peer.objects->may_fix(found)) {
        return refuse(answer, Status::busy, beyond_share);
    }
    const Place place{peer.tenant, found.payload};
    const auto ending =
        ttl_ms == 0 ? endings_.end()
                    : endings_.emplace(now() + seconds(static_cast<double>(ttl_ms) / 1000), std::pair(peer.session, place));
    peer.objects->pin(found);
    peer.objects->count_lent_out(1);
    quotas_.pin(session.charged(), found.offset, room);
    session.last_pin += session.last_pin + 1 == 0 ? 2 : 1;  // 0 stands for any
    session.pins.emplace(place, Pinned{found.offset, found.serial, session.last_pin, ending});
    answer.header.serial = found.serial;
    answer.meta = packed(found.payload, found.nbytes, found.crc, session.last_pin);
    seal(answer.header, answer.meta.data(), static_cast<std::uint32_t>(answer.meta.size()));
}

void Server::answer_unpin(Peer& peer) {
    const bool numbered = peer.meta.size() == 2 * sizeof(std::uint64_t);
    if (!numbered && peer.meta.size() != sizeof(std::uint64_t)) {
        return reply(peer, Status::bad_request, 0, "expected the offset of a pinned payload, and the pin's number or nothing");
    }
    const std::uint64_t number = numbered ? number_at<std::uint64_t>(peer.meta, sizeof(std::uint64_t)) : 0;
    Session& session = sessions_.at(peer.session);
    const auto [first, last] = session.pins.equal_range(Place{peer.tenant, number_at<std::uint64_t>(peer.meta, 0)});
    const auto found = std::find_if(first, last, [&](const auto& pin) {
        return pin.second.serial == peer.header.serial && (number == 0 || pin.second.number == number);
    });
    if (found == last) {
        return reply(peer, Status::unknown);
    }
    unpin(session, found);
    reply(peer, Status::done);
}

void Server::answer_prepare(Peer& peer) {
    constexpr std::size_t fixed = sizeof(std::uint64_t) + sizeof(ObjectHead);
    const std::string_view key = key_or_refuse(peer, rights::publish, fixed, "a length, what the object is, and a key");
    if (key.empty()) {
        return;
    }
    Session& session = sessions_.at(peer.session);
    if (!session.exposed) {  // it could not write there, and a place takes its memory at once
        return reply(peer, Status::denied, 0,
                     "places are prepared for programs that write them over a one-sided fabric, to which the objects were "
                     "exposed; put instead");
    }
    const auto nbytes = number_at<std::uint64_t>(peer.meta, 0);
    if (std::string refusal = quotas_.preparation_refusal(session.charged(), session.prepared.size(), nbytes);
        !refusal.empty()) {
        return reply(peer, Status::busy, 0, std::move(refusal));
    }
    const Found prepared = peer.objects->prepare(key, nbytes, number_at<ObjectHead>(peer.meta, sizeof(std::uint64_t)));
    if (prepared.status != Status::done) {
        return reply(peer, prepared.status, prepared.serial, unfinished(prepared));
    }
    session.prepared.emplace(Place{peer.tenant, prepared.payload},
                             Preparing{prepared.offset, prepared.serial, peer.number, nbytes});
    quotas_.prepare(session.charged(), nbytes);
    peer.objects->count_lent_out(1);
    reply(peer, Status::done, prepared.serial, packed(prepared.payload));
}

// The session's preparation at the place in the request; null where a refusal has been sent, as none has that serial.
const Server::Session::Promise* Server::prepared_or_refuse(Peer& peer) {
    const auto& prepared = sessions_.at(peer.session).prepared;
    const auto found = prepared.find(Place{peer.tenant, number_at<std::uint64_t>(peer.meta, 0)});
    if (found == prepared.end() || found->second.serial != peer.header.serial) {
        reply(peer, Status::unknown);
        return nullptr;
    }
    return &*found;
}

void Server::answer_commit(Peer& peer) {
    if (peer.meta.size() != 2 * sizeof(std::uint64_t)) {
        return reply(peer, Status::bad_request, 0, "expected an offset and a checksum");
    }
    if (const Session::Promise* found = prepared_or_refuse(peer)) {
        peer.committing = found->second.extent;
        peer.looked_at = 0;
        peer.crc = 0;
        go_on_with_commit(peer);
    }
}

// Checks the payload of a commit, a part in each turn. Does not publish a payload that was not written or cannot be read.
void Server::go_on_with_commit(Peer& peer) {
    const Session::Promise* found = prepared_or_refuse(peer);  // another connection may have ended it
    if (found == nullptr) {
        peer.committing = 0;
        return;
    }
    const auto& [place, preparing] = *found;
    const std::uint64_t nbytes = peer.objects->writable(preparing.extent);
    while (peer.looked_at < nbytes) {
        if (turn_.is_read_out()) {
            return;
        }
        const std::uint64_t step = std::min<std::uint64_t>(nbytes - peer.looked_at, turn_.step_nbytes());
        peer.crc = crc32c(peer.objects->at(place.second + peer.looked_at), step, peer.crc);
        peer.looked_at += step;
        turn_.spend(step);
    }
    peer.committing = 0;
    const bool whole = peer.crc == number_at<std::uint32_t>(peer.meta, sizeof(std::uint64_t));
    if (whole) {
        finish(peer, preparing.extent, preparing.serial, peer.crc);
    }
    end_preparation(sessions_.at(peer.session), place, preparing);
    sessions_.at(peer.session).prepared.erase(place);
    if (!whole) {
        ++counts_.checksum_errors;
        reply(peer, Status::checksum);
    }
}

void Server::answer_abort(Peer& peer) {
    if (peer.meta.size() != sizeof(std::uint64_t)) {
        return reply(peer, Status::bad_request, 0, "expected the offset of a prepared payload");
    }
    const Session::Promise* found = prepared_or_refuse(peer);
    if (found == nullptr) {
        return;
    }
    end_preparation(sessions_.at(peer.session), found->first, found->second);
    sessions_.at(peer.session).prepared.erase(found->first);
    reply(peer, Status::done);
}

// Gives a connection a publish area: memory of its own into which it writes payloads, and which the node only reads.
void Server::answer_area(Peer& peer) {
    if (!may(peer, rights::publish)) {
        return;
    }
    if (!peer.socket.passes_files() || peer.has_area()) {
        return reply(peer, Status::bad_request, 0,
                     "expected a connection over the node's UNIX socket that has no publish area yet");
    }
    SegmentHeader settings{};
    settings.kind = static_cast<std::uint32_t>(SegmentKind::area);
    settings.capacity = area_nbytes(settings_.capacity);
    settings.session = peer.session;
    settings.tenant = peer.tenant;
    const std::uint64_t nbytes = segment_header_nbytes + settings.capacity;
    Session& session = sessions_.at(peer.session);
    std::string refusal = quotas_.area_refusal(session.charged(), session.areas, nbytes);
    if (refusal.empty() && (!budget_.may_fix(peer.tenant, nbytes) || !budget_.make_room(peer.tenant, nbytes) ||
                            !budget_.make_backing_room(peer.tenant, nbytes))) {
        refusal = "the tenant's share has no room for a publish area of " + std::to_string(nbytes) + " bytes";
    }
    if (!refusal.empty()) {
        return reply(peer, Status::busy, 0, std::move(refusal));
    }
    Segment area;
    File passed;
    try {
        area = make_nameless_segment("farpool-publish-area", settings);
        if (!back(area, 0, nbytes)) {
            return reply(peer, Status::full);
        }
        Mapping read_only(area.file.fd(), nbytes, false);
        area.guarded = GuardedRange(read_only.data(), nbytes);
        area.memory = std::move(read_only);
        passed = File(area.file.duplicate());
    } catch (const std::system_error& error) {  // out of descriptors: the connection puts without an area
        return reply(peer, Status::full, 0, error.code().message());
    }
    peer.area = std::move(area);
    budget_.lend(peer.tenant, nbytes);
    ++session.areas;
    quotas_.lend_area(session.charged(), nbytes);
    reply(peer, Status::done);
    peer.replies.back().file = std::move(passed);
}

void Server::end_area(Peer& peer) {
    if (!peer.has_area()) {
        return;
    }
    const std::uint64_t nbytes = peer.area.memory.nbytes();
    discard(peer.area, 0, nbytes);  // a program may keep what it was passed
    peer.area = {};
    budget_.take_back(peer.tenant, nbytes);
    Session& session = sessions_.at(peer.session);
    --session.areas;
    quotas_.end_area(session.charged(), nbytes);
}

void Server::begin_write(Peer& peer) {
    if ((peer.rights & rights::write) == 0) {
        return drop_payload(peer, Status::denied);
    }
    if (peer.meta.size() != sizeof(std::uint64_t)) {
        return drop_payload(peer, Status::bad_request, 0, "expected an offset");
    }
    std::shared_ptr<Lease> lease = lease_of(peer.session, peer.header.lease);
    if (lease == nullptr) {
        return drop_payload(peer, Status::unknown);
    }
    const auto offset = number_at<std::uint64_t>(peer.meta, 0);
    if (offset > lease->nbytes || peer.left > lease->nbytes - offset) {
        return drop_payload(peer, Status::bad_request, 0,
                            "expected a range inside the lease of " + std::to_string(lease->nbytes) + " bytes");
    }
    peer.into = lease->segment.data() + offset;
    peer.room = peer.left;
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
    std::shared_ptr<Lease> lease = lease_of(peer.session, peer.header.lease);
    if (lease == nullptr) {
        return reply(peer, Status::unknown);
    }
    const auto offset = number_at<std::uint64_t>(peer.meta, 0);
    const auto nbytes = number_at<std::uint64_t>(peer.meta, sizeof(std::uint64_t));
    if (offset > lease->nbytes || nbytes > lease->nbytes - offset) {
        return reply(peer, Status::bad_request, 0,
                     "expected a range inside the lease of " + std::to_string(lease->nbytes) + " bytes");
    }
    reply(peer, Status::done);
    Reply& answer = peer.replies.back();
    answer.header.payload_nbytes = nbytes;
    seal(answer.header, nullptr, 0);
    answer.payload = lease->segment.data() + offset;
    answer.held_lease = std::move(lease);
}

}  // namespace farpool
