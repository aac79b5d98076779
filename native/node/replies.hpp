// The replies of one connection, in the order of its requests.
//
// A reply whose payload is in the lower medium, or whose object may not be retained yet, keeps its place and is completed
// later; the replies after it wait.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>
#include <utility>

#include "node/client.hpp"
#include "node/deadlines.hpp"
#include "node/reply.hpp"
#include "node/services.hpp"
#include "wire/stream.hpp"

namespace farpool {

class Replies {
public:
    // A connection with so many replies is not read from.
    static constexpr std::size_t count_max = 128;

    Replies(const Client& client, Services& services) : client_(client), services_(services), progress_(services.deadlines) {}

    bool empty() const noexcept { return queue_.empty(); }
    bool is_full() const noexcept { return queue_.size() >= count_max; }
    // True if the next reply can be sent.
    bool is_ready() const noexcept { return !queue_.empty() && queue_.front().is_ready(); }
    // True if the client has not taken its replies for too long.
    bool is_stalled(Clock::time_point now) const noexcept { return is_ready() && progress_.is_over(now); }
    Reply& last() noexcept { return queue_.back(); }
    Patience& progress() noexcept { return progress_; }

    // Adds the reply to a request whose header arrived at `begun`.
    void add(const FrameHeader& request, Clock::time_point begun, Status status, std::uint64_t serial = 0,
             std::string meta = {});
    // Completes the last reply, to a get: sends the object, or delays the reply until it may hold the object.
    void send_object(const Found& found, std::string_view key);
    // Completes the last reply, to a pin.
    void send_pin(const Found& found, std::uint64_t ttl_ms) { pin(last(), found, ttl_ms); }
    // Completes the last reply when the payload has been read from the lower medium. `ttl_ms`: of a pin.
    void fetch(const Found& found, std::string_view key, std::uint64_t ttl_ms);

    // Completes the reply that waits for a fetch. Returns the bytes that were copied into RAM for it.
    std::uint64_t deliver(const Fetch& fetch, bool ok);
    // Completes the oldest delayed replies, as long as connection and access key are within their limits. False if the next one
    // must wait in its access key's line.
    bool send_delayed();
    // As send_delayed(), for a connection that is the first of its line: true if it leaves the line.
    bool leave_line() {
        in_line_ = !send_delayed();
        return !in_line_;
    }

    // Sends as much as the turn and the socket have room for.
    enum class Sent { all, blocked, broken };
    Sent flush(Stream& socket, Turn& turn);
    // Refuses reads of extents whose replies have not begun, if the session may not make them any more.
    void fence_reads();
    // True while a reply sends from a lease that has ended.
    bool keep_ended_lease() const;
    // Drops all replies and releases their objects.
    void clear();

private:
    struct Delayed {
        std::uint64_t ticket;
        std::string key;
    };

    void make_ready(Reply& reply);
    void pin(Reply& reply, const Found& found, std::uint64_t ttl_ms);
    void pin_again(Reply& reply, const Fetch& fetch);
    void attach(Reply& reply, const Found& found, std::string_view key);
    Fetch expect(Reply& reply, const Found& found, std::string_view key, std::uint64_t ttl_ms);
    void start_fetch(Reply& reply, const Fetch& fetch);
    void start_fetches();
    bool fits_connection(const Found& found) const;
    bool fits_key(const Found& found) const;
    void release(Reply& reply);
    void note_sent(std::size_t nbytes);

    const Client& client_;
    Services& services_;
    std::deque<Reply> queue_;
    Patience progress_;                  // of the client, with replies that are ready
    std::deque<Fetch> waiting_;          // until fewer bytes are being fetched
    std::uint64_t fetching_ = 0;         // bytes of fetched replies that have not been sent
    std::deque<Delayed> delayed_;        // gets that wait to hold their objects
    std::uint64_t retained_nbytes_ = 0;  // of objects to which these replies refer
    bool in_line_ = false;               // of the access key
};

}  // namespace farpool
