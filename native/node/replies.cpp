#include "node/replies.hpp"

#include <algorithm>
#include <array>
#include <cerrno>

#include "node/packed.hpp"

namespace farpool {

namespace {

// Bytes of objects that the replies of one connection may hold; one object is always allowed.
constexpr std::uint64_t retained_nbytes_max = std::uint64_t{16} << 20;
// Bytes read from the lower medium that one connection may have in unsent replies; one object is always allowed.
constexpr std::uint64_t fetched_nbytes_max = std::uint64_t{16} << 20;
constexpr std::size_t replies_at_once = 16;

}  // namespace

void Replies::add(const FrameHeader& request, Clock::time_point begun, Status status, std::uint64_t serial, std::string meta) {
    Reply& reply = queue_.emplace_back();
    reply.header = make_header(static_cast<Op>(request.op));
    reply.header.status = static_cast<std::uint16_t>(status);
    reply.header.request = request.request;
    reply.header.serial = serial;
    reply.header.lease = request.lease;
    reply.header.tenant = client_.tenant;
    reply.header.epoch = client_.objects.epoch();
    reply.begun = begun;
    reply.set_meta(std::move(meta));
    if (queue_.size() == 1) {
        progress_.begin();
    }
}

bool Replies::fits_connection(const Found& found) const {
    return retained_nbytes_ == 0 || retained_nbytes_ + found.nbytes <= retained_nbytes_max;
}

bool Replies::fits_key(const Found& found) const {
    const Unsent& unsent = client_.unsent;
    return unsent.nbytes() == 0 || unsent.has(found.offset) ||
           client_.objects.may_send(found, unsent.nbytes(), services_.budget.share_of_objects(client_.tenant) / 2);
}

void Replies::send_object(const Found& found, std::string_view key) {
    if (delayed_.empty() && (found.nbytes == 0 || (fits_connection(found) && fits_key(found)))) {
        return attach(last(), found, key);
    }
    last().ticket = services_.fetches.next_ticket();
    delayed_.push_back({last().ticket, std::string(key)});
    if (!in_line_) {
        send_delayed();
    }
}

bool Replies::send_delayed() {
    while (!delayed_.empty()) {
        const auto& [ticket, key] = delayed_.front();
        Reply& reply =
            *std::find_if(queue_.rbegin(), queue_.rend(), [ticket = ticket](const Reply& one) { return one.ticket == ticket; });
        const Found found = client_.objects.find(key, false);
        if (found.status == Status::done && found.view != nullptr && found.nbytes > 0) {
            if (!fits_connection(found)) {
                return true;  // we continue when its own replies have been sent
            }
            if (!fits_key(found)) {
                if (!in_line_) {
                    in_line_ = true;
                    client_.unsent.wait({client_.fd, client_.number});
                }
                return false;
            }
        }
        make_ready(reply);
        if (found.status == Status::done) {
            attach(reply, found, key);
        } else {
            reply.refuse(found.status);
        }
        delayed_.pop_front();
    }
    return true;
}

void Replies::make_ready(Reply& reply) {
    reply.ticket = 0;
    if (&reply == &queue_.front()) {
        progress_.begin();
    }
}

// Attaches an object to a reply, which holds it until it has been sent.
void Replies::attach(Reply& reply, const Found& found, std::string_view key) {
    reply.meta.assign(reinterpret_cast<const char*>(&found.head), sizeof found.head);
    if (found.view == nullptr) {  // it has left RAM since the request
        return start_fetch(reply, expect(reply, found, key, 0));
    }
    reply.describe(found);
    reply.seal_meta();
    if (found.nbytes == 0) {
        return;
    }
    reply.payload = found.view;
    reply.retained_object = found.offset;
    reply.unsent = found.nbytes;
    client_.objects.retain(found);
    retained_nbytes_ += found.nbytes;
    if (const std::uint64_t more = client_.unsent.add(found.offset, client_.objects.ram_nbytes(found)); more > 0) {
        client_.objects.count_unsent(static_cast<std::int64_t>(more));
    }
}

void Replies::fetch(const Found& found, std::string_view key, std::uint64_t ttl_ms) {
    waiting_.push_back(expect(last(), found, key, ttl_ms));
    start_fetches();
}

// Lets a reply wait for its payload from the lower medium, and returns the read to make for it.
Fetch Replies::expect(Reply& reply, const Found& found, std::string_view key, std::uint64_t ttl_ms) {
    client_.objects.retain(found);
    reply.retained_object = found.offset;
    reply.describe(found);
    reply.ticket = services_.fetches.next_ticket();
    reply.seal_meta();
    // An object that is requested for a second time returns to RAM. For a pin it has to be there.
    const bool promote = found.visited || static_cast<Op>(reply.header.op) == Op::pin;
    return {client_.fd,  client_.number, reply.ticket, std::string(key), found.offset, found.nbytes,
            found.block, promote,        ttl_ms};
}

void Replies::start_fetches() {
    while (!waiting_.empty()) {
        const Fetch fetch = waiting_.front();
        if (fetching_ > 0 && fetching_ + fetch.nbytes > fetched_nbytes_max) {
            return;
        }
        waiting_.pop_front();
        for (Reply& reply : queue_) {
            if (reply.ticket == fetch.ticket) {
                start_fetch(reply, fetch);
            }
        }
    }
}

void Replies::start_fetch(Reply& reply, const Fetch& fetch) {
    reply.buffer = services_.fetches.start(client_.tenant, client_.objects, fetch);
    reply.fetched = fetch.nbytes;
    fetching_ += fetch.nbytes;
}

std::uint64_t Replies::deliver(const Fetch& fetch, bool ok) {
    const auto waiting =
        std::find_if(queue_.begin(), queue_.end(), [&](const Reply& reply) { return reply.ticket == fetch.ticket; });
    if (waiting == queue_.end()) {
        return 0;
    }
    Reply& reply = *waiting;
    make_ready(reply);
    const bool pins = static_cast<Op>(reply.header.op) == Op::pin;
    const std::optional<Found> promoted =
        ok && fetch.promote ? client_.objects.promote(fetch.offset, reply.buffer->data()) : std::nullopt;
    const std::uint64_t copied = promoted ? fetch.nbytes : 0;
    if (ok && !pins) {
        reply.payload = reply.buffer->data();
        return copied;
    }
    reply.header.payload_nbytes = 0;
    reply.buffer = nullptr;
    release(reply);
    if (promoted) {
        pin(reply, *promoted, fetch.ttl_ms);
    } else if (pins) {
        pin_again(reply, fetch);
    } else {
        reply.refuse(Status::missing);
    }
    return copied;
}

void Replies::pin(Reply& reply, const Found& found, std::uint64_t ttl_ms) {
    const Sessions::Pin pin = services_.sessions.pin(client_, found, ttl_ms);
    if (!pin.refusal.empty()) {
        return reply.refuse(Status::busy, pin.refusal);
    }
    reply.header.serial = found.serial;
    reply.set_meta(packed(found.payload, found.nbytes, found.crc, pin.number));
}

// Pins an object that did not return to RAM. Another request may have copied it there, or the key may have another object now.
void Replies::pin_again(Reply& reply, const Fetch& fetch) {
    const Found found = client_.objects.find(fetch.key, true);
    if (found.status == Status::done && found.is_mapped_by_readers) {
        pin(reply, found, fetch.ttl_ms);
    } else if (found.status == Status::done && found.offset != fetch.offset) {
        // We do not let it wait for other fetches: their replies may wait for this one to be sent.
        start_fetch(reply, expect(reply, found, fetch.key, fetch.ttl_ms));
    } else {
        reply.refuse(found.status == Status::done ? Status::full : found.status);
    }
}

Replies::Sent Replies::flush(Stream& socket, Turn& turn) {
    const std::size_t most = turn.step_nbytes();
    // Send something in each turn, even if reading took all of the turn.
    for (bool first = true; (first || !turn.is_over()) && !queue_.empty(); first = false) {
        std::array<iovec, 3 * replies_at_once> parts;
        std::size_t count = 0;
        std::size_t offered = 0;
        File& file = queue_.front().file;  // a reply with a file is sent alone
        for (auto reply = queue_.begin();
             reply != queue_.end() && reply->is_ready() && count + 3 <= parts.size() && offered < most; ++reply) {
            if (count > 0 && (file.fd() >= 0 || reply->file.fd() >= 0)) {
                break;
            }
            std::uint64_t skip = reply->sent;
            const auto add = [&](const void* data, std::uint64_t nbytes) {
                if (skip >= nbytes) {
                    skip -= nbytes;
                    return;
                }
                const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes - skip, most));
                parts[count++] = {const_cast<std::byte*>(static_cast<const std::byte*>(data) + skip), step};
                offered += step;
                skip = 0;
            };
            add(&reply->header, sizeof reply->header);
            add(reply->meta.data(), reply->meta.size());
            add(reply->payload, reply->header.payload_nbytes);
        }
        if (count == 0) {  // the next reply is not ready
            return Sent::all;
        }
        const ssize_t done =
            file.fd() >= 0 ? socket.send_with_file(parts.data(), count, file.fd()) : socket.send(parts.data(), count);
        turn.spend(work::call);
        if (done < 0) {
            return errno == EAGAIN ? Sent::blocked : errno == EINTR ? Sent::all : Sent::broken;
        }
        file = File();
        turn.send(static_cast<std::uint64_t>(done));
        note_sent(static_cast<std::size_t>(done));
        if (static_cast<std::size_t>(done) < offered) {
            return Sent::blocked;
        }
    }
    return Sent::all;
}

void Replies::note_sent(std::size_t nbytes) {
    const Clock::time_point handed_over =
        Clock::now();  // we read the clock once for all replies: that costs more than counting
    services_.tallies.add_out(nbytes);
    progress_.moved(nbytes, services_.deadlines.at(handed_over));
    while (nbytes > 0) {
        Reply& first = queue_.front();
        const auto step = static_cast<std::size_t>(std::min<std::uint64_t>(nbytes, first.nbytes() - first.sent));
        first.sent += step;
        nbytes -= step;
        if (first.is_sent()) {
            services_.tallies.add(first.header, handed_over - first.begun);
            release(first);
            queue_.pop_front();
        }
    }
    start_fetches();
    if (!in_line_) {
        send_delayed();
    }
}

void Replies::release(Reply& reply) {
    fetching_ -= std::exchange(reply.fetched, 0);
    if (const std::uint64_t nbytes = std::exchange(reply.unsent, 0); nbytes > 0) {
        retained_nbytes_ -= nbytes;
        if (const std::uint64_t less = client_.unsent.remove(reply.retained_object); less > 0) {
            client_.objects.count_unsent(-static_cast<std::int64_t>(less));
            if (client_.unsent.has_waiting()) {
                services_.unsent.note_room();
            }
        }
    }
    if (reply.retained_object != 0) {
        client_.objects.release(std::exchange(reply.retained_object, 0));
    }
    services_.sessions.give_back(std::exchange(reply.retained_lease, nullptr));
}

void Replies::fence_reads() {
    for (Reply& reply : queue_) {
        const std::shared_ptr<Lease>& lease = reply.retained_lease;
        if (lease == nullptr || lease->session != 0 || reply.sent > 0) {  // only extents belong to no session
            continue;
        }
        // A read that came in time may be sent after the ticket has expired. Only an epoch, or an order, stops it.
        LeaseAccess access = services_.sessions.access(client_.session, lease->id, rights::read, reply.begun);
        if (access.lease == nullptr) {
            reply.payload = nullptr;
            reply.refuse(access.status, std::move(access.text));
            release(reply);
        }
    }
}

bool Replies::keep_ended_lease() const {
    return std::any_of(queue_.begin(), queue_.end(),
                       [](const Reply& reply) { return reply.retained_lease != nullptr && reply.retained_lease->over; });
}

void Replies::clear() {
    for (Reply& reply : queue_) {
        release(reply);
    }
    queue_.clear();
    waiting_.clear();
    delayed_.clear();
}

}  // namespace farpool
