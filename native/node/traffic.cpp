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
// Bytes that one connection may move before the next one has its turn.
constexpr std::size_t turn_nbytes = 1024 * 1024;
// Bytes that one connection may copy from a publish area in a turn. Less, as the client is told after each turn what is free.
constexpr std::size_t area_turn_nbytes = 256 * 1024;
constexpr std::uint64_t turn_keys = 512;      // keys looked up in a turn; all lookups that have been received are answered
constexpr std::size_t largest_backlog = 128;  // replies; a peer that takes none is not read from
constexpr std::size_t replies_at_once = 16;

}  // namespace

void Server::service(Peer& peer, std::uint32_t events) {
    if (peer.dead) {
        return;
    }
    const bool sent_first = (events & EPOLLOUT) != 0 && peer.socket.receiving_sends();
    if (((events & (EPOLLIN | EPOLLHUP | EPOLLERR)) != 0 || sent_first) && !peer.closing) {
        receive(peer);
    }
    if (!peer.dead) {
        flush(peer);
    }
    if (!peer.dead) {
        watch(peer);
    }
}

void Server::watch(Peer& peer) {
    if (peer.closing && peer.replies.empty()) {
        close_peer(peer);
        return;
    }
    const bool goes_on = !peer.closing && peer.replies.size() < largest_backlog && peer.committing == 0;
    const bool listening = goes_on && peer.rest.empty();
    const bool sending = !peer.replies.empty() && peer.replies.front().ticket == 0;
    const bool sending_first = listening && peer.socket.receiving_sends();
    const std::uint32_t wanted = (listening ? EPOLLIN : 0u) | (sending || sending_first ? EPOLLOUT : 0u);
    if (listening && (peer.watched & EPOLLIN) == 0) {  // what it has begun did not go on because of us
        peer.sending.begin(seconds(settings_.stall));
    }
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
    if ((goes_on && !peer.rest.empty()) || (listening && peer.socket.pending())) {
        again_.emplace_back(peer.socket.fd(), peer.number);
    }
}

void Server::receive(Peer& peer) {
    peer.looked_up = 0;
    peer.copied = 0;
    if (peer.committing != 0 && !go_on_with_commit(peer)) {
        return;
    }
    const std::vector<std::byte> rest = std::exchange(peer.rest, {});
    feed(peer, rest.data(), rest.size());
    receive_more(peer);
    // As long as it waits for room in the area, it sends no more.
    const std::uint64_t taken = peer.header.payload_nbytes - peer.left;
    if (!peer.dead && peer.stage == Peer::Stage::payload && peer.by_area() && peer.header.payload_nbytes > peer.area.nbytes() &&
        taken > peer.told) {
        peer.told = taken;
        reply(peer, Status::taken, taken);
    }
}

void Server::receive_more(Peer& peer) {
    for (std::size_t moved = 0; moved < turn_nbytes && peer.copied < area_turn_nbytes && peer.looked_up < turn_keys &&
                                !peer.dead && !peer.closing && peer.committing == 0 && peer.rest.empty() &&
                                peer.replies.size() < largest_backlog;) {
        std::array<iovec, 2> parts{};
        std::size_t count = 0;
        std::size_t room = 0;
        const bool direct = peer.stage == Peer::Stage::payload && peer.room > 0 && !peer.by_area();
        if (direct) {
            parts[count++] = {peer.into, static_cast<std::size_t>(std::min<std::uint64_t>(peer.room, direct_nbytes))};
            room = parts[0].iov_len;
        }
        if (!direct || peer.room <= direct_nbytes) {
            parts[count++] = {scratch_.data(), scratch_.size()};
            room += scratch_.size();
        }
        const ssize_t got = peer.socket.receive(parts.data(), count);
        if (got <= 0) {
            if (got < 0 && errno == EPROTO) {
                bad_frame(peer, peer.socket.trouble(errno).c_str());
            } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
                close_peer(peer);
            }
            return;
        }
        const auto nbytes = static_cast<std::size_t>(got);
        moved += nbytes;
        counts_.bytes_in += nbytes;
        peer.sending.moved(nbytes, seconds(settings_.stall));
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
        if (rest > 0 && !peer.dead) {
            feed(peer, scratch_.data(), rest);
        }
        if (nbytes < room) {  // nothing more was there
            return;
        }
    }
}

void Server::feed(Peer& peer, const std::byte* data, std::size_t nbytes) {
    while (nbytes > 0 && !peer.dead && !peer.closing) {
        std::size_t used = 0;
        if (peer.committing != 0 || peer.copied >= area_turn_nbytes) {
            peer.rest.assign(data, data + nbytes);
            return;
        }
        if (peer.stage == Peer::Stage::header) {
            if (peer.have == 0) {
                peer.sending.begin(seconds(settings_.stall));
            }
            used = std::min(nbytes, sizeof peer.header - peer.have);
            std::memcpy(reinterpret_cast<std::byte*>(&peer.header) + peer.have, data, used);
            peer.have += used;
            if (peer.have == sizeof peer.header) {
                if (const char* fault = header_fault(peer.header)) {
                    bad_frame(peer, fault);
                    return;
                }
                peer.meta.resize(peer.header.meta_nbytes);
                peer.have = 0;
                peer.stage = Peer::Stage::meta;
            }
        } else if (peer.stage == Peer::Stage::meta) {
            used = std::min(nbytes, peer.meta.size() - peer.have);
            std::memcpy(peer.meta.data() + peer.have, data, used);
            peer.have += used;
        } else if (peer.stage == Peer::Stage::checksum) {
            used = std::min(nbytes, sizeof peer.header.payload_crc - peer.have);
            std::memcpy(reinterpret_cast<std::byte*>(&peer.header.payload_crc) + peer.have, data, used);
            peer.have += used;
            if (peer.have == sizeof peer.header.payload_crc) {
                frame_complete(peer);
            }
        } else if (peer.by_area()) {
            used = std::min(nbytes, sizeof peer.part - peer.have);
            std::memcpy(reinterpret_cast<std::byte*>(&peer.part) + peer.have, data, used);
            peer.have += used;
            if (peer.have == sizeof peer.part) {
                peer.have = 0;
                take_part(peer);
            }
        } else {
            used = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, peer.left));
            take(peer, data, used);
        }
        data += used;
        nbytes -= used;
        if (peer.stage == Peer::Stage::meta && peer.have == peer.meta.size()) {
            if (!is_whole(peer.header, peer.meta.data())) {
                bad_frame(peer, "a frame whose header is not what was sent");
                return;
            }
            peer.begun = Clock::now();
            frame_begun(peer);
        }
    }
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
    peer.copied += nbytes;
    peer.sending.moved(nbytes, seconds(settings_.stall));
    take(peer, peer.area.data() + offset, nbytes);
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
        peer.receiving.begin(seconds(settings_.stall));
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
    for (std::size_t moved = 0; moved < turn_nbytes && !peer.replies.empty();) {
        std::array<iovec, 3 * replies_at_once> parts;
        std::size_t count = 0;
        std::size_t offered = 0;
        File& file = peer.replies.front().file;  // a reply with one goes alone
        for (auto reply = peer.replies.begin();
             reply != peer.replies.end() && reply->ticket == 0 && count + 3 <= parts.size() && offered < turn_nbytes; ++reply) {
            if (count > 0 && (file.fd() >= 0 || reply->file.fd() >= 0)) {
                break;
            }
            std::uint64_t skip = reply->sent;
            const auto add = [&](const void* data, std::uint64_t nbytes) {
                if (skip >= nbytes) {
                    skip -= nbytes;
                    return;
                }
                const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes - skip, turn_nbytes));
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
        if (done < 0) {
            if (errno != EAGAIN && errno != EINTR) {
                close_peer(peer);
            }
            return;
        }
        file = File();
        sent(peer, static_cast<std::size_t>(done));
        moved += static_cast<std::size_t>(done);
        if (static_cast<std::size_t>(done) < offered) {
            return;
        }
    }
}

void Server::sent(Peer& peer, std::size_t nbytes) {
    counts_.bytes_out += nbytes;
    peer.receiving.moved(nbytes, seconds(settings_.stall));
    while (nbytes > 0) {
        Reply& first = peer.replies.front();
        const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, first.nbytes() - first.sent));
        first.sent += step;
        nbytes -= step;
        if (first.sent == first.nbytes()) {
            tallies_.add(first.header, Clock::now() - first.begun);
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
        peer.objects->drop(reply.held_object);
        reply.held_object = 0;
    }
}

}  // namespace farpool
