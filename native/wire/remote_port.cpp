#include "wire/remote_port.hpp"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <thread>
#include <utility>

#include "core/clock.hpp"
#include "wire/segment.hpp"

namespace farpool {

namespace {

// A manager's order can raise the lease's epoch at the node a moment before the program has shown the ticket of that epoch.
constexpr double ticket_patience_s = 2.0;
constexpr std::chrono::milliseconds ticket_pause{5};

}  // namespace

// A connection that the port lends to a transfer. The transfer returns it at its end; a broken one is only waited for.
class RemotePort::Borrowed {
public:
    explicit Borrowed(RemotePort& port) : port_(port) {}
    Borrowed(const Borrowed&) = delete;
    Borrowed& operator=(const Borrowed&) = delete;
    ~Borrowed() { give_back(); }

    Connection& operator*() { return *connection_; }

    void open(double deadline) {
        if (connection_ != nullptr) {
            return;
        }
        await_ends(deadline);
        {
            const std::lock_guard lock(port_.mutex_);
            while (connection_ == nullptr && !port_.idle_.empty()) {
                connection_ = std::move(port_.idle_.back());
                port_.idle_.pop_back();
                if (connection_->stale()) {
                    connection_.reset();
                }
            }
        }
        was_idle_ = connection_ != nullptr;
        if (connection_ == nullptr) {
            connection_ = std::make_unique<Connection>(port_.end_.dial(), port_.end_.node, port_.end_.settings);
        }
    }

    // True if it failed and had been idle before: the node may have restarted in between, and a new connection may work.
    bool died_idle() const noexcept { return was_idle_ && connection_ != nullptr && connection_->broken(); }

    // Gives up this connection and all idle ones, which are as old.
    void drop() {
        if (connection_ != nullptr) {
            connection_->give_up();
        }
        give_back();
        const std::lock_guard lock(port_.mutex_);
        port_.idle_.clear();
    }

private:
    void give_back() {
        if (connection_ == nullptr) {
            return;
        }
        const bool whole = !connection_->broken() && connection_->unanswered() == 0;
        if (!whole) {
            connection_->hang_up();
        }
        const std::lock_guard lock(port_.mutex_);
        (whole ? port_.idle_ : port_.ending_).push_back(std::move(connection_));
    }

    void await_ends(double deadline) {
        const std::lock_guard one_at_a_time(port_.fence_);
        std::unique_lock lock(port_.mutex_);
        while (!port_.ending_.empty()) {
            Connection& ending = *port_.ending_.back();
            lock.unlock();
            ending.await_end(deadline);
            lock.lock();
            std::erase_if(port_.ending_, [&](const auto& one) { return one.get() == &ending; });
        }
    }

    RemotePort& port_;
    std::unique_ptr<Connection> connection_;
    bool was_idle_ = false;
};

class RemotePort::Exchange final : public Transfer {
public:
    Exchange(RemotePort& port, Direction direction) : port_(port), direction_(direction), borrowed_(port) {}
    void start(const Piece& piece) override {
        port_.require_inside(piece);
        borrowed_.open(port_.deadline());
        port_.send(direction_, piece, *borrowed_);
    }
    void finish(const Piece& piece) override { port_.receive(direction_, piece, *borrowed_); }
    bool may_retry() const noexcept override { return borrowed_.died_idle(); }
    void abandon() override { borrowed_.drop(); }

private:
    RemotePort& port_;
    const Direction direction_;
    Borrowed borrowed_;
};

RemotePort::RemotePort(std::string name, RemoteEnd end, double timeout)
    : name_(std::move(name)), end_(std::move(end)), timeout_(timeout), owner_(getpid()) {}

RemotePort::~RemotePort() = default;

double RemotePort::deadline() const noexcept { return monotonic_seconds() + timeout_; }

void RemotePort::require_owner() const {
    if (getpid() != owner_) {
        fail_closed(name_ + ": its connections belong to the process that opened it, not to a fork of it");
    }
}

void RemotePort::require_inside(const Piece& piece) const {
    if (piece.offset > end_.nbytes || piece.nbytes > end_.nbytes - piece.offset) {
        fail_value(name_ + ": offset " + std::to_string(piece.offset) + " and " + std::to_string(piece.nbytes) +
                   " bytes are outside of the " + std::to_string(end_.nbytes) + " bytes that " + end_.node + " has lent");
    }
}

void RemotePort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    transfer(Direction::read, {offset, reinterpret_cast<std::uintptr_t>(into), nbytes});
}

void RemotePort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    transfer(Direction::write, {offset, reinterpret_cast<std::uintptr_t>(from), nbytes});
}

std::unique_ptr<Transfer> RemotePort::begin(Direction direction) {
    require_owner();
    return copies() ? nullptr : std::make_unique<Exchange>(*this, direction);
}

void RemotePort::transfer(Direction direction, const Piece& piece) {
    require_owner();
    if (copies()) {
        require_inside(piece);
        copy(direction, piece);
        return;
    }
    const double until = monotonic_seconds() + std::min(timeout_, ticket_patience_s);
    for (;;) {
        try {
            transfer_once(direction, piece);
            return;
        } catch (const PortFailure& failure) {
            if (failure.error().kind != ErrorKind::ticket || monotonic_seconds() >= until) {
                throw;
            }
        }
        std::this_thread::sleep_for(ticket_pause);
    }
}

void RemotePort::transfer_once(Direction direction, const Piece& piece) {
    Exchange exchange(*this, direction);
    try {
        exchange.start(piece);
        exchange.finish(piece);
    } catch (const PortFailure& failure) {
        if (failure.error().kind != ErrorKind::node || !exchange.may_retry()) {
            throw;
        }
        // Moving the same bytes twice does no harm. But a reply to the first attempt must not be taken for a later one.
        exchange.abandon();
        exchange.start(piece);
        exchange.finish(piece);
    }
}

void RemotePort::copy(Direction direction, const Piece& piece) const {
    const auto* header = reinterpret_cast<const SegmentHeader*>(end_.memory);
    const auto require_lease = [&] {
        if (header->retired.load(std::memory_order_acquire) != 0) {
            fail_node(ErrorKind::lease_lost, end_.node, "it took the lease of " + name_ + " back, and its bytes are lost");
        }
    };
    require_lease();
    std::byte* there = end_.memory + segment_header_nbytes + piece.offset;
    if (direction == Direction::read) {
        std::memcpy(reinterpret_cast<void*>(piece.address), there, piece.nbytes);
    } else {
        std::memcpy(there, reinterpret_cast<const void*>(piece.address), piece.nbytes);
    }
    // The node sets the mark before it takes the memory back.
    std::atomic_thread_fence(std::memory_order_acquire);
    require_lease();
}

void RemotePort::send(Direction direction, const Piece& piece, Connection& connection) const {
    const bool reads = direction == Direction::read;
    const std::uint64_t arguments[2] = {piece.offset, piece.nbytes};
    Request request{reads ? Op::read : Op::write};
    request.meta = {reinterpret_cast<const char*>(arguments), reads ? sizeof arguments : sizeof arguments[0]};
    request.lease = end_.lease;
    const iovec payload{reinterpret_cast<void*>(piece.address), piece.nbytes};
    if (!reads) {
        request.payload = {&payload, 1};
        request.nbytes = piece.nbytes;
    }
    connection.send(request, deadline());
}

void RemotePort::receive(Direction direction, const Piece& piece, Connection& connection) const {
    // A deadline for each piece: as long as bytes go on arriving, there is no failure, however many they are.
    const double until = deadline();
    const ReplyHead head = connection.receive_head(until);
    const bool done = head.status == static_cast<std::uint16_t>(Status::done);
    if (!done || direction == Direction::write) {
        connection.drop_payload(until);
    }
    if (!done) {
        refuse(head, piece);
    }
    if (direction == Direction::read) {
        if (head.nbytes != piece.nbytes) {
            connection.give_up();
            fail_node(ErrorKind::protocol, connection.node(),
                      "the node sent " + std::to_string(head.nbytes) + " bytes, expected " + std::to_string(piece.nbytes));
        }
        connection.receive_payload(reinterpret_cast<void*>(piece.address), until);
    }
}

void RemotePort::refuse(const ReplyHead& head, const Piece& piece) const {
    const std::string& node = end_.node;
    const std::string text = head.meta.empty() ? std::string() : " (" + head.meta + ")";
    switch (static_cast<Status>(head.status)) {
        case Status::unknown:
            fail_node(ErrorKind::lease_lost, node,
                      "it no longer has the memory that it lent to " + name_ +
                          ": it restarted empty, or the program was away for longer than its grace" + text);
        case Status::denied:
            fail_node(ErrorKind::denied, node, "the access key lacks the right to use memory for " + name_ + text);
        case Status::lapsed:
            fail_node(ErrorKind::ticket, node, "the ticket for the memory of " + name_ + " does not allow this now" + text);
        case Status::checksum:
            fail_checksum(node, "a piece of " + std::to_string(piece.nbytes) + " bytes was damaged on its way" + text);
        default:
            fail_node(ErrorKind::node, node,
                      "the transfer for " + name_ + " was refused with status " + std::to_string(head.status) + text);
    }
}

}  // namespace farpool
