// The data loop of a node: one thread on epoll that moves frames in and out of segments without a copy in between.
//
// The code that controls the node (Python: listening, handshakes, leases, statistics) calls from other threads. One mutex
// guards all state; the loop holds it while it works on the events of epoll, never while it waits.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>
#include <thread>
#include <unordered_map>
#include <vector>

#include "node/catalogue/catalogue.hpp"
#include "node/catalogue/nvme.hpp"
#include "node/freeing.hpp"
#include "node/leases.hpp"
#include "node/loop_time.hpp"
#include "node/peer.hpp"
#include "node/quotas.hpp"
#include "node/tallies.hpp"
#include "node/turn.hpp"
#include "node/turns.hpp"

namespace farpool {

class Server {
public:
    struct Settings {
        std::string folder;
        std::uint64_t capacity;
        bool ephemeral;
        double grace;                  // seconds that a session's things outlive its last connection
        double stall;                  // seconds that a peer may rest in the middle of a frame or a reply
        double spin;                   // seconds of looking for events before sleeping
        std::string shelf;             // a file for what leaves memory; empty for none
        std::uint64_t shelf_capacity;  // bytes
        Budget::Shares shares{};       // bytes guaranteed to tenants
    };

    struct Event {
        std::string kind;
        std::uint64_t session;
        std::string text;
    };

    struct Counts {
        std::uint64_t puts = 0, drops = 0, bytes_in = 0, bytes_out = 0, checksum_errors = 0, bad_frames = 0;
    };

    struct Stats : Counts {
        std::uint64_t capacity = 0, lent = 0, used = 0, objects = 0, object_bytes = 0, evictions = 0, expired = 0, adopted = 0,
                      index_bytes = 0, connections = 0, sessions = 0, leases = 0, shelf_capacity = 0, shelf_used = 0,
                      leaving = 0, shelved = 0, demotions = 0, promotions = 0, backed = 0, taken = 0, gets = 0, hits = 0;
    };

    // Thrown where a session, an access key or a tenant already holds as much as it may; says of what.
    struct Busy : std::runtime_error {
        using std::runtime_error::runtime_error;
    };
    // Thrown for a session that belongs to another access key or tenant.
    struct Denied : std::runtime_error {
        using std::runtime_error::runtime_error;
    };

    struct TenantStats {
        std::uint64_t objects, used, backed, taken, lent, share;
        Catalogue::Counts counts;
        Quotas::Charges charges;
    };

    explicit Server(Settings settings);
    ~Server();
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    void start();
    // Ends the loop and closes the connections. Idempotent. Does nothing in a child forked from the server's process.
    void stop();
    // Takes the stream over; it is non-blocking from now on. A session belongs to the tenant and the access key that it was
    // first seen with, as long as it lives; throws Denied where those are others.
    void adopt(Stream stream, std::uint64_t session, std::uint32_t tenant, std::uint32_t rights, std::string_view key);
    // Sets the tenants that may connect; what one of them pins, keeps or leases leaves room for the others' shares.
    void expect_tenants(std::set<std::uint32_t> tenants);
    // An access key that may connect, and its quotas.
    struct ExpectedKey {
        std::uint32_t tenant;
        Quotas::Key key;
    };
    void expect_keys(const std::map<std::string, ExpectedKey>& keys);
    // Closes all connections that were opened with this access key.
    void end_key(std::string_view key);
    // Counts a connection to the session, until drop(). Throws Denied, and Busy where the key or its tenant has too many.
    void hold(std::uint64_t session, std::uint32_t tenant, std::string_view key);
    void drop(std::uint64_t session);
    // Makes a lease and returns its id, 0 where there is no room. Throws Busy and Denied.
    std::uint64_t lend(std::uint64_t session, std::uint32_t tenant, std::uint64_t nbytes);
    bool release(std::uint64_t session, std::uint64_t lease);
    std::vector<std::pair<std::uint64_t, std::uint64_t>> leases(std::uint64_t session);
    // Path of a lease's file (on an ephemeral node, the path that it would have); empty where there is no such lease.
    std::string lease_path(std::uint64_t session, std::uint64_t lease);
    ObjectPaths objects_paths(std::uint32_t tenant);
    // Descriptors, owned by the caller, of a lease (-1 where there is none) and of a tenant's index and data.
    int lease_file(std::uint64_t session, std::uint64_t lease);
    std::pair<int, int> objects_files(std::uint32_t tenant, bool writable);
    // A descriptor, owned by the caller, of the session's own marks of visits. They count as lent. Throws Busy and Denied.
    int objects_visited(std::uint64_t session, std::uint32_t tenant);
    // Notes that the session can write the data segment itself, over a one-sided fabric, and so may have places prepared there.
    void expose(std::uint64_t session, std::uint32_t tenant);
    // Lists a part of a tenant's objects: those with the prefix behind the key `after`, from `place` on (0 at first), until at
    // least `limit` are found or enough was looked at for one turn. Moves `place` on, to 0 at the end.
    std::vector<Listed> list_some(std::uint32_t tenant, std::uint64_t& place, std::string_view after, std::string_view prefix,
                                  std::size_t limit);
    Stats stats();
    std::map<std::uint32_t, TenantStats> tenants();
    struct KeyStats {
        std::uint32_t tenant;
        Quotas::Charges charges;
    };
    // Statistics of the access keys that may connect, by name.
    std::map<std::string, KeyStats> keys();
    std::vector<Event> events();
    // Times of replies by operation, from the request's header until the reply has been handed to the system.
    std::map<std::uint8_t, Latencies> latencies();
    // Requests over data connections that were refused, by tenant and status.
    std::map<std::uint32_t, Tallies::Refusals> refusals();

    // Waits at most `milliseconds` for an event, notes all events, and serves connections for about the work of one turn. False
    // if there was nothing to do. Called by the loop's thread, and by tests that have no such thread.
    bool step(int milliseconds);

private:
    using Place = std::pair<std::uint32_t, std::uint64_t>;  // tenant, offset in the data segment: of a payload unless said

    // Sessions and places of the pins that have a time to live, by when that ends.
    using Endings = std::multimap<Clock::time_point, std::pair<std::uint64_t, Place>>;

    struct Pinned {
        std::uint64_t extent;  // offset
        std::uint64_t serial;
        std::uint32_t number;      // of the session's pins
        Endings::iterator ending;  // the end of them for none
    };

    // One read of an object from the NVMe file, shared by all requests that wait for it.
    struct Reading {
        std::shared_ptr<AlignedBuffer> into;
        std::vector<Fetch> waiting;
    };

    struct Preparing {
        std::uint64_t extent;  // offset
        std::uint64_t serial;
        std::uint64_t peer;                             // the connection's number
        std::uint64_t nbytes;                           // announced
        std::optional<Clock::time_point> left_alone{};  // since that was closed
    };

    struct Session {
        using Promise = std::pair<const Place, Preparing>;
        std::uint32_t tenant;
        std::uint64_t owner;  // of the access key
        Quotas::Owner charged() const { return {tenant, owner}; }
        std::size_t connections = 0;
        Clock::time_point empty_since{};
        std::multimap<Place, Pinned> pins{};
        std::uint32_t last_pin = 0;
        std::map<Place, Preparing> prepared{};
        std::size_t areas = 0;
        bool exposed = false;  // the tenant's objects were exposed to it
    };

    void run();
    Session& bind(std::uint64_t session, std::uint32_t tenant, std::string_view key);
    Session& session_of(std::uint64_t session, std::uint32_t tenant);
    void notice(Peer& peer, std::uint32_t events);
    void serve_turns();
    void serve(Peer& peer);
    void service(Peer& peer);
    bool may_read(const Peer& peer) const;
    bool may_send(const Peer& peer) const;
    void queue(Peer& peer);
    void receive(Peer& peer);
    void receive_more(Peer& peer);
    ssize_t receive_some(Peer& peer);
    std::size_t feed(Peer& peer, const std::byte* data, std::size_t nbytes);
    std::size_t feed_some(Peer& peer, const std::byte* data, std::size_t nbytes);
    bool go_on(Peer& peer);
    void take(Peer& peer, const std::byte* data, std::size_t nbytes);
    void take_part(Peer& peer);
    void go_on_with_part(Peer& peer);
    void frame_begun(Peer& peer);
    void payload_complete(Peer& peer);
    void frame_complete(Peer& peer);
    void begin_put(Peer& peer);
    void extend_put(Peer& peer);
    bool give_up_a_put(const Catalogue& objects);
    void begin_write(Peer& peer);
    void finish_put(Peer& peer);
    void finish_write(Peer& peer);
    void answer(Peer& peer);
    void answer_drop(Peer& peer);
    void answer_demote(Peer& peer);
    void answer_touch(Peer& peer);
    void answer_lookup(Peer& peer);
    void go_on_with_lookup(Peer& peer);
    void answer_rotate(Peer& peer);
    void rotate(Peer& peer, std::uint32_t epoch);
    bool is_behind(const Peer& peer) const { return peer.header.epoch > peer.objects->epoch(); }
    void finish(Peer& peer, std::uint64_t offset, std::uint64_t serial, std::uint32_t crc);
    std::optional<Found> found_or_refuse(Peer& peer, std::string_view key, bool visit);
    void answer_get(Peer& peer);
    void send_object(Peer& peer, Reply& answer, const Found& found, std::string_view key);
    bool may_hold(const Peer& peer, const Found& found) const;
    bool has_room(const Peer& peer, const Found& found) const;
    bool send_held_back(Peer& peer);
    void serve_those_in_line();
    void answer_stat(Peer& peer);
    void answer_pin(Peer& peer);
    void pin(Peer& peer, const Found& found, Reply& answer, std::uint64_t ttl_ms);
    void unpin(Session& session, std::multimap<Place, Pinned>::iterator pin);
    void end_pins();
    void pin_again(Peer& peer, Reply& answer, const Fetch& fetch);
    void fetch(Peer& peer, const Found& found, std::string_view key, std::uint64_t ttl_ms);
    Fetch expect(Peer& peer, Reply& answer, const Found& found, std::string_view key, std::uint64_t ttl_ms);
    void start_fetches(Peer& peer);
    void start_fetch(Peer& peer, Reply& answer, const Fetch& fetch);
    void fetched(const Place& place, bool ok);
    void deliver(Peer& peer, const Fetch& fetch, bool ok);
    void finish_jobs();
    void answer_unpin(Peer& peer);
    void answer_prepare(Peer& peer);
    void answer_commit(Peer& peer);
    void go_on_with_commit(Peer& peer);
    void answer_abort(Peer& peer);
    void answer_area(Peer& peer);
    void end_area(Peer& peer);
    void answer_read(Peer& peer);
    void reply(Peer& peer, Status status, std::uint64_t serial = 0, std::string meta = {});
    static void refuse(Reply& answer, Status status, std::string meta = {});
    void drop_payload(Peer& peer, Status status, std::uint64_t serial = 0, std::string meta = {});
    bool may(Peer& peer, std::uint32_t right);
    std::string_view key_or_refuse(Peer& peer, std::uint32_t right, std::size_t offset = 0, const char* expected = "a key");
    const Session::Promise* prepared_or_refuse(Peer& peer);
    void bad_frame(Peer& peer, const char* what);
    void flush(Peer& peer);
    void sent(Peer& peer, std::size_t nbytes);
    void let_go(Peer& peer, Reply& reply);
    void complete(Peer& peer, Reply& answer, const Fetch& fetch, bool ok);
    void watch(Peer& peer);
    void close_peer(Peer& peer);
    void reap();
    void tick();
    // Runs `work` and notes an exception as an event: a failure, such as a lack of memory, must not end the node.
    template <typename Work>
    void guarded(Work work) {
        try {
            work();
        } catch (const std::exception& error) {
            note("error", 0, error.what());
        }
    }
    void end_preparation(const Session& session, const Place& place, const Preparing& preparing);
    void abort_left_alone(Session& session);
    void free_session(std::uint64_t id, Session& session);
    void take_lease_back(Lease& lease);
    void check_leases();
    void uncharge_lease(const Quotas::Owner& owner, std::uint64_t nbytes);
    std::shared_ptr<Lease> lease_of(std::uint64_t session, std::uint64_t lease) const;
    void note(std::string kind, std::uint64_t session, std::string text);
    Catalogue& objects_of(std::uint32_t tenant);
    void wake();
    // For deadlines of clients.
    Clock::time_point now() const noexcept { return time_.at(Clock::now()); }
    bool ours() const noexcept;

    const pid_t owner_;
    Settings settings_;
    File epoll_;
    File alarm_;
    Budget budget_;
    std::uint64_t lent_ = 0;
    Leases leases_;
    std::unique_ptr<Freeing> freeing_ = std::make_unique<Freeing>();
    std::unique_ptr<Nvme> shelf_;
    std::map<std::uint32_t, std::unique_ptr<Catalogue>> objects_;
    std::map<Place, Reading> readings_;  // by the extent, which is held meanwhile
    std::uint64_t numbers_ = 0;          // of connections
    std::uint64_t tickets_ = 0;
    std::unordered_map<std::uint64_t, Session> sessions_;
    Quotas quotas_{budget_};
    std::map<std::string, std::uint32_t> key_tenants_;                  // of the access keys that may come
    std::map<std::pair<std::uint32_t, std::uint64_t>, Unsent> unsent_;  // by tenant and access key
    bool room_in_lines_ = false;                                        // replies have gone for which others wait
    Endings endings_;
    Turns turns_;
    Turn turn_{0};  // the one that is being served
    std::unordered_map<int, std::unique_ptr<Peer>> peers_;
    bool has_work_ = false;    // connections have work that needs no event; only the loop's thread uses this
    std::vector<int> closed_;  // kept until the current events have been handled
    std::vector<Event> events_;
    Counts counts_;
    Tallies tallies_;
    std::vector<std::byte> scratch_;
    std::mutex mutex_;
    std::atomic<bool> stopping_{false};
    bool stopped_ = false;
    std::thread thread_;
    Clock::time_point next_tick_;  // by the system's clock, like the rounds of `time_`
    LoopTime time_{Clock::now()};
    bool postponed_ = false;  // the next tick, because of a late round
};

}  // namespace farpool
