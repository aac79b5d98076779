#include "node/connection.hpp"

#include <sys/epoll.h>

#include <array>
#include <cerrno>
#include <string>

namespace farpool {

NodeConnection::NodeConnection(Stream socket, Client client, Turns::Seat seat, Services& services)
    : socket_(std::move(socket)),
      client_(std::move(client)),
      seat_(std::move(seat)),
      services_(services),
      input_(services.deadlines, services.turn),
      replies_(client_, services),
      protocol_(client_, input_, replies_, services, socket_.passes_files()) {}

void NodeConnection::note_events(std::uint32_t events) {
    const bool broken = (events & (EPOLLHUP | EPOLLERR)) != 0;
    hung_up_ = hung_up_ || broken || (events & EPOLLRDHUP) != 0;
    writable_ = writable_ || broken || (events & EPOLLOUT) != 0;
    readable_ = readable_ || hung_up_ || (events & EPOLLIN) != 0 || ((events & EPOLLOUT) != 0 && socket_.receiving_sends());
}

bool NodeConnection::may_read() const {
    // When we read the end of a stream, we close the connection, so we send all replies first.
    const bool may_end = !hung_up_ || replies_.empty();
    const bool has_input = input_.has_rest() || (has_more() && may_end);
    return !input_.has_ended() && (works() || (has_input && !replies_.is_full()));
}

void NodeConnection::serve(std::vector<std::byte>& scratch) {
    if (may_read()) {
        receive(scratch);
    }
    if (!dead_ && may_send()) {
        const Replies::Sent sent = replies_.flush(socket_, services_.turn);
        writable_ = sent != Replies::Sent::blocked;
        dead_ = sent == Replies::Sent::broken;
    }
}

std::uint32_t NodeConnection::wanted_events() {
    const bool listening = !input_.has_ended() && !works() && !replies_.is_full() && !input_.has_rest();
    if (listening && !listening_) {  // the node delayed the frame that has begun, and not the client
        input_.progress().begin();
    }
    listening_ = listening;
    const bool waits_for_room = (replies_.is_ready() && !writable_) || (listening && socket_.receiving_sends());
    return EPOLLIN | EPOLLRDHUP | EPOLLET | (waits_for_room ? EPOLLOUT : 0u);
}

void NodeConnection::begin_turn(Clock::time_point now) {
    if (waits_since_) {
        input_.progress().excuse(now - *waits_since_);
        replies_.progress().excuse(now - *waits_since_);
        waits_since_.reset();
    }
}

const char* NodeConnection::stall(Clock::time_point now) const noexcept {
    now = waits_since_.value_or(now);  // since then the node delays the connection, and not the client
    if (input_.is_in_frame() && listening_ && input_.progress().is_over(now)) {
        return "a connection rested in the middle of a frame for too long and was closed";
    }
    return replies_.is_stalled(now) ? "a connection did not take its replies for too long and was closed" : nullptr;
}

const char* NodeConnection::keeps_ended_lease(Clock::time_point now) {
    if (!replies_.keep_ended_lease() && !protocol_.keeps_ended_lease()) {
        keeps_since_.reset();
        return nullptr;
    }
    keeps_since_ = keeps_since_.value_or(now);
    return now - *keeps_since_ > services_.deadlines.stall()
               ? "a connection took too long to read or write a lease that had ended, and was closed"
               : nullptr;
}

void NodeConnection::close() {
    dead_ = true;
    closed_ = true;
    replies_.clear();
    protocol_.close();
    if (input_.has_area()) {
        const Segment area = input_.take_area();
        const std::uint64_t nbytes = area.memory.nbytes();
        discard(area, 0, nbytes);  // a program may keep the file that it received
        services_.sessions.uncharge_area(client_, nbytes);
    }
    services_.sessions.leave(client_);
}

void NodeConnection::receive(std::vector<std::byte>& scratch) {
    input_.begin_turn();
    if (protocol_.is_busy()) {
        protocol_.go_on();
    } else if (input_.is_copying()) {
        input_.go_on(protocol_);
    }
    check_input();
    if (!works()) {
        receive_more(scratch);
    }
    if (dead_) {
        return;
    }
    if (const auto copied = input_.progress_to_report()) {
        replies_.add(input_.header(), input_.begun(), Status::taken, *copied);
    }
}

// Continues to read where the previous turn ended: first we handle the bytes that it received.
void NodeConnection::receive_more(std::vector<std::byte>& scratch) {
    const bool none_wait = input_.handle_rest(protocol_);
    check_input();
    if (!none_wait) {
        return;
    }
    while (!services_.turn.is_read_out() && input_.may_copy() && !dead_ && !input_.has_ended() && !works() &&
           !input_.has_rest() && !replies_.is_full() && has_more() && (!hung_up_ || replies_.empty())) {
        const ssize_t got = receive_some(scratch);
        if (got < 0 && errno == EAGAIN) {
            readable_ = false;
        } else if (got < 0 && errno == EPROTO) {
            input_.fail(socket_.trouble(errno));
        } else if (got == 0 || (got < 0 && errno != EINTR)) {
            dead_ = true;
        }
        check_input();
    }
}

// Receives once, and handles the bytes. Returns the same as receive() of a stream.
ssize_t NodeConnection::receive_some(std::vector<std::byte>& scratch) {
    std::array<iovec, 2> parts{};
    std::size_t count = 0;
    const iovec direct = input_.direct();
    std::size_t room = direct.iov_len;
    if (room > 0) {
        parts[count++] = direct;
    }
    if (input_.is_direct_last(room)) {
        parts[count++] = {scratch.data(), scratch.size()};
        room += scratch.size();
    }
    services_.turn.spend(work::call);
    const ssize_t got = socket_.receive(parts.data(), count);
    if (got <= 0) {
        return got;
    }
    const auto nbytes = static_cast<std::size_t>(got);
    services_.turn.receive(nbytes);
    services_.tallies.add_in(nbytes);
    readable_ = nbytes == room || hung_up_;  // otherwise nothing more was there, and epoll reports when more arrives
    const std::size_t landed = std::min(nbytes, direct.iov_len);
    input_.handle(protocol_, landed, scratch.data(), nbytes - landed, Clock::now());
    return got;
}

// Gives the connection up after a bad frame.
void NodeConnection::check_input() {
    if (input_.fault() && !dead_) {
        services_.tallies.add_bad_frame();
        services_.events.note("bad_frame", client_.session, *input_.fault());
        dead_ = true;
    }
}

}  // namespace farpool
