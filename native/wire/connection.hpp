// The client's end of an authenticated stream to a node (docs/wire.md).
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <string>
#include <string_view>

#include "core/error.hpp"
#include "wire/frame.hpp"

namespace farpool {

struct Request {
    Op op;
    std::string_view meta{};
    std::uint64_t generation = 0;
    std::uint64_t lease = 0;
    const void* payload = nullptr;
    std::size_t nbytes = 0;
};

struct ReplyHead {
    std::uint16_t status = 0;
    std::uint64_t generation = 0;
    std::size_t nbytes = 0;  // of the payload, which has to be received or dropped before anything else
    std::string meta;
};

// Used by one thread at a time. Deadlines are monotonic_seconds(). What fails leaves the connection broken, except for a
// payload whose checksum is wrong: its bytes were all read, so the stream goes on.
class Connection {
public:
    struct Settings {
        std::uint32_t tenant = 0;
        std::uint8_t credential = 0;
        double spin = 0;                  // seconds of asking the socket over and over before a wait blocks
        void (*interrupted)() = nullptr;  // called when a signal ended a wait; what it throws ends the exchange
    };

    // Owns the descriptor.
    Connection(int fd, std::string node, const Settings& settings);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    void send(const Request& request, double deadline);
    // The reply to the oldest unanswered request.
    ReplyHead receive_head(double deadline);
    void receive_payload(void* into, double deadline);
    void drop_payload(double deadline);
    void close() noexcept;
    // Ends what another thread waits for, which fails then. The caller sees to it that `close` is not under way.
    void shut_down() noexcept;
    void give_up() noexcept { broken_ = true; }
    // Of an idle connection: whether it is of no more use, because the node has hung up or sent what nobody asked for.
    bool stale() const noexcept;
    // Says that no more requests come. Once await_end() has returned, the node has done all that it will ever do with those
    // that it was sent: without it, a late one could undo what was asked for over another connection.
    void hang_up() noexcept;
    void await_end(double deadline);

    const std::string& node() const noexcept { return node_; }
    bool broken() const noexcept { return broken_; }
    std::size_t unanswered() const noexcept { return unanswered_.size(); }
    // Whether the payload is here already, so that taking it will not wait.
    bool payload_is_here() const noexcept { return end_ - begin_ >= payload_nbytes_; }

private:
    void push(iovec* parts, std::size_t count, double deadline);
    void rest(double& spin_until, unsigned attempt, short events, double deadline, const char* what);
    [[noreturn]] void fail(ErrorKind kind, const std::string& message, int code = 0);
    void require_whole();
    void wait(short events, double deadline, const char* what);
    std::size_t receive_some(void* into, std::size_t nbytes, double deadline);
    void take(void* into, std::size_t nbytes, double deadline);
    bool reply_waits() const noexcept;

    int fd_;
    const std::string node_;
    const Settings settings_;
    bool broken_ = false;
    bool half_open_ = false;  // the node takes no more requests, but its last replies can be read
    std::uint64_t requests_ = 0;
    std::deque<Op> unanswered_;
    Op payload_op_ = Op::ping;
    std::size_t payload_nbytes_ = 0;
    std::uint32_t payload_crc_ = 0;
    // What was read and not yet taken. Small replies come with one call; after a large one only the next header is read
    // into it, as the rest would have to be copied.
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    std::size_t look_ahead_;
    std::array<std::byte, std::size_t{16} << 10> buffer_;
};

}  // namespace farpool
