#include "wire/connection.hpp"

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

constexpr std::size_t chunk_nbytes = std::size_t{256} << 10;   // its checksum is computed while it is in the cache
constexpr std::size_t by_area_nbytes = std::size_t{64} << 10;  // larger payloads go through a publish area
constexpr std::size_t tail_nbytes = std::size_t{64} << 10;     // sent together with the checksum that follows it
constexpr std::size_t most_parts = 64;                         // passed in one system call

std::string hex(std::uint32_t value) {
    char text[11];
    std::snprintf(text, sizeof text, "0x%08x", value);
    return text;
}

std::string op_name(Op op) { return "operation " + std::to_string(static_cast<unsigned>(op)); }

}  // namespace

void require_meta(const std::string& node, std::size_t nbytes) {
    if (nbytes > largest_meta) {
        fail_value(node + ": meta of a request is at most 65536 bytes, got " + std::to_string(nbytes));
    }
}

Connection::Connection(Stream stream, std::string node, const Settings& settings)
    : stream_(std::move(stream)),
      node_(std::move(node)),
      settings_(settings),
      wants_area_(settings.area),
      look_ahead_(buffer_.size()) {
    bound_loopback_sending(stream_.fd());
}

Connection::~Connection() {
    if (passed_file_ >= 0) {
        ::close(passed_file_);
    }
}

void Connection::close() noexcept {
    broken_ = true;
    stream_.close();
}

void Connection::shut_down() noexcept {
    if (stream_.fd() >= 0) {
        shutdown(stream_.fd(), SHUT_RDWR);
    }
}

void Connection::fail(ErrorKind kind, const std::string& message, int code) {
    broken_ = true;
    fail_node(kind, node_, message, code);
}

void Connection::fail_stream(const char* what, int code) {
    const ErrorKind kind = code == EPROTO ? ErrorKind::protocol : code == EACCES ? ErrorKind::denied : ErrorKind::node;
    fail(kind, std::string(what) + " failed: " + stream_.trouble(code), code);
}

void Connection::require_whole() {
    if (broken_) {
        fail(ErrorKind::node, "this connection has failed or was closed; open another one");
    }
}

int poll_until(std::span<pollfd> entries, double deadline) noexcept {
    const double left = std::clamp(deadline - monotonic_seconds(), 0.0, 86400.0);
    timespec timeout{};
    timeout.tv_sec = static_cast<time_t>(left);
    timeout.tv_nsec = static_cast<long>((left - std::floor(left)) * 1e9);
    return ppoll(entries.data(), entries.size(), &timeout, nullptr);
}

void Connection::wait(short events, double deadline, const char* what) {
    for (;;) {
        if (!(deadline > monotonic_seconds())) {
            fail(ErrorKind::node_timeout, std::string(what) + " within the deadline");
        }
        pollfd entry{stream_.fd(), events, 0};
        const int ready = poll_until({&entry, 1}, deadline);
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
    shutdown(stream_.fd(), SHUT_WR);
}

void Connection::await_end(double deadline) {
    for (;;) {
        const ssize_t got = recv(stream_.fd(), buffer_.data(), buffer_.size(),
                                 MSG_DONTWAIT);  // with TLS too: only the end of the stream matters
        if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            wait(POLLIN, deadline, "the node did not end a connection that had failed");
        } else if (got == 0 || (got < 0 && errno != EINTR)) {
            return;
        }
    }
}

bool Connection::stale() const noexcept {
    char byte = 0;
    const ssize_t got = recv(stream_.fd(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return broken_ || got >= 0 || (errno != EAGAIN && errno != EWOULDBLOCK) || end_ > begin_ || stream_.has_input();
}

bool Connection::reply_waits() const noexcept { return !unanswered_.empty() && (end_ > begin_ || stream_.has_input()); }

short Connection::receives_on() const noexcept { return stream_.receiving_sends() ? POLLOUT : POLLIN; }

// Repeats `step` until it returns true: first polls for a while, then sleeps.
template <typename Step>
void Connection::until(Step step, short events, double deadline, const char* what) {
    double spin_until = 0;
    std::uint64_t moved = moved_;
    for (unsigned attempt = 1; !step(); ++attempt) {
        const double now = monotonic_seconds();
        if (spin_until == 0 || moved != moved_) {
            spin_until = std::min(now + settings_.spin, deadline);
            moved = moved_;
        }
        if (now >= spin_until) {
            wait(events == POLLIN ? receives_on() : events, deadline, what);
        } else {
            relax(attempt);
        }
    }
}

void Connection::send(const Request& request, double deadline) {
    PayloadSum sum(request.payload, request.nbytes);
    Outgoing outgoing = begin(request, &sum);
    until([&] { return send_some(outgoing, outgoing.request.nbytes + largest_meta); }, POLLOUT, deadline,
          "the node did not take the request");
}

Outgoing Connection::begin(const Request& request, PayloadSum* sum) {
    require_whole();
    require_meta(node_, request.meta.size());
    if (half_open_) {
        fail(ErrorKind::node, "the node ended the connection");
    }
    Outgoing outgoing{request, make_header(request.op)};
    FrameHeader& header = outgoing.header;
    outgoing.by_area = by_area(request);
    Unanswered asked{request.op};
    if (outgoing.by_area) {
        asked.begin = area_.begin();
        asked.end = asked.begin + PublishArea::taken_by(request.nbytes);
    } else if (wants_area_ && request.op == Op::put && request.nbytes > by_area_nbytes) {
        wants_area_ = false;  // this payload does not wait for the reply
        awaits_area_ = outgoing.asks = true;
        outgoing.asking = make_header(Op::area);
        outgoing.asking.request = ++requests_;
        outgoing.asking.tenant = settings_.tenant;
        outgoing.asking.credential = settings_.credential;
        seal(outgoing.asking, nullptr, 0);
        unanswered_.push_back({Op::area});
    }
    header.request = ++requests_;
    header.payload_nbytes = request.nbytes;
    if (outgoing.by_area) {
        header.flags = checksum_follows | payload_in_area;
    } else if (request.nbytes >= Helped::worth_it) {
        header.flags = checksum_follows;
        outgoing.sum = sum;
    } else {
        header.payload_crc = sum != nullptr ? sum->finish() : PayloadSum(request.payload, request.nbytes).finish();
    }
    header.serial = request.serial;
    header.lease = request.lease;
    header.tenant = settings_.tenant;
    header.epoch = settings_.epoch == nullptr ? 0 : settings_.epoch->get();
    header.credential = settings_.credential;
    seal(header, request.meta.data(), static_cast<std::uint32_t>(request.meta.size()));
    if (outgoing.by_area) {
        outgoing.frames.append(reinterpret_cast<const char*>(&header), sizeof header).append(request.meta);
    }
    unanswered_.push_back(asked);
    return outgoing;
}

bool Connection::by_area(const Request& request) const noexcept {
    return area_.is_open() && request.op == Op::put && request.nbytes > by_area_nbytes;
}

bool Connection::send_some_by_area(Outgoing& outgoing, std::size_t most) {
    const Request& request = outgoing.request;
    awaits_room_ = false;
    for (std::size_t before = outgoing.copied; !half_open_;) {
        if (outgoing.copied < request.nbytes && (outgoing.sent == outgoing.frames.size() || outgoing.copied == 0)) {
            if (outgoing.copied - before >= most) {
                return false;
            }
            const AreaPart part = area_.fill(request.payload, outgoing.copied, request.nbytes, outgoing.crc);
            awaits_room_ = part.nbytes == 0;
            if (awaits_room_) {
                return false;
            }
            outgoing.copied += part.nbytes;
            outgoing.frames.append(reinterpret_cast<const char*>(&part), sizeof part);
            if (outgoing.copied == request.nbytes) {
                outgoing.frames.append(reinterpret_cast<const char*>(&outgoing.crc), sizeof outgoing.crc);
            }
        }
        if (outgoing.sent == outgoing.frames.size()) {
            return true;
        }
        iovec next{outgoing.frames.data() + outgoing.sent, outgoing.frames.size() - outgoing.sent};
        const std::size_t taken = write_some(&next, 1);
        outgoing.sent += taken;
        if (taken == 0) {
            return half_open_;
        }
    }
    return true;
}

bool Connection::send_some(Outgoing& outgoing, std::size_t most) {
    if (outgoing.by_area) {
        return send_some_by_area(outgoing, most);
    }
    const Request& request = outgoing.request;
    const std::size_t asking_nbytes = outgoing.asks ? sizeof outgoing.asking : 0;
    const std::size_t head_nbytes = asking_nbytes + sizeof outgoing.header + request.meta.size();
    const bool follows = outgoing.sum != nullptr;
    const std::size_t whole = head_nbytes + request.nbytes + (follows ? sizeof outgoing.crc : 0);
    while (outgoing.sent < whole && !half_open_) {
        // The last bytes of a payload are sent together with the checksum after them.
        const std::size_t before_tail = head_nbytes + request.nbytes - (follows ? tail_nbytes : 0);
        if (follows && outgoing.sent == before_tail) {
            outgoing.crc = outgoing.sum->finish();
        }
        const bool in_tail = outgoing.sent >= before_tail;
        std::size_t skip = outgoing.sent;
        std::size_t room = std::min(most, (in_tail ? whole : before_tail) - outgoing.sent);
        std::array<iovec, most_parts> parts;
        std::size_t count = 0;
        const auto add = [&](const void* data, std::size_t nbytes) {
            const std::size_t skipped = std::min(skip, nbytes);
            const std::size_t taken = count < parts.size() ? std::min(nbytes - skipped, room) : 0;
            if (taken > 0) {
                parts[count++] = {static_cast<std::byte*>(const_cast<void*>(data)) + skipped, taken};
            }
            skip -= skipped;
            room = taken < std::min(nbytes - skipped, room) ? 0 : room - taken;
        };
        add(&outgoing.asking, asking_nbytes);
        add(&outgoing.header, sizeof outgoing.header);
        add(request.meta.data(), request.meta.size());
        for (const iovec& part : request.payload) {
            add(part.iov_base, part.iov_len);
        }
        add(&outgoing.crc, follows ? sizeof outgoing.crc : 0);
        const std::size_t taken = write_some(parts.data(), count);
        outgoing.sent += taken;
        if (taken == 0 || (taken >= most && outgoing.sent < whole)) {
            return half_open_;
        }
    }
    return true;
}

std::size_t Connection::write_some(iovec* parts, std::size_t count) {
    for (;;) {
        const ssize_t sent = stream_.send(parts, count);
        if (sent >= 0) {
            moved_ += static_cast<std::uint64_t>(sent);
            return static_cast<std::size_t>(sent);
        }
        const int code = errno;
        if (code == EAGAIN || code == EWOULDBLOCK) {
            return 0;
        }
        if ((code == EPIPE || code == ECONNRESET) && reply_waits()) {
            half_open_ = true;  // it sent the reason before it closed: a payload that is too large, for example
            return 0;
        }
        if (code != EINTR) {
            fail_stream("sending", code);
        }
    }
}

std::size_t Connection::read_some(void* into, std::size_t nbytes) {
    iovec whole{into, nbytes};
    return read_some(&whole, 1);
}

std::size_t Connection::read_some(iovec* parts, std::size_t count) {
    for (;;) {
        const ssize_t got = awaits_area_ ? stream_.receive_with_file(parts->iov_base, parts->iov_len, passed_file_)
                            : count == 1 ? stream_.receive(parts->iov_base, parts->iov_len)
                                         : stream_.receive(parts, count);
        if (got > 0) {
            moved_ += static_cast<std::uint64_t>(got);
            return static_cast<std::size_t>(got);
        }
        if (got == 0) {
            fail(ErrorKind::node, "the node closed the connection");
        }
        const int code = errno;
        if (code == EAGAIN || code == EWOULDBLOCK) {
            return 0;
        }
        if (code != EINTR) {
            fail_stream("receiving", code);
        }
    }
}

// Handles replies that no caller waits for: progress with a payload in the publish area, and the area itself. True if this was
// such a reply.
bool Connection::keep(const Unanswered& asked) {
    const bool tells = reply_.status == static_cast<std::uint16_t>(Status::taken);
    if (tells && asked.end > asked.begin && reply_.serial <= asked.end - asked.begin && reply_.payload_nbytes == 0) {
        area_.taken(asked.begin + reply_.serial);
        return true;
    }
    if (tells || (asked.op == Op::area && reply_.payload_nbytes > 0)) {
        fail(ErrorKind::protocol, "the node sent a reply to " + op_name(asked.op) + " that answers no such request");
    }
    if (asked.op != Op::area) {
        return false;
    }
    awaits_area_ = false;
    area_.open(std::exchange(passed_file_, -1));
    unanswered_.pop_front();
    return true;
}

bool Connection::receive_head_some(ReplyHead& head) {
    require_whole();
    if (unanswered_.empty()) {
        fail_value(node_ + ": there is no unanswered request on this connection; send one first");
    }
    while (receive_frame_some()) {
        const Unanswered asked = unanswered_.front();
        has_header_ = false;
        have_ = 0;
        if (keep(asked)) {
            continue;
        }
        area_.taken(asked.end);
        unanswered_.pop_front();
        crc_ = 0;
        payload_op_ = asked.op;
        payload_nbytes_ = reply_.payload_nbytes;
        look_ahead_ = payload_nbytes_ > buffer_.size() / 2 ? sizeof reply_ : buffer_.size();
        head = {reply_.status, reply_.serial, payload_nbytes_, std::move(meta_)};
        return true;
    }
    return false;
}

// Receives the bytes of the next header and meta that have arrived; true if both are complete.
bool Connection::receive_frame_some() {
    if (!has_header_) {
        if (end_ - begin_ < sizeof reply_) {
            std::memmove(buffer_.data(), buffer_.data() + begin_, end_ - begin_);
            end_ -= std::exchange(begin_, 0);
        }
        while (end_ - begin_ < sizeof reply_) {
            const std::size_t got = read_some(buffer_.data() + end_, look_ahead_ - end_);
            if (got == 0) {
                return false;
            }
            end_ += got;
        }
        std::memcpy(&reply_, buffer_.data() + begin_, sizeof reply_);
        begin_ += sizeof reply_;
        if (const char* fault = header_fault(reply_); fault != nullptr) {
            fail(ErrorKind::protocol, std::string("the node sent ") + fault);
        }
        has_header_ = true;
        have_ = 0;
        meta_.resize(reply_.meta_nbytes);
    }
    while (have_ < meta_.size()) {
        std::size_t got = std::min(meta_.size() - have_, end_ - begin_);
        if (got > 0) {
            std::memcpy(meta_.data() + have_, buffer_.data() + begin_, got);
            begin_ += got;
        } else if ((got = read_some(meta_.data() + have_, meta_.size() - have_)) == 0) {
            return false;
        }
        have_ += got;
    }
    if (!is_whole(reply_, meta_.data())) {
        fail(ErrorKind::protocol, "the header of a reply was damaged on its way");
    }
    const std::uint64_t expected = requests_ - unanswered_.size() + 1;
    const Op op = unanswered_.front().op;
    if (reply_.request != expected || reply_.op != static_cast<std::uint8_t>(op)) {
        fail(ErrorKind::protocol, "expected the reply to request " + std::to_string(expected) + " (" + op_name(op) +
                                      "), got one to request " + std::to_string(reply_.request) + " (operation " +
                                      std::to_string(reply_.op) + ")");
    }
    if (settings_.epoch != nullptr) {
        settings_.epoch->meet(reply_.epoch);
    }
    return true;
}

bool Connection::receive_payload_some(Parts into) {
    const bool checked = !into.empty() && payload_op_ != Op::read;  // the client that wrote private memory keeps its checksum
    std::size_t skip = have_;
    auto part = into.begin();
    while (have_ < payload_nbytes_) {
        const std::size_t left = payload_nbytes_ - have_;
        std::size_t got = 0;
        if (into.empty()) {
            got = std::min(left, end_ - begin_);
            begin_ += got;
            if (got == 0) {
                got = read_some(buffer_.data(), std::min(left, buffer_.size()));
                begin_ = end_ = 0;
            }
        } else {
            for (; skip >= part->iov_len; ++part) {
                skip -= part->iov_len;
            }
            std::byte* const to = static_cast<std::byte*>(part->iov_base) + skip;
            got = std::min({left, part->iov_len - skip, end_ - begin_});
            if (got > 0) {
                crc_ = copy_crc32c(to, buffer_.data() + begin_, got, crc_);
                begin_ += got;
            } else {
                // As many parts at once as fit into the cache together, because small parts would cost a system call each.
                std::array<iovec, most_parts> next;
                std::size_t count = 0;
                std::size_t inside = skip;
                for (std::size_t room = std::min(left, chunk_nbytes); room > 0 && count < next.size(); ++count) {
                    const iovec& own = *(part + static_cast<std::ptrdiff_t>(count));
                    next[count] = {static_cast<std::byte*>(own.iov_base) + inside, std::min(room, own.iov_len - inside)};
                    room -= next[count].iov_len;
                    inside = 0;
                }
                got = read_some(next.data(), count);
                std::size_t rest = checked ? got : 0;
                for (const iovec* own = next.data(); rest > 0; ++own) {
                    const std::size_t filled = std::min(rest, own->iov_len);
                    crc_ = crc32c(own->iov_base, filled, crc_);
                    rest -= filled;
                }
            }
            skip += got;
        }
        if (got == 0) {
            return false;
        }
        have_ += got;
    }
    const std::size_t nbytes = std::exchange(payload_nbytes_, 0);
    have_ = 0;
    if (checked && nbytes > 0 && crc_ != reply_.payload_crc) {
        fail_checksum(node_, "the payload of " + std::to_string(nbytes) + " bytes in the reply to " + op_name(payload_op_) +
                                 " has CRC32C " + hex(crc_) + ", expected " + hex(reply_.payload_crc) +
                                 "; it was damaged in the node's memory or on its way");
    }
    return true;
}

ReplyHead Connection::receive_head(double deadline) {
    ReplyHead head;
    until([&] { return receive_head_some(head); }, POLLIN, deadline, "the node did not answer");
    return head;
}

void Connection::receive_payload(void* into, double deadline) {
    const iovec whole{into, payload_nbytes_};
    until([&] { return receive_payload_some({&whole, 1}); }, POLLIN, deadline, "the node did not answer");
}

void Connection::drop_payload(double deadline) {
    until([&] { return receive_payload_some({}); }, POLLIN, deadline, "the node did not answer");
}

}  // namespace farpool
