// Bytes in and out of connections: the part of the server that knows sockets and frames, and no operation.
#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>

#include "core/crc32c.hpp"
#include "node/hold.hpp"
#include "node/server.hpp"

namespace farpool {

namespace {

// Bytes that are received and checked at once: they are still in the processor's cache when their checksum is computed.
constexpr std::size_t direct_nbytes = 256 * 1024;
// Bytes that one connection may copy from a publish area in a turn. Less, as the client is told after each turn what is free.
constexpr std::size_t area_turn_nbytes = 256 * 1024;
constexpr std::size_t area_step_nbytes = 64 * 1024;
constexpr std::size_t largest_backlog = 128;  // replies; a peer that takes none is not read from
constexpr std::size_t replies_at_once = 16;

}  // namespace

// Notes the events that epoll reports for a connection. It reports each once, so the note stays after a partial read or send.
void Server::notice(Peer& peer, std::uint32_t events) {
    if (peer.dead) {
        return;
    }
    const bool broken = (events & (EPOLLHUP | EPOLLERR)) != 0;
    peer.hung_up = peer.hung_up || broken || (events & EPOLLRDHUP) != 0;
    peer.writable = peer.writable || broken || (events & EPOLLOUT) != 0;
    peer.readable =
        peer.readable || peer.hung_up || (events & EPOLLIN) != 0 || ((events & EPOLLOUT) != 0 && peer.socket.receiving_sends());
    queue(peer);
}

bool Server::may_read(const Peer& peer) const {
    // Reading the end of a stream closes the connection, so the node sends all replies first.
    const bool may_end = !peer.hung_up || peer.replies.empty();
    const bool has_input = !peer.rest.empty() || ((peer.readable || peer.socket.pending()) && may_end);
    return !peer.closing && (peer.works() || (has_input && peer.replies.size() < largest_backlog));
}

bool Server::may_send(const Peer& peer) const {
    return peer.writable && !peer.replies.empty() && peer.replies.front().ticket == 0;
}

// Gives a connection its place in the order of turns while it has work.
void Server::queue(Peer& peer) {
    if (may_read(peer) || may_send(peer)) {
        turns_.want(*peer.seat);
    } else {
        turns_.rest(*peer.seat);
    }
}

void Server::service(Peer& peer) {
    if (may_read(peer)) {
        receive(peer);
    }
    if (!peer.dead && may_send(peer)) {
        flush(peer);
    }
    if (!peer.dead) {
        watch(peer);
    }
}

// Closes a connection that is finished, or waits for its next event and its next turn. Epoll reports only changes; when we ask
// for an event again, it checks the state again.
void Server::watch(Peer& peer) {
    if (peer.closing && peer.replies.empty()) {
        close_peer(peer);
        return;
    }
    const bool listening = !peer.closing && !peer.works() && peer.replies.size() < largest_backlog && peer.rest.empty();
    if (listening && !peer.listening) {  // what it has begun did not go on because of us
        peer.sending.begin(now(), seconds(settings_.stall));
    }
    peer.listening = listening;
    const bool sends = !peer.replies.empty() && peer.replies.front().ticket == 0;
    const bool waits_for_room = (sends && !peer.writable) || (listening && peer.socket.receiving_sends());
    const std::uint32_t wanted = EPOLLIN | EPOLLRDHUP | EPOLLET | (waits_for_room ? EPOLLOUT : 0u);
    if (wanted != peer.watched) {
        epoll_event event{};
        event.events = wanted;
        event.data.fd = peer.socket.fd();
        if (epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, peer.socket.fd(), &event) != 0) {
            close_peer(peer);
            return;
        }
        peer.watched = wanted;
    }
    queue(peer);
}

// Continues a request that takes several turns; true once it is done.
bool Server::go_on(Peer& peer) {
    if (peer.committing != 0) {
        go_on_with_commit(peer);
    } else if (peer.lookup) {
        go_on_with_lookup(peer);
    } else if (peer.copying.nbytes > 0) {
        go_on_with_part(peer);
    }
    return !peer.works();
}

void Server::receive(Peer& peer) {
    peer.copied = 0;
    if (go_on(peer)) {
        receive_more(peer);
    }
    // While the client waits for room in the area, it sends no more. We report whole parts to it.
    const std::uint64_t taken = peer.header.payload_nbytes - peer.left;
    if (!peer.dead && peer.copying.nbytes == 0 && peer.stage == Peer::Stage::payload && peer.by_area() &&
        peer.header.payload_nbytes > peer.area.nbytes() && taken > peer.told) {
        peer.told = taken;
        reply(peer, Status::taken, taken);
    }
}

// Continues to read where the previous turn ended: first handles the bytes that it had received.
void Server::receive_more(Peer& peer) {
    if (!peer.rest.empty()) {
        peer.rest_from += feed(peer, peer.rest.data() + peer.rest_from, peer.rest.size() - peer.rest_from);
        if (peer.rest_from < peer.rest.size()) {
            return;
        }
        peer.rest = {};
        peer.rest_from = 0;
    }
    while (!turn_.is_read_out() && peer.copied < area_turn_nbytes && !peer.dead && !peer.closing && !peer.works() &&
           peer.rest.empty() && peer.replies.size() < largest_backlog && (peer.readable || peer.socket.pending()) &&
           (!peer.hung_up || peer.replies.empty())) {
        const ssize_t got = receive_some(peer);
        if (got < 0 && errno == EAGAIN) {
            peer.readable = false;
        } else if (got < 0 && errno == EPROTO) {
            bad_frame(peer, peer.socket.trouble(errno).c_str());
        } else if (got == 0 || (got < 0 && errno != EINTR)) {
            close_peer(peer);
        }
    }
}

// Receives once, and handles the bytes. Returns the same as receive() of a stream.
ssize_t Server::receive_some(Peer& peer) {
    std::array<iovec, 2> parts{};
    std::size_t count = 0;
    std::size_t room = 0;
    const bool direct = peer.stage == Peer::Stage::payload && peer.room > 0 && !peer.by_area();
    if (direct) {
        const std::uint64_t most = std::min(direct_nbytes, turn_.step_nbytes());
        parts[count++] = {peer.into, static_cast<std::size_t>(std::min<std::uint64_t>(peer.room, most))};
        room = parts[0].iov_len;
    }
    if (!direct || peer.room == room) {
        parts[count++] = {scratch_.data(), scratch_.size()};
        room += scratch_.size();
    }
    turn_.spend(work::call);
    const ssize_t got = peer.socket.receive(parts.data(), count);
    if (got <= 0) {
        return got;
    }
    const auto nbytes = static_cast<std::size_t>(got);
    turn_.spend(nbytes);
    counts_.bytes_in += nbytes;
    peer.received = Clock::now();
    peer.sending.moved(nbytes, time_.at(peer.received), seconds(settings_.stall));
    peer.readable = nbytes == room || peer.hung_up;  // else nothing more was there, and epoll tells when more comes
    std::size_t rest = nbytes;
    if (direct) {
        const std::size_t landed = std::min(nbytes, parts[0].iov_len);
        peer.crc = crc32c(peer.into, landed, peer.crc);
        peer.into += landed;
        peer.room -= landed;
        peer.left -= landed;
        rest -= landed;
        if (peer.left == 0) {
            payload_complete(peer);
        }
    }
    const std::size_t used = feed(peer, scratch_.data(), rest);
    if (used < rest && !peer.dead && !peer.closing) {
        peer.rest.assign(scratch_.data() + used, scratch_.data() + rest);
    }
    return got;
}

// Handles received bytes, and returns how many; the others wait for a later turn.
std::size_t Server::feed(Peer& peer, const std::byte* data, std::size_t nbytes) {
    std::size_t done = 0;
    while (done < nbytes && !peer.dead && !peer.closing && !peer.works() && peer.copied < area_turn_nbytes) {
        const bool begins =
            peer.have == 0 && (peer.stage == Peer::Stage::header || (peer.stage == Peer::Stage::payload && peer.by_area()));
        if (begins && turn_.is_read_out()) {
            break;
        }
        done += feed_some(peer, data + done, nbytes - done);
        if (!peer.dead && !peer.closing && peer.stage == Peer::Stage::meta && peer.have == peer.meta.size()) {
            if (is_whole(peer.header, peer.meta.data())) {
                peer.begun = peer.received;
                frame_begun(peer);
            } else {
                bad_frame(peer, "a frame whose header is not what was sent");
            }
        }
    }
    return done;
}

// Handles the next field of a frame, or the part of it that has arrived; returns its bytes.
std::size_t Server::feed_some(Peer& peer, const std::byte* data, std::size_t nbytes) {
    std::size_t used = 0;
    const auto fill = [&](void* field, std::size_t size) {
        used = std::min(nbytes, size - peer.have);
        std::memcpy(static_cast<std::byte*>(field) + peer.have, data, used);
        peer.have += used;
        return peer.have == size;
    };
    if (peer.stage == Peer::Stage::header) {
        if (peer.have == 0) {
            peer.sending.begin(now(), seconds(settings_.stall));
        }
        if (fill(&peer.header, sizeof peer.header)) {
            if (const char* fault = header_fault(peer.header)) {
                bad_frame(peer, fault);
                return used;
            }
            peer.meta.resize(peer.header.meta_nbytes);
            peer.have = 0;
            peer.stage = Peer::Stage::meta;
        }
    } else if (peer.stage == Peer::Stage::meta) {
        fill(peer.meta.data(), peer.meta.size());
    } else if (peer.stage == Peer::Stage::checksum) {
        if (fill(&peer.header.payload_crc, sizeof peer.header.payload_crc)) {
            frame_complete(peer);
        }
    } else if (peer.by_area()) {
        if (fill(&peer.part, sizeof peer.part)) {
            peer.have = 0;
            take_part(peer);
        }
    } else {
        used = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, peer.left));
        take(peer, data, used);
    }
    return used;
}

// Takes bytes of a payload, which has at least as many to come.
void Server::take(Peer& peer, const std::byte* data, std::size_t nbytes) {
    while (nbytes > 0) {
        if (peer.room == 0 && peer.refusal == Status::done) {
            extend_put(peer);
        }
        const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, peer.room > 0 ? peer.room : peer.left));
        if (peer.room > 0) {
            peer.crc = copy_crc32c(peer.into, data, step, peer.crc);
            peer.into += step;
            peer.room -= step;
        }
        peer.left -= step;
        data += step;
        nbytes -= step;
    }
    if (peer.left == 0) {
        payload_complete(peer);
    }
}

// Copies the next bytes of a payload from the publish area. The client may change them at any time: only the copy is checked.
void Server::take_part(Peer& peer) {
    const auto [offset, nbytes] = peer.part;
    if (nbytes == 0 || nbytes > peer.left || offset > peer.area.nbytes() || nbytes > peer.area.nbytes() - offset) {
        return bad_frame(peer, "a part of a payload that lies outside of the publish area or of the payload");
    }
    peer.copying = peer.part;
    go_on_with_part(peer);
}

void Server::go_on_with_part(Peer& peer) {
    AreaPart& left = peer.copying;
    while (left.nbytes > 0 && !turn_.is_read_out() && peer.copied < area_turn_nbytes) {
        const auto step = static_cast<std::uint32_t>(std::min<std::size_t>(left.nbytes, area_step_nbytes));
        const std::byte* const from = peer.area.data() + left.offset;
        left.offset += step;
        left.nbytes -= step;
        peer.copied += step;
        turn_.spend(step);
        peer.sending.moved(step, now(), seconds(settings_.stall));
        take(peer, from, step);
    }
}

// Gives up a connection after a bad frame: where the next one begins is not known any more.
void Server::bad_frame(Peer& peer, const char* what) {
    ++counts_.bad_frames;
    note("bad_frame", peer.session, what);
    close_peer(peer);
}

void Server::reply(Peer& peer, Status status, std::uint64_t serial, std::string meta) {
    Reply& reply = peer.replies.emplace_back();
    reply.header = make_header(static_cast<Op>(peer.header.op));
    reply.header.status = static_cast<std::uint16_t>(status);
    reply.header.request = peer.header.request;
    reply.header.serial = serial;
    reply.header.lease = peer.header.lease;
    reply.header.tenant = peer.tenant;
    reply.header.epoch = peer.objects->epoch();
    reply.begun = peer.begun;
    reply.meta = std::move(meta);
    seal(reply.header, reply.meta.data(), static_cast<std::uint32_t>(reply.meta.size()));
    if (peer.replies.size() == 1) {
        peer.receiving.begin(now(), seconds(settings_.stall));
    }
}

// Turns a reply that has begun into a refusal.
void Server::refuse(Reply& answer, Status status, std::string meta) {
    answer.header.status = static_cast<std::uint16_t>(status);
    answer.header.serial = 0;
    answer.header.payload_nbytes = 0;
    answer.header.payload_crc = 0;
    answer.meta = std::move(meta);
    seal(answer.header, answer.meta.data(), static_cast<std::uint32_t>(answer.meta.size()));
}

void Server::flush(Peer& peer) {
    const std::size_t most = turn_.step_nbytes();
    // Send something in each turn, even if reading took all of the turn.
    for (bool first = true; (first || !turn_.is_over()) && !peer.replies.empty(); first = false) {
        std::array<iovec, 3 * replies_at_once> parts;
        std::size_t count = 0;
        std::size_t offered = 0;
        File& file = peer.replies.front().file;  // a reply with one goes alone
        for (auto reply = peer.replies.begin();
             reply != peer.replies.end() && reply->ticket == 0 && count + 3 <= parts.size() && offered < most; ++reply) {
            if (count > 0 && (file.fd() >= 0 || reply->file.fd() >= 0)) {
                break;
            }
            std::uint64_t skip = reply->sent;
            const auto add = [&](const void* data, std::uint64_t nbytes) {
                if (skip >= nbytes) {
                    skip -= nbytes;
                    return;
                }
                const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes - skip, most));
                parts[count++] = {const_cast<std::byte*>(static_cast<const std::byte*>(data) + skip), step};
                offered += step;
                skip = 0;
            };
            add(&reply->header, sizeof reply->header);
            add(reply->meta.data(), reply->meta.size());
            add(reply->payload, reply->header.payload_nbytes);
        }
        if (count == 0) {  // waits for the file
            return;
        }
        const ssize_t done =
            file.fd() >= 0 ? peer.socket.send_with_file(parts.data(), count, file.fd()) : peer.socket.send(parts.data(), count);
        turn_.spend(work::call);
        if (done < 0) {
            peer.writable = errno != EAGAIN;
            if (errno != EAGAIN && errno != EINTR) {
                close_peer(peer);
            }
            return;
        }
        file = File();
        turn_.spend(static_cast<std::uint64_t>(done));
        sent(peer, static_cast<std::size_t>(done));
        if (static_cast<std::size_t>(done) < offered) {
            peer.writable = false;
            return;
        }
    }
}

void Server::sent(Peer& peer, std::size_t nbytes) {
    const Clock::time_point handed_over = Clock::now();  // one look at the clock for all replies: it costs more than counting
    counts_.bytes_out += nbytes;
    peer.receiving.moved(nbytes, time_.at(handed_over), seconds(settings_.stall));
    while (nbytes > 0) {
        Reply& first = peer.replies.front();
        const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, first.nbytes() - first.sent));
        first.sent += step;
        nbytes -= step;
        if (first.sent == first.nbytes()) {
            tallies_.add(first.header, handed_over - first.begun);
            let_go(peer, first);
            peer.replies.pop_front();
        }
    }
    start_fetches(peer);
    if (!peer.in_line) {
        send_held_back(peer);
    }
}

void Server::let_go(Peer& peer, Reply& reply) {
    peer.fetching -= std::exchange(reply.fetched, 0);
    if (const std::uint64_t nbytes = std::exchange(reply.unsent, 0); nbytes > 0) {
        peer.holding -= nbytes;
        const auto object = peer.unsent->objects.find(reply.held_object);
        if (--object->second.replies == 0) {
            peer.unsent->nbytes -= object->second.nbytes;
            peer.objects->count_unsent(-static_cast<std::int64_t>(object->second.nbytes));
            peer.unsent->objects.erase(object);
            room_in_lines_ = room_in_lines_ || !peer.unsent->waiting.empty();
        }
    }
    if (reply.held_object != 0) {
        peer.objects->release(reply.held_object);
        reply.held_object = 0;
    }
}

}  // namespace farpool
