// Limits on the objects held for unsent replies, per connection and per access key: a client that sends gets and does not read
// the replies must not keep others from publishing.
#include "node/hold.hpp"
#include "node/server.hpp"

namespace farpool {

namespace {

// Bytes of objects that the replies of one connection may hold; one object is always allowed.
constexpr std::uint64_t most_of_connection = std::uint64_t{16} << 20;

bool has_room_here(const Peer& peer, const Found& found) {
    return peer.holding == 0 || peer.holding + found.nbytes <= most_of_connection;
}

}  // namespace

bool Server::may_hold(const Peer& peer, const Found& found) const {
    const Unsent& unsent = *peer.unsent;
    return unsent.nbytes == 0 || unsent.objects.contains(found.offset) ||
           peer.objects->may_send(found, unsent.nbytes, budget_.share_of_objects(peer.tenant) / 2);
}

bool Server::has_room(const Peer& peer, const Found& found) const {
    return found.nbytes == 0 || (has_room_here(peer, found) && may_hold(peer, found));
}

// Answers the oldest gets that wait, as far as their objects may be held; false where the next one has to wait in the line of
// its access key.
bool Server::send_held_back(Peer& peer) {
    while (!peer.held_back.empty()) {
        const auto& [ticket, key] = peer.held_back.front();
        Reply& answer = *std::find_if(peer.replies.rbegin(), peer.replies.rend(),
                                      [ticket = ticket](const Reply& reply) { return reply.ticket == ticket; });
        const Found found = peer.objects->find(key, false);
        if (found.status == Status::done && found.view != nullptr && found.nbytes > 0) {
            if (!has_room_here(peer, found)) {
                return true;  // goes on when its own replies have gone
            }
            if (!may_hold(peer, found)) {
                if (!peer.in_line) {
                    peer.in_line = true;
                    peer.unsent->waiting.emplace_back(peer.socket.fd(), peer.number);
                }
                return false;
            }
        }
        answer.ticket = 0;
        if (&answer == &peer.replies.front()) {
            peer.receiving.begin(now(), seconds(settings_.stall));
        }
        if (found.status == Status::done) {
            send_object(peer, answer, found, key);
        } else {
            refuse(answer, found.status);
        }
        peer.held_back.pop_front();
    }
    return true;
}

void Server::send_object(Peer& peer, Reply& answer, const Found& found, std::string_view key) {
    answer.header.serial = found.serial;
    answer.meta.assign(reinterpret_cast<const char*>(&found.head), sizeof found.head);
    if (found.view == nullptr) {  // it has left memory meanwhile
        return start_fetch(peer, answer, expect(peer, answer, found, key, 0));
    }
    answer.header.payload_nbytes = found.nbytes;
    answer.header.payload_crc = found.crc;
    seal(answer.header, answer.meta.data(), static_cast<std::uint32_t>(answer.meta.size()));
    if (found.nbytes == 0) {
        return;
    }
    answer.payload = found.view;
    answer.held_object = found.offset;
    answer.unsent = found.nbytes;
    peer.objects->hold(found);
    peer.holding += found.nbytes;
    const std::uint64_t room = peer.objects->ram_nbytes(found);
    const auto [object, is_new] = peer.unsent->objects.try_emplace(found.offset, Unsent::Object{room, 0});
    ++object->second.replies;
    if (is_new) {
        peer.unsent->nbytes += room;
        peer.objects->count_unsent(static_cast<std::int64_t>(room));
    }
}

void Server::serve_those_in_line() {
    if (!std::exchange(room_in_lines_, false)) {
        return;
    }
    for (auto& [owner, unsent] : unsent_) {
        while (!unsent.waiting.empty()) {
            const auto [fd, number] = unsent.waiting.front();
            const auto found = peers_.find(fd);
            if (found != peers_.end() && found->second->number == number && !found->second->dead) {
                Peer& peer = *found->second;
                try {
                    peer.in_line = !send_held_back(peer);
                    watch(peer);
                } catch (const std::exception& error) {
                    note("error", peer.session, error.what());
                    close_peer(peer);
                }
                if (peer.in_line && !peer.dead) {
                    break;
                }
            }
            unsent.waiting.pop_front();
        }
    }
}

}  // namespace farpool
