// The sessions of a node: the pins and preparations that programs hold, and when they lose them.
//
// A session belongs to the tenant and the access key that first used it, as long as it exists. It ends some time after its last
// connection.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "node/budget.hpp"
#include "node/claims.hpp"
#include "node/client.hpp"
#include "node/deadlines.hpp"
#include "node/events.hpp"
#include "node/lending.hpp"
#include "node/quotas.hpp"
#include "node/tenants.hpp"

namespace farpool {

// A pin on the whole node: tenant, session, offset of the payload, and number of the pin in its session.
using PinId = std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint32_t>;

struct ListedPin {
    PinId id;
    std::uint64_t serial;
    std::string owner;  // name of the access key; empty if it is not known
    std::string key;    // of the object; empty if a program has damaged it
    std::uint64_t nbytes;
    std::optional<std::uint64_t> left_ms;  // until the pin ends by itself
    bool ended;                            // by an administrator
};

class Sessions {
public:
    // A publish that a session has prepared and will write into the data segment itself.
    struct Preparation {
        std::uint64_t extent;  // offset
        std::uint64_t serial;
        std::uint64_t connection;                    // its number
        std::uint64_t nbytes;                        // announced
        std::optional<Clock::time_point> left_at{};  // when that connection was closed
    };
    // Outcome of a pin: the pin's number, or why there is none.
    struct Pin {
        std::uint32_t number = 0;
        std::string refusal{};
    };
    // An access key that may connect, and its quotas.
    struct ExpectedKey {
        std::uint32_t tenant;
        Quotas::Key key;
    };
    struct KeyStats {
        std::uint32_t tenant;
        Quotas::Charges charges;
    };

    static constexpr const char* beyond_share =
        "the tenant's objects and leases that cannot be evicted would be more than its share, or pinned and kept objects more "
        "than 7/8 of it";

    Sessions(Budget& budget, Quotas& quotas, Tenants& tenants, Lending& lending, const Deadlines& deadlines, Events& events)
        : budget_(budget), quotas_(quotas), tenants_(tenants), lending_(lending), deadlines_(deadlines), events_(events) {}

    // Sets the access keys that may connect.
    void expect_keys(const std::map<std::string, ExpectedKey>& keys);
    // Statistics of these access keys, by name.
    std::map<std::string, KeyStats> keys() const;
    std::size_t size() const noexcept { return sessions_.size(); }

    // Makes the session of a connection, if it is new, and returns its owner. Throws Denied if it belongs to another one.
    Quotas::Owner bind(std::uint64_t session, std::uint32_t tenant, std::string_view key);
    // Makes a session that may have no connection yet, and returns its owner. Throws Denied if it belongs to another tenant.
    Quotas::Owner open(std::uint64_t session, std::uint32_t tenant);
    // The session that an earlier start had; for each of its leases.
    void adopt(const Lease& lease);
    // Count a connection. `refuses`: connect() throws Busy if the access key or its tenant has too many.
    void connect(std::uint64_t session, bool refuses);
    void disconnect(std::uint64_t session);
    // Ends a connection: what it has prepared stays for a while, because the program may still be writing there.
    void leave(const Client& client);

    void expose(std::uint64_t session, std::uint32_t tenant) {
        open(session, tenant);
        sessions_.at(session).exposed = true;
    }
    bool is_exposed(const Client& client) const { return sessions_.at(client.session).exposed; }
    // A descriptor, owned by the caller, of the session's own marks of visits, which count as lent. Throws Busy and Denied.
    int open_visits(std::uint64_t session, std::uint32_t tenant);

    // A lease that belongs to the session; null if there is none.
    std::shared_ptr<Lease> lease(std::uint64_t session, std::uint64_t lease) const;
    // The same, or an extent that the session has claimed, even if it may not use the extent now.
    std::shared_ptr<Lease> lease_or_extent(std::uint64_t session, std::uint64_t lease) const;
    void add_lease(std::shared_ptr<Lease> lease);
    // A lease that the session holds or has claimed, if a request that needs this right (0 for none) may use it now.
    LeaseAccess access(std::uint64_t session, std::uint64_t lease, std::uint32_t right, Clock::time_point now) const;
    // Gives up a share in a lease, or null. If the lease has ended, a thread frees its memory.
    void give_back(std::shared_ptr<Lease> lease) const { lending_.give_back(std::move(lease)); }
    // Replaces the session's claims of a pool lease.
    void claim(std::uint64_t session, const PoolLease& lease, std::vector<Claim> claims);
    // Ends the session's claim of an extent; false if it has none.
    bool release_claim(std::uint64_t session, std::uint64_t lease);
    // Ends the claims of all sessions of an extent, and returns how many there were.
    std::size_t end_claims(std::uint64_t lease);
    // The session's extents.
    std::vector<std::shared_ptr<Extent>> claimed(std::uint64_t session) const;
    // Calls `visit` with each session that has claims, and each of its claims.
    template <typename Visit>
    void each_claim(Visit visit) const {
        for (const auto& [number, session] : sessions_) {
            for (const auto& [lease, claim] : session.claims) {
                visit(number, claim);
            }
        }
    }
    // The name of an access key that may connect; empty for the owner of a node without keys, and for keys that are gone.
    std::string key_of(const Quotas::Owner& owner) const;

    // Pins an object in RAM; `ttl_ms`: for so long, 0 for no end.
    Pin pin(const Client& client, const Found& found, std::uint64_t ttl_ms);
    // Releases a pin of the payload at this offset. `number` 0 stands for any. False if there is no such pin.
    bool unpin(const Client& client, std::uint64_t payload, std::uint64_t serial, std::uint64_t number);

    // Lists at most `limit` pins that follow `after`, of one tenant or of all.
    std::vector<ListedPin> pins(std::optional<std::uint32_t> tenant, const PinId& after, std::size_t limit) const;
    // Ends the claim of a pin: it no longer counts for its access key and session. Its memory stays as it is until the program
    // releases the pin, its time is over or its session ends, because the program may read there without asking. Returns the
    // pin as it was before; empty if there is no such pin.
    std::optional<ListedPin> end_pin(const PinId& id, std::uint64_t serial, std::string_view reason);

    // Why the session may not prepare another publish; empty if it may.
    std::string preparation_refusal(const Client& client, std::uint64_t nbytes) const;
    void add_preparation(const Client& client, const Found& prepared, std::uint64_t nbytes);
    // The session's preparation of the payload at this offset; null if there is none with this serial.
    const Preparation* preparation(const Client& client, std::uint64_t payload, std::uint64_t serial) const;
    // Ends a preparation; its object stays if it was committed.
    void end_preparation(const Client& client, std::uint64_t payload);

    // Charges a publish area; returns why the session may not have it, or an empty text.
    std::string charge_area(const Client& client, std::uint64_t nbytes);
    void uncharge_area(const Client& client, std::uint64_t nbytes);

    // Ends pins whose time has passed, and everything that sessions and connections have left behind.
    void tidy();

private:
    using Place = std::pair<std::uint32_t, std::uint64_t>;                     // tenant, offset of a payload
    using PinPlace = std::tuple<std::uint32_t, std::uint64_t, std::uint32_t>;  // and the pin's number
    // Pins that have a time to live, by its end.
    using Endings = std::multimap<Clock::time_point, std::pair<std::uint64_t, PinPlace>>;
    struct Pinned {
        std::uint64_t extent;  // offset
        std::uint64_t serial;
        Endings::iterator ending;  // the end of them for a pin without an end
        bool ended = false;        // by an administrator
    };
    using Pins = std::multimap<PinPlace, Pinned>;  // numbers begin again after 2^32 pins
    struct Session {
        Quotas::Owner owner;
        std::size_t connections = 0;
        Clock::time_point empty_since{};
        Pins pins{};
        std::uint32_t last_pin = 0;
        std::map<Place, Preparation> prepared{};
        std::map<std::uint64_t, Claim> claims{};  // by the number of the extent at the node
        std::size_t areas = 0;
        bool exposed = false;  // it can write the data segment over a one-sided fabric
    };

    void note_empty(Session& session) const {
        if (session.connections == 0) {
            session.empty_since = deadlines_.now();
        }
    }
    ListedPin listed(std::uint64_t id, const Session& session, const Pins::value_type& pin) const;
    void unpin(std::uint64_t id, Session& session, Pins::iterator pin);
    void uncharge(const Session& session, const Place& place, const Preparation& preparation);
    void end_pins();
    void end_left(Session& session);
    void close(std::uint64_t id, Session& session);

    Budget& budget_;
    Quotas& quotas_;
    Tenants& tenants_;
    Lending& lending_;
    const Deadlines& deadlines_;
    Events& events_;
    std::unordered_map<std::uint64_t, Session> sessions_;
    Endings endings_;
    std::set<std::pair<std::uint32_t, std::uint64_t>> pinning_;  // tenants and sessions that have pins
    std::map<std::string, std::uint32_t> key_tenants_;           // of the access keys that may connect
    std::map<Quotas::Owner, std::string> key_names_;             // of these keys
};

}  // namespace farpool
