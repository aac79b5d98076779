#include "wire/exchange.hpp"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>
#include <vector>

#include "core/clock.hpp"
#include "core/relax.hpp"
#include "wire/payload_sum.hpp"

namespace farpool {

namespace {

// Bytes sent to one node before the next node's turn: as many as a loopback socket takes at once.
constexpr std::size_t turn_nbytes = std::size_t{512} << 10;
constexpr std::size_t shared_nbytes = 4096;  // minimum size of a payload whose checksum is remembered

// Checksums by payload: a caller that sends the same bytes to two nodes passes the same pieces twice.
using Sums = std::map<const iovec*, PayloadSum>;

// Measures how long nodes take to answer: from the time when all requests have been sent to the head of a node's first reply.
class Stopwatch {
public:
    explicit Stopwatch(std::span<const Ask> asks) noexcept {
        for (const Ask& ask : asks) {
            nbytes_ += ask.request.meta.size() + ask.request.nbytes;
        }
    }

    void start(double now) noexcept { began_ = began_ > 0 ? began_ : now; }

    // Does not count the time that `call` takes, which may be a wait for another thread of this program.
    template <typename Call>
    auto pause_for(Call call) {
        const double before = monotonic_seconds();
        auto result = call();
        began_ += began_ > 0 ? monotonic_seconds() - before : 0;
        return result;
    }

    // Notes the head of a reply, the first one over its connection or a later one.
    void heard(const Ask& ask, bool first) noexcept {
        nbytes_ += ask.head.nbytes;
        AnswerTimes* const times = ask.connection->times();
        if (first && times != nullptr && nbytes_ <= measured_nbytes && tells(ask.request.op)) {
            const double now = monotonic_seconds();
            times->add(began_ > 0 ? now - began_ : 0, now);  // 0 if it was there when the last request had been sent
        }
    }

private:
    // True for operations for which a node waits for nothing but its own work: no other program, no room.
    static bool tells(Op op) noexcept { return op == Op::get || op == Op::lookup || op == Op::stat || op == Op::ping; }

    std::size_t nbytes_ = 0;
    double began_ = 0;
};

// One connection and its share of the requests.
class Lane {
public:
    explicit Lane(Connection& connection) : connection_(connection) {}

    void add(std::size_t ask) { asks_.push_back(ask); }
    bool open() const noexcept { return received_ < asks_.size(); }
    // True if a request waits and the socket can take bytes.
    bool sending() const noexcept { return outgoing_.has_value() && !connection_.awaits_room(); }
    Connection& connection() const noexcept { return connection_; }

    // Sends and receives all bytes that it can without waiting.
    void advance(std::span<Ask> asks, Sums& sums, const Place& place, Stopwatch& watch, bool alone) {
        try {
            send(asks, sums, alone);
            while (open() && received_ < sent_ && receive(asks, place, watch)) {
                send(asks, sums, alone);
            }
        } catch (const PortFailure& failure) {
            fail(asks, failure.error());
        }
    }

    // Ends the connection; its requests without an answer fail with `error`.
    void fail(std::span<Ask> asks, const PortError& error) {
        connection_.give_up();
        outgoing_.reset();
        for (; received_ < asks_.size(); ++received_) {
            asks[asks_[received_]].error = error;
        }
    }

    void time_out(std::span<Ask> asks) {
        try {
            connection_.fail(ErrorKind::node_timeout, outgoing_ ? "the node did not take the request within the deadline"
                                                                : "the node did not answer within the deadline");
        } catch (const PortFailure& failure) {
            fail(asks, failure.error());
        }
    }

private:
    void send(std::span<Ask> asks, Sums& sums, bool alone) {
        for (;;) {
            if (!outgoing_) {
                if (sent_ == asks_.size() || sent_ - received_ >= window || (sent_ > received_ && nbytes_ >= window_nbytes)) {
                    return;
                }
                const Request& request = asks[asks_[sent_]].request;
                PayloadSum* sum = nullptr;
                if (request.nbytes >= shared_nbytes && !connection_.by_area(request)) {
                    sum = &sums.try_emplace(request.payload.data(), request.payload, request.nbytes, alone).first->second;
                }
                outgoing_ = connection_.begin(request, sum);
                ++sent_;
                nbytes_ += request.nbytes;
            }
            if (!connection_.send_some(*outgoing_, alone ? std::numeric_limits<std::size_t>::max() : turn_nbytes)) {
                return;
            }
            outgoing_.reset();
        }
    }

    // Receives one reply; false if it has not arrived yet.
    bool receive(std::span<Ask> asks, const Place& place, Stopwatch& watch) {
        const std::size_t number = asks_[received_];
        Ask& ask = asks[number];
        if (!has_head_) {
            if (!connection_.receive_head_some(ask.head)) {
                return false;
            }
            has_head_ = true;
            watch.heard(ask, received_ == 0);
            into_ = {};
            if (ask.head.nbytes > 0) {
                try {
                    into_ = watch.pause_for([&] { return place(number, ask.head); });
                } catch (const PortFailure& failure) {
                    if (failure.error().kind != ErrorKind::value) {
                        throw;  // out of memory: the payload may be too large for it
                    }
                    ask.error = failure.error();
                }
            }
        }
        try {
            if (!connection_.receive_payload_some(into_)) {
                return false;
            }
        } catch (const PortFailure& failure) {
            if (connection_.broken()) {
                throw;
            }
            ask.error = failure.error();
        }
        has_head_ = false;
        nbytes_ -= ask.request.nbytes;
        ++received_;
        return true;
    }

    Connection& connection_;
    std::vector<std::size_t> asks_;
    std::size_t sent_ = 0;
    std::size_t received_ = 0;
    std::size_t nbytes_ = 0;
    std::optional<Outgoing> outgoing_;
    bool has_head_ = false;
    Parts into_{};
};

// Sleeps until a connection can continue, or until the deadline; throws the exceptions of a signal's handler.
void await(const std::vector<Lane>& lanes, double deadline) {
    std::vector<pollfd> entries;
    entries.reserve(lanes.size());
    for (const Lane& lane : lanes) {
        if (lane.open()) {
            const auto events = static_cast<short>(lane.connection().receives_on() | (lane.sending() ? POLLOUT : 0));
            entries.push_back({lane.connection().fd(), events, 0});
        }
    }
    const int ready = poll_until(entries, deadline);
    const Connection::Settings& settings = lanes.front().connection().settings();
    if (ready < 0 && settings.interrupted != nullptr) {
        settings.interrupted();
    }
}

std::uint64_t moved(const std::vector<Lane>& lanes) {
    std::uint64_t bytes = 0;
    for (const Lane& lane : lanes) {
        bytes += lane.connection().moved();
    }
    return bytes;
}

}  // namespace

void exchange(std::span<Ask> asks, const Place& place, double deadline) {
    std::vector<Lane> lanes;
    for (std::size_t number = 0; number < asks.size(); ++number) {
        Connection* const connection = asks[number].connection;
        const auto lane = std::find_if(lanes.begin(), lanes.end(), [&](Lane& one) { return &one.connection() == connection; });
        (lane == lanes.end() ? lanes.emplace_back(*connection) : *lane).add(number);
    }
    Sums sums;
    Stopwatch watch(asks);
    // If several nodes run on this host, they need the cores to copy and verify. So no second thread computes checksums; this
    // thread does it while the sockets are full.
    const bool alone = lanes.size() == 1;
    double spin_until = 0;
    std::uint64_t before = 0;
    try {
        for (unsigned attempt = 1;; ++attempt) {
            bool open = false;
            bool sending = false;
            for (Lane& lane : lanes) {
                if (lane.open()) {
                    lane.advance(asks, sums, place, watch, alone);
                    open = open || lane.open();
                    sending = sending || (lane.open() && lane.sending());
                }
            }
            if (!open) {
                return;
            }
            const double now = monotonic_seconds();
            watch.start(now);
            if (const std::uint64_t bytes = moved(lanes); attempt == 1 || bytes != before) {
                before = bytes;
                spin_until = std::min(now + lanes.front().connection().settings().spin, deadline);
                attempt = 1;
                continue;  // its turn may have ended before its socket was full
            }
            if (std::ranges::any_of(sums, [](auto& entry) { return entry.second.go_on(); })) {
                continue;
            }
            if (now >= deadline) {
                for (Lane& lane : lanes) {
                    if (lane.open()) {
                        lane.time_out(asks);
                    }
                }
                return;
            }
            // A full socket means that its node has more to do than this side, so give it the processor.
            if (now < spin_until && !sending) {
                relax(attempt);
            } else {
                await(lanes, deadline);
            }
        }
    } catch (...) {
        for (Lane& lane : lanes) {
            if (lane.open()) {
                lane.connection().give_up();
            }
        }
        throw;
    }
}

}  // namespace farpool
