// The client's end of an authenticated stream to a node (docs/wire.md).
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "core/error.hpp"
#include "wire/frame.hpp"
#include "wire/parts.hpp"
#include "wire/publish_area.hpp"
#include "wire/stream.hpp"
#include "wire/tenant_epoch.hpp"

namespace farpool {

class PayloadSum;

struct Request {
    Op op;
    std::string_view meta{};
    std::uint64_t serial = 0;
    std::uint64_t lease = 0;
    Parts payload{};
    std::size_t nbytes = 0;  // of the payload
};

struct ReplyHead {
    std::uint16_t status = 0;
    std::uint64_t serial = 0;
    std::size_t nbytes = 0;  // of the payload, which has to be received or dropped before anything else
    std::string meta;
};

// Waits until something can be done with one of the sockets, or the deadline; answers as poll does.
int poll_until(std::span<pollfd> entries, double deadline) noexcept;

// Fails where a request has more bytes of meta than a frame may have.
void require_meta(const std::string& node, std::size_t nbytes);

// A request on its way out. What it points to has to stay as it is until it has been sent.
struct Outgoing {
    Request request;
    FrameHeader header{};
    PayloadSum* sum = nullptr;  // of a payload whose checksum follows it
    std::uint32_t crc = 0;
    std::size_t sent = 0;  // bytes of all of it
    FrameHeader asking{};  // goes before it: asks for a publish area
    bool asks = false;
    bool by_area = false;      // the payload goes through the publish area:
    std::string frames{};      // what is to be sent next
    std::size_t copied = 0;    // bytes of the payload
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
        bool area = false;  // payloads that are put go through a publish area, once the node has given one
        std::shared_ptr<TenantEpoch> epoch{};  // told to the node with each request, and learned from each reply; null: not
    };

    Connection(Stream stream, std::string node, const Settings& settings);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    void send(const Request& request, double deadline);
    // The reply to the oldest unanswered request.
    ReplyHead receive_head(double deadline);
    void receive_payload(void* into, double deadline);
    void drop_payload(double deadline);

    // The same without waiting, for whoever has several connections to look after (exchange.hpp). A payload of at least
    // PayloadSum::worth_it bytes needs its `sum`; the others may have one, which then knows the checksum for several connections.
    Outgoing begin(const Request& request, PayloadSum* sum);
    // Sends what the socket takes, at most `most` bytes at a time; whether all of it has gone.
    bool send_some(Outgoing& outgoing, std::size_t most);
    // Whether its payload would go through the publish area; then it needs no sum.
    bool by_area(const Request& request) const noexcept;
    // Whether what is being sent waits for the node to have copied from the publish area, and not for the socket.
    bool awaits_room() const noexcept { return awaits_room_; }
    // Whether the next reply's header and meta are here; then they are in `head`.
    bool receive_head_some(ReplyHead& head);
    // Whether the payload is here, or has been dropped if `into` is empty.
    bool receive_payload_some(Parts into);
    // Bytes that have gone out and come in.
    std::uint64_t moved() const noexcept { return moved_; }
    [[noreturn]] void fail(ErrorKind kind, const std::string& message, int code = 0);
    int fd() const noexcept { return stream_.fd(); }
    // What to wait for where nothing is here to be received.
    short receives_on() const noexcept;
    const Settings& settings() const noexcept { return settings_; }

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

private:
    // A request that has no reply yet; the payload of one that goes through the publish area, where it is in the ring.
    struct Unanswered {
        Op op;
        std::uint64_t begin = 0;
        std::uint64_t end = 0;
    };

    bool send_some_by_area(Outgoing& outgoing, std::size_t most);
    bool receive_frame_some();
    bool keep(const Unanswered& asked);
    template <typename Step>
    void until(Step step, short events, double deadline, const char* what);
    [[noreturn]] void fail_stream(const char* what, int code);
    void require_whole();
    void wait(short events, double deadline, const char* what);
    // Bytes that were read, at least one; 0 where none are here.
    std::size_t read_some(void* into, std::size_t nbytes);
    // Bytes that the socket took; 0 where it takes none now.
    std::size_t write_some(iovec* parts, std::size_t count);
    bool reply_waits() const noexcept;

    Stream stream_;
    const std::string node_;
    const Settings settings_;
    bool broken_ = false;
    bool half_open_ = false;  // the node takes no more requests, but its last replies can be read
    std::uint64_t requests_ = 0;
    std::uint64_t moved_ = 0;  // bytes, in both directions
    std::deque<Unanswered> unanswered_;
    bool wants_area_;
    bool awaits_area_ = false;
    bool awaits_room_ = false;
    int passed_file_ = -1;  // that has come before the reply that it belongs to
    PublishArea area_;
    // The reply that is being received.
    FrameHeader reply_{};
    std::string meta_;
    bool has_header_ = false;
    std::size_t have_ = 0;  // bytes of its meta, then of its payload
    std::size_t payload_nbytes_ = 0;
    std::uint32_t crc_ = 0;
    Op payload_op_ = Op::ping;
    // What was read and not yet taken. Small replies come with one call; after a large one only the next header is read
    // into it, as the rest would have to be copied.
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    std::size_t look_ahead_;
    std::array<std::byte, std::size_t{16} << 10> buffer_;
};

}  // namespace farpool
