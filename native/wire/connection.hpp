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
#include <utility>

#include "core/error.hpp"
#include "wire/answer_times.hpp"
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
    std::size_t nbytes = 0;  // of the payload, which must be received or dropped before the next call
    std::string meta;
};

// Polls sockets until one is ready or the deadline has passed; returns the result of poll.
int poll_until(std::span<pollfd> entries, double deadline) noexcept;

// Throws PortFailure if a request has more bytes of meta than a frame may have.
void require_meta(const std::string& node, std::size_t nbytes);

// A request that is being sent. The memory that it refers to must not change until it has been sent.
struct Outgoing {
    Request request;
    FrameHeader header{};
    PayloadSum* sum = nullptr;  // of a payload whose checksum follows it
    std::uint32_t crc = 0;
    std::size_t sent = 0;  // bytes sent of the whole request
    FrameHeader asking{};  // sent before the request: asks for a publish area
    bool asks = false;
    bool by_area = false;    // the payload goes through the publish area:
    std::string frames{};    // bytes to send next
    std::size_t copied = 0;  // bytes of the payload so far
};

// A client's connection to a node, for one thread at a time. Deadlines are in monotonic_seconds(). A failure leaves the
// connection broken, except for a payload with a wrong checksum: its bytes were all read, so the stream goes on.
class Connection {
public:
    struct Settings {
        std::uint32_t tenant = 0;
        std::uint8_t credential = 0;
        double spin = 0;                       // seconds for which a wait polls the socket before it blocks
        void (*interrupted)() = nullptr;       // called when a signal ended a wait; its exception ends the exchange
        bool area = false;                     // payloads of puts go through a publish area, once the node has provided one
        std::shared_ptr<TenantEpoch> epoch{};  // sent with each request and learnt from each reply; null for neither
    };

    Connection(Stream stream, std::string node, const Settings& settings);
    ~Connection();
    Connection(const Connection&) = delete;
    Connection& operator=(const Connection&) = delete;

    void send(const Request& request, double deadline);
    // Receives the head of the reply to the oldest unanswered request.
    ReplyHead receive_head(double deadline);
    void receive_payload(void* into, double deadline);
    void drop_payload(double deadline);

    // Begins a request to be sent without waiting, for code that handles several connections (exchange.hpp). A payload of at
    // least PayloadSum::worth_it bytes needs its `sum`; others may have one, to share the checksum between connections.
    Outgoing begin(const Request& request, PayloadSum* sum);
    // Sends as many bytes as the socket takes, at most `most` bytes at a time; true if the whole request has been sent.
    bool send_some(Outgoing& outgoing, std::size_t most);
    // True if the request's payload would go through the publish area; then it needs no sum.
    bool by_area(const Request& request) const noexcept;
    // True if sending waits for the node to copy from the publish area, not for the socket.
    bool awaits_room() const noexcept { return awaits_room_; }
    // True if the next reply's header and meta have arrived; then they are in `head`.
    bool receive_head_some(ReplyHead& head);
    // True if the payload has arrived, or has been dropped if `into` is empty.
    bool receive_payload_some(Parts into);
    // Bytes sent and received so far.
    std::uint64_t moved() const noexcept { return moved_; }
    [[noreturn]] void fail(ErrorKind kind, const std::string& message, int code = 0);
    int fd() const noexcept { return stream_.fd(); }
    // Events to poll for if no bytes can be received yet.
    short receives_on() const noexcept;
    const Settings& settings() const noexcept { return settings_; }
    // Has exchange() add the times of answers here; null, as at first, for nowhere.
    void measure(std::shared_ptr<AnswerTimes> times) noexcept { times_ = std::move(times); }
    AnswerTimes* times() const noexcept { return times_.get(); }

    void close() noexcept;
    // Makes a call that waits in another thread fail. No other thread may be in `close` at the same time.
    void shut_down() noexcept;
    void give_up() noexcept { broken_ = true; }
    // True if an idle connection cannot be used again, because the node has closed it or sent unrequested bytes.
    bool stale() const noexcept;
    // Tells the node that no more requests follow. Once await_end() has returned, the node has carried out all requests sent
    // here. Without it, a late request could undo the effect of a request over another connection.
    void hang_up() noexcept;
    void await_end(double deadline);

    const std::string& node() const noexcept { return node_; }
    bool broken() const noexcept { return broken_; }
    std::size_t unanswered() const noexcept { return unanswered_.size(); }

private:
    // A request without a reply yet, with the positions in the publish area of a payload that goes through it.
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
    // Reads available bytes and returns their number; 0 if there are none yet.
    std::size_t read_some(void* into, std::size_t nbytes);
    std::size_t read_some(iovec* parts, std::size_t count);
    // Writes bytes and returns how many the socket took; 0 if it takes none now.
    std::size_t write_some(iovec* parts, std::size_t count);
    bool reply_waits() const noexcept;

    Stream stream_;
    const std::string node_;
    const Settings settings_;
    std::shared_ptr<AnswerTimes> times_;
    bool broken_ = false;
    bool half_open_ = false;  // the node takes no more requests, but its last replies can be read
    std::uint64_t requests_ = 0;
    std::uint64_t moved_ = 0;  // bytes, in both directions
    std::deque<Unanswered> unanswered_;
    bool wants_area_;
    bool awaits_area_ = false;
    bool awaits_room_ = false;
    int passed_file_ = -1;  // descriptor that arrived before its reply; -1 for none
    PublishArea area_;
    // The reply that is being received.
    FrameHeader reply_{};
    std::string meta_;
    bool has_header_ = false;
    std::size_t have_ = 0;  // bytes of its meta, then of its payload
    std::size_t payload_nbytes_ = 0;
    std::uint32_t crc_ = 0;
    Op payload_op_ = Op::ping;
    // Bytes that were read and not yet taken. One call reads several small replies; after a large one only the next header is
    // read into the buffer, because the rest would have to be copied.
    std::size_t begin_ = 0;
    std::size_t end_ = 0;
    std::size_t look_ahead_;
    std::array<std::byte, std::size_t{16} << 10> buffer_;
};

}  // namespace farpool
