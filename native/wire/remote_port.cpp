#include "wire/remote_port.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "core/clock.hpp"
#include "wire/segment.hpp"

namespace farpool {

namespace {

constexpr std::size_t window = 16;  // pieces asked for and not yet answered, altogether, times the nodes over the wire

}  // namespace

struct RemotePort::Node {
    RemoteEnd end;
    std::mutex fence;  // held while `ending` is waited for; taken before the other
    std::mutex mutex;
    std::vector<std::unique_ptr<Connection>> idle;
    std::vector<std::unique_ptr<Connection>> ending;  // failed; what was written over them may still reach the lease
};

struct RemotePort::Piece {
    std::size_t node;
    std::uint64_t offset;  // in the node's lease
    std::byte* memory;
    std::size_t nbytes;
};

// A connection to a node that is lent to a transfer, and returned at its end unless it is of no more use.
class RemotePort::Borrowed {
public:
    explicit Borrowed(Node& node) : node_(&node) {}
    Borrowed(Borrowed&& other) noexcept = default;
    ~Borrowed() { give_back(); }

    Connection& operator*() { return *connection_; }

    void open(double deadline) {
        if (connection_ != nullptr) {
            return;
        }
        await_ends(deadline);
        {
            const std::lock_guard lock(node_->mutex);
            while (connection_ == nullptr && !node_->idle.empty()) {
                connection_ = std::move(node_->idle.back());
                node_->idle.pop_back();
                if (connection_->stale()) {
                    connection_.reset();
                }
            }
        }
        was_idle_ = connection_ != nullptr;
        if (connection_ == nullptr) {
            connection_ = std::make_unique<Connection>(node_->end.dial(), node_->end.node, node_->end.settings);
        }
    }

    // True if it failed and had been idle before: then the node may have been away meanwhile, and a new connection may work.
    bool died_idle() const noexcept { return was_idle_ && connection_ != nullptr && connection_->broken(); }

    // Gives up this connection and all idle ones to the node, which are as old.
    void drop() {
        if (connection_ != nullptr) {
            connection_->give_up();
        }
        give_back();
        const std::lock_guard lock(node_->mutex);
        node_->idle.clear();
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
        const std::lock_guard lock(node_->mutex);
        (whole ? node_->idle : node_->ending).push_back(std::move(connection_));
    }

    void await_ends(double deadline) {
        const std::lock_guard one_at_a_time(node_->fence);
        std::unique_lock lock(node_->mutex);
        while (!node_->ending.empty()) {
            Connection& ending = *node_->ending.back();
            lock.unlock();
            ending.await_end(deadline);
            lock.lock();
            std::erase_if(node_->ending, [&](const auto& one) { return one.get() == &ending; });
        }
    }

    Node* node_;
    std::unique_ptr<Connection> connection_;
    bool was_idle_ = false;
};

RemotePort::RemotePort(std::string name, std::vector<RemoteEnd> ends, std::uint64_t stripe, double timeout)
    : name_(std::move(name)), stripe_(stripe), timeout_(timeout), owner_(getpid()) {
    if (ends.empty() || stripe == 0) {
        fail_value(name_ + ": expected at least one node, and a stripe of at least 1 byte");
    }
    for (RemoteEnd& end : ends) {
        if (end.nbytes != ends.front().nbytes || end.nbytes % stripe != 0) {
            fail_value(name_ + ": " + end.node + " lends " + std::to_string(end.nbytes) +
                       " bytes, expected as many of each node and a multiple of " + std::to_string(stripe));
        }
        nodes_.push_back(std::make_unique<Node>());
        nodes_.back()->end = std::move(end);
    }
}

RemotePort::~RemotePort() = default;

unsigned RemotePort::concurrency() const noexcept { return wired_nodes() > 0 ? 4 : 1; }

std::size_t RemotePort::wired_nodes() const noexcept {
    return static_cast<std::size_t>(
        std::count_if(nodes_.begin(), nodes_.end(), [](const auto& node) { return node->end.memory == nullptr; }));
}

double RemotePort::deadline() const noexcept { return monotonic_seconds() + timeout_; }

std::vector<RemotePort::Piece> RemotePort::cut(std::uint64_t offset, std::byte* memory, std::size_t nbytes) const {
    const std::uint64_t capacity = nodes_.front()->end.nbytes * nodes_.size();
    if (offset > capacity || nbytes > capacity - offset) {
        fail_value(name_ + ": offset " + std::to_string(offset) + " and " + std::to_string(nbytes) + " bytes lie outside of " +
                   std::to_string(capacity) + " bytes");
    }
    std::vector<Piece> pieces;
    pieces.reserve(nbytes / stripe_ + 2);
    while (nbytes > 0) {
        const std::uint64_t stripe = offset / stripe_;
        const std::uint64_t inside = offset % stripe_;
        const std::size_t step = std::min<std::uint64_t>(nbytes, stripe_ - inside);
        pieces.push_back({stripe % nodes_.size(), stripe / nodes_.size() * stripe_ + inside, memory, step});
        offset += step;
        memory += step;
        nbytes -= step;
    }
    return pieces;
}

void RemotePort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    transfer(Op::read, offset, static_cast<std::byte*>(into), nbytes);
}

void RemotePort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    transfer(Op::write, offset, static_cast<std::byte*>(const_cast<void*>(from)), nbytes);
}

void RemotePort::transfer(Op op, std::uint64_t offset, std::byte* memory, std::size_t nbytes) {
    if (getpid() != owner_) {
        fail_closed(name_ + ": its connections belong to the process that opened it, not to a fork of it");
    }
    const std::vector<Piece> pieces = cut(offset, memory, nbytes);
    std::vector<Borrowed> borrowed;
    borrowed.reserve(nodes_.size());
    for (const auto& node : nodes_) {
        borrowed.emplace_back(*node);
    }
    try {
        attempt(op, pieces, borrowed);
    } catch (const PortFailure& failure) {
        const bool again = failure.error().kind == ErrorKind::node &&
                           std::any_of(borrowed.begin(), borrowed.end(), [](const auto& one) { return one.died_idle(); });
        if (!again) {
            throw;
        }
        // Reading or writing the same bytes twice does no harm. Replies of the first attempt must not be met, though.
        for (Borrowed& one : borrowed) {
            one.drop();
        }
        attempt(op, pieces, borrowed);
    }
}

void RemotePort::attempt(Op op, const std::vector<Piece>& pieces, std::vector<Borrowed>& borrowed) {
    std::vector<const Piece*> wired;
    wired.reserve(pieces.size());
    for (const Piece& piece : pieces) {
        if (nodes_[piece.node]->end.memory == nullptr) {
            wired.push_back(&piece);
        }
    }
    const std::size_t most_unanswered = window * wired_nodes();
    std::size_t sent = 0;
    const auto send_more = [&](std::size_t received) {
        for (; sent < wired.size() && sent - received < most_unanswered; ++sent) {
            Borrowed& one = borrowed[wired[sent]->node];
            one.open(deadline());
            send(op, *wired[sent], *one);
        }
    };
    send_more(0);
    for (const Piece& piece : pieces) {  // while the others' nodes work
        if (nodes_[piece.node]->end.memory != nullptr) {
            copy(op, piece);
        }
    }
    for (std::size_t received = 0; received < wired.size(); ++received) {
        send_more(received);
        receive(op, *wired[received], *borrowed[wired[received]->node]);
    }
}

void RemotePort::copy(Op op, const Piece& piece) const {
    const RemoteEnd& end = nodes_[piece.node]->end;
    const auto* header = reinterpret_cast<const SegmentHeader*>(end.memory);
    const auto require_held = [&] {
        if (header->retired.load(std::memory_order_acquire) != 0) {
            fail_node(ErrorKind::lease_lost, end.node, "it took the lease of " + name_ + " back, and its bytes are lost");
        }
    };
    require_held();
    std::byte* there = end.memory + segment_header_nbytes + piece.offset;
    if (op == Op::read) {
        std::memcpy(piece.memory, there, piece.nbytes);
    } else {
        std::memcpy(there, piece.memory, piece.nbytes);
    }
    // The node says that it takes the memory back before it does.
    std::atomic_thread_fence(std::memory_order_acquire);
    require_held();
}

void RemotePort::send(Op op, const Piece& piece, Connection& connection) const {
    const std::uint64_t arguments[2] = {piece.offset, piece.nbytes};
    Request request{op};
    request.meta = {reinterpret_cast<const char*>(arguments), op == Op::read ? sizeof arguments : sizeof arguments[0]};
    request.lease = nodes_[piece.node]->end.lease;
    const iovec payload{piece.memory, piece.nbytes};
    if (op == Op::write) {
        request.payload = {&payload, 1};
        request.nbytes = piece.nbytes;
    }
    connection.send(request, deadline());
}

void RemotePort::receive(Op op, const Piece& piece, Connection& connection) const {
    // A deadline for each piece: bytes that go on arriving are no failure, however many there are.
    const double until = deadline();
    const ReplyHead head = connection.receive_head(until);
    const bool done = head.status == static_cast<std::uint16_t>(Status::done);
    if (!done || op == Op::write) {
        connection.drop_payload(until);
    }
    if (!done) {
        refuse(head, piece);
    }
    if (op == Op::read) {
        if (head.nbytes != piece.nbytes) {
            connection.give_up();
            fail_node(ErrorKind::protocol, connection.node(),
                      "the node sent " + std::to_string(head.nbytes) + " bytes, expected " + std::to_string(piece.nbytes));
        }
        connection.receive_payload(piece.memory, until);
    }
}

void RemotePort::refuse(const ReplyHead& head, const Piece& piece) const {
    const std::string& node = nodes_[piece.node]->end.node;
    const std::string text = head.meta.empty() ? std::string() : " (" + head.meta + ")";
    switch (static_cast<Status>(head.status)) {
        case Status::unknown:
            fail_node(ErrorKind::lease_lost, node,
                      "it no longer has the memory that it lent to " + name_ +
                          ": it began anew, or the program was away for longer than its grace" + text);
        case Status::denied:
            fail_node(ErrorKind::denied, node, "the access key lacks the right to use memory for " + name_ + text);
        case Status::checksum:
            fail_checksum(node, "a piece of " + std::to_string(piece.nbytes) + " bytes was damaged on its way" + text);
        default:
            fail_node(ErrorKind::node, node,
                      "the transfer for " + name_ + " was refused with status " + std::to_string(head.status) + text);
    }
}

}  // namespace farpool
