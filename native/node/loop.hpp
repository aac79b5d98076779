// The loop of a node: waits for events of its connections, and gives each connection its turns.
#pragma once

#include <sys/epoll.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "node/alarm.hpp"
#include "node/connection.hpp"
#include "node/fetches.hpp"
#include "node/services.hpp"
#include "node/turns.hpp"

namespace farpool {

class Loop {
public:
    // `alarm` wakes the loop.
    Loop(Services& services, const Alarm& alarm);
    Loop(const Loop&) = delete;
    Loop& operator=(const Loop&) = delete;

    // Waits at most `milliseconds` for events, until a tenant that has work is below its cap, and not at all if connections
    // have work. False if there are no events and no work. Called by the loop's thread, without the node's lock.
    bool wait(int milliseconds);
    // Notes the events that wait() found; true if the alarm woke the loop.
    bool note_events(Clock::time_point now);
    // Serves connections for about the work of one turn, and closes the ones that are finished.
    void serve();
    // Ends a round: finds out whether connections have more work, and when.
    void end_round();
    // Adds a connection. `client` lacks its number. Throws std::system_error, and then the stream is closed.
    void add(Stream stream, Client client);
    // Completes the reply that waits for a fetch, if its connection is still open.
    void deliver(const Fetch& fetch, bool ok);
    // As in Services.
    bool give_up_a_put(const Catalogue& objects);
    // Drops the rest of writes, and refuses reads that wait, where a later epoch or an order does not allow them any more.
    void fence();
    // Closes connections: of an access key, that are too slow, and all.
    void close_key(std::string_view key);
    void close_slow();
    void close_all();

    std::size_t size() const noexcept { return connections_.size(); }
    // The order of turns, with the bandwidth of each tenant.
    Turns& turns() noexcept { return turns_; }
    const Turns& turns() const noexcept { return turns_; }
    // Bytes that publish areas take according to the system, by tenant.
    std::map<std::uint32_t, std::uint64_t> areas_taken() const;

private:
    NodeConnection* find(int fd, std::uint64_t number) const;
    void serve_turns();
    void serve_lines();
    template <typename Work>
    void work_on(NodeConnection& connection, Work work);
    void settle(NodeConnection& connection);
    void queue(NodeConnection& connection);
    void close(NodeConnection& connection);
    void reap();

    Services& services_;
    File epoll_;
    const Alarm& alarm_;
    Turns turns_;
    std::unordered_map<int, std::unique_ptr<NodeConnection>> connections_;  // by descriptor
    std::vector<int> closed_;                                               // kept until the present events have been handled
    std::vector<std::byte> scratch_;
    std::uint64_t numbers_ = 0;  // of connections
    std::array<epoll_event, 64> ready_{};
    int ready_count_ = 0;
    Clock::time_point now_{};                     // the time of this round, or of its last turn
    bool has_work_ = false;                       // connections have work that needs no event
    std::optional<Clock::time_point> next_at_{};  // as Turns::next_at() said at the end of the round
};

}  // namespace farpool
