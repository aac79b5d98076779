// Requests to several nodes at the same time, many under way on each connection. Clients send all requests this way.
#pragma once

#include <cstddef>
#include <functional>
#include <optional>
#include <span>

#include "core/error.hpp"
#include "wire/connection.hpp"

namespace farpool {

constexpr std::size_t window = 64;                           // requests under way on a connection
constexpr std::size_t window_nbytes = std::size_t{8} << 20;  // bytes of their payloads; one request may always have more

// One request and its outcome. Several may have the same payload: its checksum is computed once, and it is sent to their
// nodes chunk by chunk, while it is in the processor's cache.
struct Ask {
    Connection* connection;
    Request request;
    ReplyHead head{};
    std::optional<PortError> error{};  // if there is no reply, or its payload is damaged or has no place
};

// A callback that returns memory for a reply's payload: at least `head.nbytes` bytes, valid until exchange() ends. A failure of
// kind `value` fails that request only, and its payload is dropped; any other breaks the connection.
using Place = std::function<Parts(std::size_t ask, const ReplyHead& head)>;

// Sends all requests, in their order on each connection, and receives all replies. A connection that fails or has not answered
// by the deadline is broken afterwards, and its unanswered requests fail; the other connections continue. Throws only the
// exceptions of `interrupted` in a connection's settings; then connections with unanswered requests are broken.
void exchange(std::span<Ask> asks, const Place& place, double deadline);

}  // namespace farpool
