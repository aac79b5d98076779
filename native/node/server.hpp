// A node: the memory that it lends, the loop that serves its connections, and the control by which a program runs it.
//
// The program that controls the node (Python: listening, handshakes, leases, statistics) calls from other threads. One mutex
// guards all state. The loop holds it while it works on events, and never while it waits for them.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "node/admission.hpp"
#include "node/alarm.hpp"
#include "node/budget.hpp"
#include "node/catalogue/catalogue.hpp"
#include "node/claiming.hpp"
#include "node/events.hpp"
#include "node/lending.hpp"
#include "node/loop.hpp"
#include "node/quotas.hpp"
#include "node/refusals.hpp"
#include "node/services.hpp"
#include "node/sessions.hpp"
#include "node/tallies.hpp"
#include "node/tenants.hpp"
#include "node/unsent.hpp"

namespace farpool {

class Server {
public:
    struct Settings {
        std::string folder;
        std::uint64_t capacity;
        bool ephemeral;
        double grace;                  // seconds that a session's things outlive its last connection
        double stall;                  // seconds that a client may rest in the middle of a frame or a reply
        double spin;                   // seconds of looking for events before sleeping
        std::string shelf;             // an NVMe file for payloads that leave RAM; empty for none
        std::uint64_t shelf_capacity;  // bytes
        Budget::Shares shares{};       // bytes guaranteed to tenants
    };

    using Event = farpool::Event;
    using Busy = farpool::Busy;
    using Denied = farpool::Denied;
    using Lapsed = farpool::Lapsed;
    using Full = farpool::Full;
    using ExpectedKey = Sessions::ExpectedKey;
    using KeyStats = Sessions::KeyStats;

    struct Stats : Counts {
        std::uint64_t capacity = 0, lent = 0, used = 0, objects = 0, object_bytes = 0, evictions = 0, expired = 0, adopted = 0,
                      index_bytes = 0, connections = 0, sessions = 0, leases = 0, shelf_capacity = 0, shelf_used = 0, state = 0,
                      leaving = 0, shelf_written = 0, shelved = 0, demotions = 0, promotions = 0, backed = 0, taken = 0,
                      gets = 0, hits = 0, retained = 0, retained_bytes = 0, retained_evictions = 0;
    };

    struct TenantStats {
        std::uint64_t objects, used, backed, taken, lent, share, readers;
        Budget::Allowance allowance;
        Catalogue::Counts counts;
        Quotas::Charges charges;
        Turns::Usage usage;
    };

    explicit Server(Settings settings);
    ~Server();
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;

    void start();
    // Ends the loop and closes the connections. Idempotent. Does nothing in a child forked from the server's process.
    void stop();
    // Takes the stream over, and makes it non-blocking. A session belongs to the tenant and the access key that first used it;
    // throws Denied if they are others.
    // `latency`: the connection's class is latency, and not bulk.
    void adopt(Stream stream, std::uint64_t session, std::uint32_t tenant, std::uint32_t rights, std::string_view key,
               bool latency = false);
    // Sets the tenants that may connect; memory that one of them pins, keeps or leases leaves room for the others' shares.
    void expect_tenants(std::set<std::uint32_t> tenants);
    // Replaces what a policy gives the tenants of the node's memory; as Budget::allow(). Throws std::invalid_argument for a
    // burst below its guarantee.
    void set_memory(Budget::Allowances allowances, bool evicts);
    Budget::Allowances memory();
    void expect_keys(const std::map<std::string, ExpectedKey>& keys);
    // Sets each tenant's part of the bandwidth; a tenant that is not named has the default. Throws std::invalid_argument, and
    // then changes nothing.
    void set_bandwidth(const std::map<std::uint32_t, Bandwidth>& tenants);
    std::map<std::uint32_t, Bandwidth> bandwidth();
    // Seconds until a tenant is below its cap; 0 if it is.
    double seconds_above_cap(std::uint32_t tenant);
    // Closes all connections that were opened with this access key.
    void end_key(std::string_view key);
    // Counts a connection to the session, until disconnect(). Throws Denied, and Busy if the key or its tenant has too many.
    void connect(std::uint64_t session, std::uint32_t tenant, std::string_view key);
    void disconnect(std::uint64_t session);
    // Makes a lease and returns its id; 0 if there is no room. Throws Busy and Denied.
    std::uint64_t lend(std::uint64_t session, std::uint32_t tenant, std::uint64_t nbytes);
    bool release(std::uint64_t session, std::uint64_t lease);
    // Ids and bytes of a session's leases.
    std::vector<std::pair<std::uint64_t, std::uint64_t>> leases(std::uint64_t session);
    // Lets the session use the extents of a ticket, which the caller has verified, and makes the missing ones. Either all of
    // them or none. Throws Lapsed, Busy, Denied, and std::system_error if the system has too little memory.
    std::vector<Claiming::Claimed> claim(std::uint64_t session, std::uint32_t tenant, Ticket ticket);
    // Carries out an order, which the caller has verified; as Claiming::carry_out().
    std::vector<std::uint32_t> order(const Claiming::Order& order);
    // For an administrator; as in Claiming.
    std::vector<Claiming::Holding> holdings();
    std::optional<Claiming::Ended> end_holding(std::uint64_t lease, const std::string& reason);
    // Path of a lease's file (on an ephemeral node, the path that it would have); empty if there is no such lease.
    std::string lease_path(std::uint64_t session, std::uint64_t lease);
    ObjectPaths objects_paths(std::uint32_t tenant);
    // Descriptors, owned by the caller, of a lease (-1 if there is none) and of a tenant's index and data. The file of an
    // extent is read-only if the ticket is. Throws Lapsed and Denied if the ticket does not allow it now.
    int lease_file(std::uint64_t session, std::uint64_t lease);
    std::pair<int, int> objects_files(std::uint32_t tenant, bool writable);
    // A descriptor, owned by the caller, of the session's own marks of visits. They count as lent. Throws Busy and Denied.
    int objects_visited(std::uint64_t session, std::uint32_t tenant);
    // Notes that the session can write the data segment itself, over a one-sided fabric, and so may have places prepared there.
    void expose(std::uint64_t session, std::uint32_t tenant);
    // Lists a part of a tenant's objects, as Catalogue::list() does, for the work of one turn. `place` is 0 at first and at the
    // end.
    std::vector<Listed> list_some(std::uint32_t tenant, std::uint64_t& place, std::string_view after, std::string_view prefix,
                                  std::size_t limit);
    // Changes of a tenant's objects since a number; see Journal.
    struct Changes {
        bool lost = false;  // `since` is of another life, or the next change was forgotten: list the objects
        std::uint64_t life = 0;
        std::uint64_t next = 0;  // number from which to go on; if changes are lost, after listing the objects
        std::uint64_t left = 0;  // changes from `next` on
        std::vector<Changed> changes{};
    };
    // Reads at most `limit` changes. The first call begins the tenant's journal, whose memory counts as lent. Throws Busy.
    Changes changes(std::uint32_t tenant, std::uint64_t life, std::uint64_t since, std::size_t limit);
    // Set by an administrator, and by the node's record in the registry; see Admission.
    void set_state(NodeState state);
    void follow_record(bool draining);
    Admission admission();
    // Pins of one tenant, or of all; see Sessions.
    std::vector<ListedPin> pins(std::optional<std::uint32_t> tenant, const PinId& after, std::size_t limit);
    std::optional<ListedPin> end_pin(const PinId& id, std::uint64_t serial, std::string_view reason);
    Stats stats();
    std::map<std::uint32_t, TenantStats> tenants();
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
    void run();
    void tick();
    bool ours() const noexcept;

    const pid_t owner_;
    const Settings settings_;
    const Alarm alarm_;
    std::mutex mutex_;  // guards everything below, except the thread
    Budget budget_;
    Admission admission_;
    Deadlines deadlines_;
    Events events_;
    Tallies tallies_;
    Quotas quotas_;
    Tenants tenants_;
    Lending lending_;
    Sessions sessions_;
    Claiming claiming_;
    UnsentByKey unsent_;
    Turn turn_{0};  // the one that is being served
    Fetches fetches_;
    Services services_;
    Loop loop_;
    std::thread thread_;
    std::atomic<bool> stopping_{false};
    bool stopped_ = false;
    Ticks ticks_;
};

}  // namespace farpool
