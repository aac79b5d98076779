#include "node/loop.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "wire/loopback.hpp"

namespace farpool {

namespace {

constexpr std::size_t scratch_nbytes = 64 * 1024;

[[noreturn]] void fail(const char* what) { throw std::system_error(errno, std::generic_category(), what); }

}  // namespace

Loop::Loop(Services& services, const Alarm& alarm)
    : services_(services), epoll_(epoll_create1(EPOLL_CLOEXEC)), alarm_(alarm), scratch_(scratch_nbytes) {
    if (epoll_.fd() < 0) {
        fail("epoll");
    }
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.fd = alarm_.fd();
    if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, alarm_.fd(), &event) != 0) {
        fail("epoll_ctl");
    }
}

bool Loop::wait(int milliseconds) {
    if (has_work_) {
        milliseconds = 0;
    } else if (next_at_) {  // all tenants that have work are above their caps
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next_at_ - Clock::now()).count();
        milliseconds = static_cast<int>(std::clamp<std::int64_t>(left, 0, milliseconds));
    }
    ready_count_ = epoll_wait(epoll_.fd(), ready_.data(), static_cast<int>(ready_.size()), milliseconds);
    return ready_count_ > 0 || has_work_ || (next_at_ && *next_at_ <= Clock::now());
}

void Loop::end_round() {
    next_at_ = turns_.next_at(now_);
    has_work_ = services_.unsent.has_room() || (next_at_ && *next_at_ <= now_);
}

bool Loop::note_events(Clock::time_point now) {
    now_ = now;
    bool woken = false;
    for (int event = 0; event < ready_count_; ++event) {
        const epoll_event& found = ready_[static_cast<std::size_t>(event)];
        if (found.data.fd == alarm_.fd()) {
            alarm_.clear();
            woken = true;
        } else if (const auto known = connections_.find(found.data.fd);
                   known != connections_.end() && !known->second->is_dead()) {
            known->second->note_events(found.events);
            queue(*known->second);
        }
    }
    return woken;
}

void Loop::serve() {
    serve_turns();
    serve_lines();
    reap();
}

// Serves connections, for the work of one turn at most and of half a turn at least. Then the loop looks for events again, so
// that a new request waits for this one turn and not for all connections with work.
void Loop::serve_turns() {
    for (std::uint64_t spent = 0; spent < Turns::quantum / 2;) {
        if (spent > 0) {  // the first turn begins with the round
            now_ = Clock::now();
        }
        Turns::Flow* const next = turns_.next(now_);
        if (next == nullptr) {
            return;
        }
        services_.turn = Turn(turns_.turn_units(*next));
        NodeConnection& connection = *connections_.at(static_cast<int>(next->name()));
        connection.begin_turn(services_.deadlines.at(now_));
        work_on(connection, [&] { connection.serve(scratch_); });
        Work work = services_.turn.work();
        if (work.units() < work::call) {  // a turn that did nothing costs something, too
            work.other = work::call - work.bytes();
        }
        turns_.charge(*next, work, now_);
        spent += work.units();
    }
}

// Completes delayed replies, if other replies of their access keys have been sent.
void Loop::serve_lines() {
    services_.unsent.serve([this](Unsent::Waiting waiting) {
        NodeConnection* const connection = find(waiting.first, waiting.second);
        if (connection == nullptr) {
            return true;
        }
        bool leaves = false;
        work_on(*connection, [&] { leaves = connection->replies().leave_line(); });
        return leaves || connection->is_dead();
    });
}

// Works on a connection, and closes it if that fails.
template <typename Work>
void Loop::work_on(NodeConnection& connection, Work work) {
    if (!services_.events.guard(connection.client().session, [&] {
            work();
            settle(connection);
        })) {
        close(connection);
    }
}

// Closes a connection that is finished or broken. Otherwise it waits for its next event and its next turn. Epoll reports only
// changes; when we ask for an event again, it checks the state again.
void Loop::settle(NodeConnection& connection) {
    if (connection.is_dead() || connection.is_finished()) {
        return close(connection);
    }
    const int fd = connection.client().fd;
    epoll_event event{};
    event.events = connection.wanted_events();
    event.data.fd = fd;
    if (connection.watch(event.events) && epoll_ctl(epoll_.fd(), EPOLL_CTL_MOD, fd, &event) != 0) {
        return close(connection);
    }
    queue(connection);
}

// Gives a connection its place in the order of turns while it has work.
void Loop::queue(NodeConnection& connection) {
    if (connection.may_read() || connection.may_send()) {
        turns_.want(connection.seat());
        connection.wait_for_turn(services_.deadlines.at(now_));
    } else {
        turns_.rest(connection.seat());
        connection.end_wait();
    }
}

void Loop::add(Stream stream, Client client) {
    const int fd = stream.fd();
    if (fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) != 0) {
        fail("taking a connection over");
    }
    bound_loopback_sending(fd);
    client.fd = fd;
    client.number = ++numbers_;
    Turns::Seat seat = turns_.join(client.owner.first, client.owner.second, static_cast<std::uint64_t>(fd), client.is_latency);
    const bool has_input = stream.pending();  // TLS has read it already, so epoll cannot report it
    auto made = std::make_unique<NodeConnection>(std::move(stream), std::move(client), std::move(seat), services_);
    NodeConnection& connection = *connections_.insert_or_assign(fd, std::move(made)).first->second;
    epoll_event event{};
    event.events = connection.wanted_events();
    event.data.fd = fd;
    connection.watch(event.events);
    if (epoll_ctl(epoll_.fd(), EPOLL_CTL_ADD, fd, &event) != 0) {
        connections_.erase(fd);
        fail("epoll_ctl");
    }
    if (has_input) {
        now_ = Clock::now();
        queue(connection);
        alarm_.wake();
    }
}

NodeConnection* Loop::find(int fd, std::uint64_t number) const {
    const auto found = connections_.find(fd);
    const bool is_open = found != connections_.end() && found->second->client().number == number && !found->second->is_dead();
    return is_open ? found->second.get() : nullptr;
}

void Loop::deliver(const Fetch& fetch, bool ok) {
    NodeConnection* const connection = find(fetch.fd, fetch.connection);
    if (connection != nullptr) {
        work_on(*connection, [&] {
            const std::uint64_t copied = connection->replies().deliver(fetch, ok);
            turns_.charge(connection->seat(), Work{0, 0, copied}, now_);
        });
    }
}

bool Loop::give_up_a_put(const Catalogue& objects) {
    NodeConnection* silent = nullptr;
    for (const auto& [fd, connection] : connections_) {
        if (connection->protocol().has_announced_put(objects) &&
            (silent == nullptr || connection->frame_deadline() < silent->frame_deadline())) {
            silent = connection.get();
        }
    }
    if (silent == nullptr) {
        return false;
    }
    silent->protocol().give_up_put();
    return true;
}

void Loop::fence() {
    for (const auto& [fd, connection] : connections_) {
        if (!connection->is_dead()) {
            connection->protocol().fence();
        }
    }
}

void Loop::close_key(std::string_view key) {
    for (const auto& [fd, connection] : connections_) {
        if (connection->client().key == key && !connection->is_dead()) {
            services_.events.note("ended", connection->client().session, "its access key is gone or was changed");
            close(*connection);
        }
    }
    alarm_.wake();  // the loop removes them
}

void Loop::close_slow() {
    const Clock::time_point now = services_.deadlines.now();
    for (const auto& [fd, connection] : connections_) {
        const char* stall = connection->is_dead() ? nullptr : connection->stall(now);
        if (stall == nullptr && !connection->is_dead()) {
            stall = connection->keeps_ended_lease(now);
        }
        if (stall != nullptr) {
            services_.events.note("stalled", connection->client().session, stall);
            close(*connection);
        }
    }
    reap();
}

void Loop::close_all() {
    for (const auto& [fd, connection] : connections_) {
        close(*connection);
    }
    reap();
}

void Loop::close(NodeConnection& connection) {
    if (!connection.is_closed()) {
        turns_.rest(connection.seat());
        closed_.push_back(connection.client().fd);
        connection.close();
    }
}

void Loop::reap() {
    for (const int fd : closed_) {
        // Closing it is not enough: a process that forked off may have the socket, too.
        epoll_ctl(epoll_.fd(), EPOLL_CTL_DEL, fd, nullptr);
        connections_.erase(fd);
    }
    closed_.clear();
}

std::map<std::uint32_t, std::uint64_t> Loop::areas_taken() const {
    std::map<std::uint32_t, std::uint64_t> taken;
    for (const auto& [fd, connection] : connections_) {
        taken[connection->client().tenant] += connection->area_taken();
    }
    return taken;
}

}  // namespace farpool
