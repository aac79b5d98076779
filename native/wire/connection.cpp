#include "wire/connection.hpp"

#include <poll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <utility>

#include "core/clock.hpp"
#include "core/crc32c.hpp"
#include "core/relax.hpp"
#include "wire/loopback.hpp"
#include "wire/payload_sum.hpp"

namespace farpool {

namespace {

constexpr std::size_t chunk_nbytes = std::size_t{256} << 10;  // checksummed while it is in the cache
constexpr std::size_t tail_nbytes = std::size_t{64} << 10;    // goes out together with the checksum that follows it

std::string hex(std::uint32_t value) {
    char text[11];
    std::snprintf(text, sizeof text, "0x%08x", value);
    return text;
}

std::string op_name(Op op) { return "operation " + std::to_string(static_cast<unsigned>(op)); }

}  // namespace

Connection::Connection(int fd, std::string node, const Settings& settings)
    : fd_(fd), node_(std::move(node)), settings_(settings), look_ahead_(buffer_.size()) {
    bound_loopback_sending(fd_);
}

Connection::~Connection() { close(); }

void Connection::close() noexcept {
    broken_ = true;
    if (fd_ >= 0) {
        ::close(std::exchange(fd_, -1));
    }
}

void Connection::shut_down() noexcept {
    if (fd_ >= 0) {
        shutdown(fd_, SHUT_RDWR);
    }
}

void Connection::fail(ErrorKind kind, const std::string& message, int code) {
    broken_ = true;
    fail_node(kind, node_, message, code);
}

void Connection::require_whole() {
    if (broken_) {
        fail(ErrorKind::node, "this connection has failed or was closed; open another one");
    }
}

void Connection::wait(short events, double deadline, const char* what) {
    for (;;) {
        const double left = deadline - monotonic_seconds();
        if (!(left > 0)) {
            fail(ErrorKind::node_timeout, std::string(what) + " within the deadline");
        }
        const double bounded = std::min(left, 86400.0);
        timespec timeout{};
        timeout.tv_sec = static_cast<time_t>(bounded);
        timeout.tv_nsec = static_cast<long>((bounded - std::floor(bounded)) * 1e9);
        pollfd entry{fd_, events, 0};
        const int ready = ppoll(&entry, 1, &timeout, nullptr);
        if (ready > 0) {
            return;
        }
        if (ready < 0 && errno != EINTR) {
            const int code = errno;
            fail(ErrorKind::node, std::string("waiting failed: ") + std::strerror(code), code);
        }
        if (ready < 0 && settings_.interrupted != nullptr) {
            try {
                settings_.interrupted();
            } catch (...) {
                broken_ = true;
                throw;
            }
        }
    }
}

void Connection::hang_up() noexcept {
    broken_ = true;
    shutdown(fd_, SHUT_WR);
}

void Connection::await_end(double deadline) {
    for (;;) {
        const ssize_t got = recv(fd_, buffer_.data(), buffer_.size(), MSG_DONTWAIT);
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            wait(POLLIN, deadline, "the node did not end a connection that had failed");
        } else if (got == 0 || (got < 0 && errno != EINTR)) {
            return;
        }
    }
}

bool Connection::stale() const noexcept {
    char byte = 0;
    const ssize_t got = recv(fd_, &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return broken_ || got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK) || end_ > begin_;
}

bool Connection::reply_waits() const noexcept {
    char byte = 0;
    return !unanswered_.empty() && (end_ > begin_ || recv(fd_, &byte, 1, MSG_DONTWAIT | MSG_PEEK) > 0);
}

void Connection::send(const Request& request, double deadline) {
    require_whole();
    if (request.meta.size() > largest_meta) {
        fail_value(node_ + ": meta of a request is at most 65536 bytes, got " + std::to_string(request.meta.size()));
    }
    if (half_open_) {
        fail(ErrorKind::node, "the node ended the connection");
    }
    FrameHeader header = make_header(request.op);
    header.request = ++requests_;
    header.payload_nbytes = request.nbytes;
    const bool follows = request.nbytes >= PayloadSum::worth_it;
    header.payload_crc = follows ? 0 : crc32c(request.payload, request.nbytes);
    header.flags = follows ? checksum_follows : 0;
    header.generation = request.generation;
    header.lease = request.lease;
    header.tenant = settings_.tenant;
    header.credential = settings_.credential;
    seal(header, request.meta.data(), static_cast<std::uint32_t>(request.meta.size()));
    unanswered_.push_back(request.op);
    auto* payload = static_cast<std::byte*>(const_cast<void*>(request.payload));
    iovec first[3] = {{&header, sizeof header}, {const_cast<char*>(request.meta.data()), request.meta.size()}, {payload, 0}};
    if (!follows) {
        first[2].iov_len = request.nbytes;
        return push(first, 3, deadline);
    }
    PayloadSum sum(payload, request.nbytes);
    const std::size_t first_nbytes = request.nbytes - tail_nbytes;
    first[2].iov_len = first_nbytes;
    push(first, 3, deadline);
    if (!half_open_) {
        std::uint32_t crc = sum.finish();
        iovec last[2] = {{payload + first_nbytes, tail_nbytes}, {&crc, sizeof crc}};
        push(last, 2, deadline);
    }
}

// Sends all of the parts, or stops at what the node says before it hangs up.
void Connection::push(iovec* parts, std::size_t count, double deadline) {
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = count;
    double spin_until = 0;
    for (unsigned attempt = 1; message.msg_iovlen > 0; ++attempt) {
        const ssize_t sent = sendmsg(fd_, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
        if (sent < 0) {
            const int code = errno;
            if (code == EAGAIN || code == EWOULDBLOCK) {
                rest(spin_until, attempt, POLLOUT, deadline, "the node did not take the request");
            } else if ((code == EPIPE || code == ECONNRESET) && reply_waits()) {
                half_open_ = true;  // it said why before it hung up: a payload too large, for one
                return;
            } else if (code != EINTR) {
                fail(ErrorKind::node, std::string("sending failed: ") + std::strerror(code), code);
            }
            continue;
        }
        spin_until = 0;
        auto left = static_cast<std::size_t>(sent);
        while (message.msg_iovlen > 0 && left >= message.msg_iov->iov_len) {
            left -= message.msg_iov->iov_len;
            ++message.msg_iov;
            --message.msg_iovlen;
        }
        if (message.msg_iovlen > 0) {
            message.msg_iov->iov_base = static_cast<std::byte*>(message.msg_iov->iov_base) + left;
            message.msg_iov->iov_len -= left;
        }
    }
}

// Before the same is tried again: looks busy for a while, then sleeps.
void Connection::rest(double& spin_until, unsigned attempt, short events, double deadline, const char* what) {
    const double now = monotonic_seconds();
    if (spin_until == 0) {
        spin_until = std::min(now + settings_.spin, deadline);
    }
    if (now >= spin_until) {
        wait(events, deadline, what);
    } else {
        relax(attempt);
    }
}

std::size_t Connection::receive_some(void* into, std::size_t nbytes, double deadline) {
    double spin_until = 0;
    for (unsigned attempt = 1;; ++attempt) {
        const ssize_t got = recv(fd_, into, nbytes, MSG_DONTWAIT);
        if (got > 0) {
            return static_cast<std::size_t>(got);
        }
        if (got == 0) {
            fail(ErrorKind::node, "the node closed the connection");
        }
        if (errno == EINTR) {
            continue;
        }
        if (errno != EAGAIN && errno != EWOULDBLOCK) {
            const int code = errno;
            fail(ErrorKind::node, std::string("receiving failed: ") + std::strerror(code), code);
        }
        rest(spin_until, attempt, POLLIN, deadline, "the node did not answer");
    }
}

void Connection::take(void* into, std::size_t nbytes, double deadline) {
    auto* to = static_cast<std::byte*>(into);
    const std::size_t here = std::min(nbytes, end_ - begin_);
    std::memcpy(to, buffer_.data() + begin_, here);
    begin_ += here;
    for (std::size_t done = here; done < nbytes;) {
        done += receive_some(to + done, nbytes - done, deadline);
    }
}

ReplyHead Connection::receive_head(double deadline) {
    require_whole();
    if (unanswered_.empty()) {
        fail_value(node_ + ": there is no unanswered request on this connection; send one first");
    }
    FrameHeader header;
    if (end_ - begin_ < sizeof header) {
        std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
        end_ -= std::exchange(begin_, 0);
    }
    while (end_ - begin_ < sizeof header) {
        end_ += receive_some(buffer_.data() + end_, look_ahead_ - end_, deadline);
    }
    std::memcpy(&header, buffer_.data() + begin_, sizeof header);
    begin_ += sizeof header;
    if (const char* fault = header_fault(header); fault != nullptr) {
        fail(ErrorKind::protocol, std::string("the node sent ") + fault);
    }
    ReplyHead head{header.status, header.generation, header.payload_nbytes, std::string(header.meta_nbytes, '\0')};
    take(head.meta.data(), head.meta.size(), deadline);
    if (!is_whole(header, head.meta.data())) {
        fail(ErrorKind::protocol, "the header of a reply was damaged on its way");
    }
    const std::uint64_t expected = requests_ - unanswered_.size() + 1;
    const Op op = unanswered_.front();
    if (header.request != expected || header.op != static_cast<std::uint8_t>(op)) {
        fail(ErrorKind::protocol, "expected the reply to request " + std::to_string(expected) + " (" + op_name(op) +
                                      "), got one to request " + std::to_string(header.request) + " (operation " +
                                      std::to_string(header.op) + ")");
    }
    unanswered_.pop_front();
    payload_op_ = op;
    payload_nbytes_ = header.payload_nbytes;
    payload_crc_ = header.payload_crc;
    look_ahead_ = payload_nbytes_ > buffer_.size() / 2 ? sizeof header : buffer_.size();
    return head;
}

void Connection::receive_payload(void* into, double deadline) {
    auto* to = static_cast<std::byte*>(into);
    const std::size_t nbytes = std::exchange(payload_nbytes_, 0);
    const bool checked = payload_op_ != Op::read;  // of private memory only the writer knows the checksum
    if (nbytes == 0) {
        return;
    }
    std::size_t done = std::min(nbytes, end_ - begin_);
    std::uint32_t crc = copy_crc32c(to, buffer_.data() + begin_, done);
    begin_ += done;
    while (done < nbytes) {
        const std::size_t got = receive_some(to + done, std::min(nbytes - done, chunk_nbytes), deadline);
        crc = checked ? crc32c(to + done, got, crc) : 0;
        done += got;
    }
    if (checked && crc != payload_crc_) {
        fail_checksum(node_, "the payload of " + std::to_string(nbytes) + " bytes in the reply to " + op_name(payload_op_) +
                                 " has CRC32C " + hex(crc) + ", expected " + hex(payload_crc_) +
                                 "; it was damaged in the node's memory or on its way");
    }
}

void Connection::drop_payload(double deadline) {
    std::size_t left = std::exchange(payload_nbytes_, 0);
    const std::size_t here = std::min(left, end_ - begin_);
    begin_ += here;
    left -= here;
    while (left > 0) {
        begin_ = end_ = 0;
        left -= receive_some(buffer_.data(), std::min(left, buffer_.size()), deadline);
    }
}

}  // namespace farpool
