// One connection to a node, at the node: its socket, and what it may do next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "node/client.hpp"
#include "node/input.hpp"
#include "node/protocol.hpp"
#include "node/replies.hpp"
#include "node/services.hpp"
#include "node/turns.hpp"
#include "wire/stream.hpp"

namespace farpool {

class NodeConnection {
public:
    // Takes the stream over, which is non-blocking.
    NodeConnection(Stream socket, Client client, Turns::Seat seat, Services& services);
    NodeConnection(const NodeConnection&) = delete;
    NodeConnection& operator=(const NodeConnection&) = delete;

    const Client& client() const noexcept { return client_; }
    Turns::Flow& seat() const noexcept { return *seat_; }
    Replies& replies() noexcept { return replies_; }
    Protocol& protocol() noexcept { return protocol_; }
    // Bytes that its publish area takes according to the system.
    std::uint64_t area_taken() const noexcept { return input_.area_taken(); }
    // Time by which the frame that is being received has to go on.
    Clock::time_point frame_deadline() const noexcept { return input_.progress().end(); }

    // Notes what epoll reports (EPOLLIN and so on). It reports each change once, so the note stays until a read or a send finds
    // nothing more.
    void note_events(std::uint32_t events);
    bool may_read() const;
    bool may_send() const { return writable_ && replies_.is_ready(); }
    // Notes that the connection waits for its turn, or has no work and does not.
    void wait_for_turn(Clock::time_point now) { waits_since_ = waits_since_.value_or(now); }
    void end_wait() noexcept { waits_since_.reset(); }
    // Begins a turn. The client does not answer for the time for which the connection waited.
    void begin_turn(Clock::time_point now);
    // Receives and handles requests, and sends replies, as far as the turn allows. `scratch`: for bytes that are not payload.
    void serve(std::vector<std::byte>& scratch);
    // Events that epoll should report, and a note that it does: true if it did not before.
    std::uint32_t wanted_events();
    bool watch(std::uint32_t events) noexcept { return std::exchange(watched_, events) != events; }
    // True once the connection has nothing more to do.
    bool is_finished() const noexcept { return input_.has_ended() && replies_.empty(); }

    // True if the connection is broken or closed.
    bool is_dead() const noexcept { return dead_; }
    // Why the connection is too slow; null if it is not.
    const char* stall(Clock::time_point now) const noexcept;
    // Why the connection takes too long with a lease that has ended, whose memory stays until then; null if it does not.
    const char* keeps_ended_lease(Clock::time_point now);
    // Releases everything that the connection holds. The socket stays open until the connection is destroyed.
    void close();
    bool is_closed() const noexcept { return closed_; }

private:
    bool works() const noexcept { return protocol_.is_busy() || input_.is_copying(); }
    bool has_more() const { return readable_ || socket_.pending(); }
    void receive(std::vector<std::byte>& scratch);
    void receive_more(std::vector<std::byte>& scratch);
    ssize_t receive_some(std::vector<std::byte>& scratch);
    void check_input();

    Stream socket_;
    const Client client_;
    Turns::Seat seat_;
    Services& services_;
    Input input_;
    Replies replies_;
    Protocol protocol_;
    bool readable_ = false;  // there may be input that we have not read
    bool writable_ = true;   // the socket may have room for output
    bool hung_up_ = false;   // the client sends no more
    bool listening_ = true;  // we read when there is input
    bool dead_ = false;
    bool closed_ = false;
    std::uint32_t watched_ = 0;
    std::optional<Clock::time_point> waits_since_{};  // for its turn
    std::optional<Clock::time_point> keeps_since_{};  // an ended lease
};

}  // namespace farpool
