// The order in which a node serves its connections: turns by tenant, then by access key, then by connection.
//
// Tenants. A turn costs units of work. Each tenant has a clock that runs by the units that it used, divided by its share, and
// the tenant whose clock is least is next (start-time fair queueing). So tenants that have work get parts in proportion to
// their shares. A tenant that had no work enters with the clock of the turns, so it is next, and saves nothing up. Two rates
// (bandwidth.hpp) change this order: a tenant below its guarantee comes before tenants that are not, the one that is behind by
// the longest time first; and a tenant above its cap has no turn. What a tenant gets by its guarantee counts for its clock, so
// a tenant gets its guarantee or its part by its share, whichever is more. If guarantees leave nothing, one unit in 32 goes by
// the clocks nevertheless, so that no tenant starves.
//
// Keys of a tenant, and connections of a key. Deficit round robin, with the lists of fq_codel (RFC 8290): flows that had no
// work come first, once, and all other flows follow one another. Each key and each connection gets `quantum` units of work a
// round and pays for the units that it uses. If it uses more in one turn, it pays that debt in later rounds.
//
// A connection of the latency class that had no work is urgent for one turn: it goes before all tenants and keys, if its tenant
// and its key are not more than `ahead` units ahead of their parts. If one turn was not enough, its request was not small, and
// the connection waits like others until it has had no work.
//
// A key whose last connection ends keeps its debt and its place in line until its turn comes, and a tenant keeps its clock for
// good. So a client that connects again for each request pays as much as one that stays.
//
// This class knows units and no sockets, and the time is an argument. Only join(), charge_tenant() and set_bandwidth()
// allocate. A turn takes time in proportion to the tenants that have work, apart from the rounds in which flows pay debts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "node/bandwidth.hpp"
#include "node/loop_time.hpp"
#include "node/turn.hpp"

namespace farpool {

class Turns {
public:
    // Units of work in a turn. A unit is about the work of moving a byte.
    static constexpr std::int64_t quantum = 64 * 1024;
    // The same while only one access key has connections. Long turns move more in the same time.
    static constexpr std::int64_t lone_turn = 2 * 1024 * 1024;
    // We remember so many access keys without a connection. If there are more, we forget the key that left first.
    static constexpr std::size_t remembered_max = 1024;
    // Units that urgent connections and guarantees may take in advance of a tenant's or a key's part.
    static constexpr std::int64_t ahead = 4 * quantum;
    // One unit in so many goes by shares, even while guarantees would take all.
    static constexpr std::int64_t shared_part = 32;

    // A connection's place in the order; also the groups above it, which are the key and the tenant.
    class Flow {
    public:
        // The connection's own number, as given to join().
        std::uint64_t name() const noexcept { return name_; }

        Flow(const Flow&) = delete;
        Flow& operator=(const Flow&) = delete;

    private:
        friend class Turns;
        using Line = std::list<Flow*>;
        enum class Stands { nowhere, fresh, old };

        Flow(Flow* above, std::uint64_t name) : above_(above), name_(name), own_{this}, place_(own_.begin()) {}

        Flow* above_;  // null for a tenant
        std::uint64_t name_;
        Line own_;              // has the one element of this flow, unless that is in a line of `above_`
        Line::iterator place_;  // that element
        Line left_{this};       // of a key: the same for `remembered_`
        Line::iterator left_place_ = left_.begin();
        Line hurried_{this};  // the same for `urgent_` of `above_`
        Line::iterator hurried_place_ = hurried_.begin();
        Stands stands_ = Stands::nowhere;
        std::int64_t credit_ = 0;
        bool has_work_ = false;
        bool is_latency_ = false;        // of a connection: its class
        bool is_urgent_ = false;         // of a connection: it had no work before its next turn
        std::size_t joined_ = 0;         // connections below, or the connection itself
        std::size_t working_ = 0;        // flows below that have work
        std::uint64_t rests_ = 0;        // times that it had no flows below that have work
        std::uint64_t above_rests_ = 0;  // the same of `above_`, when this flow had work last
        Line fresh_{};                   // flows below that had no work until now
        Line old_{};                     // flows below that have been served since
        Line urgent_{};                  // flows below that are urgent, or have urgent ones below, and are not too far ahead
        std::map<std::uint64_t, std::unique_ptr<Flow>> below_{};
    };

    struct Leave {
        Turns* turns;
        void operator()(Flow* flow) const noexcept { turns->leave(*flow); }
    };
    using Seat = std::unique_ptr<Flow, Leave>;

    // The work that was done for a tenant, and how long the tenant had work but no turn because of its cap.
    struct Usage {
        Work work{};
        Clock::duration throttled{};
    };

    Turns() = default;
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    // Adds a connection, without work, until its seat is destroyed. No other connection of the key may have the same number.
    Seat join(std::uint32_t tenant, std::uint64_t key, std::uint64_t number, bool latency = false);

    // Notes that a connection has work, or has none. Idempotent.
    void want(Flow& flow) noexcept;
    void rest(Flow& flow) noexcept;

    // Returns the connection whose turn it is; null if none has work, or all that have work are above their caps. The turn ends
    // with charge().
    Flow* next(Clock::time_point now) noexcept;
    // Charges a connection, its key and its tenant for the work of a turn. Call want() or rest() first.
    void charge(Flow& flow, const Work& work, Clock::time_point now) noexcept;
    // Charges a tenant for work that was done outside of turns, such as handshakes. While no connection has work, this does not
    // put the tenant behind others, and it leaves a debt of ten seconds of the tenant's cap at most.
    void charge_tenant(std::uint32_t tenant, const Work& work, Clock::time_point now);

    // Replaces the bandwidth of all tenants; a tenant that is not named has the default. Throws std::invalid_argument for a
    // bandwidth that cannot be kept, and then changes nothing.
    void set_bandwidth(const std::map<std::uint32_t, Bandwidth>& tenants, Clock::time_point now);
    // The bandwidth of the tenants that were named last.
    const std::map<std::uint32_t, Bandwidth>& bandwidth() const noexcept { return bandwidth_; }
    Usage usage(std::uint32_t tenant, Clock::time_point now) const;
    // The time from which a tenant is below its cap; `now` if it is.
    Clock::time_point below_cap_at(std::uint32_t tenant, Clock::time_point now) const;
    // The time from which a connection can have its turn; `now` if one can, and no time if none has work.
    std::optional<Clock::time_point> next_at(Clock::time_point now) noexcept;

    // True if connections of more than one access key have joined.
    bool is_shared() const noexcept { return keys_ > 1; }
    // Units that the turn of the connection that next() returned may take. A turn that is longer than a quantum takes no more
    // than is left of the tenant's cap, so that the tenant exceeds its cap by no more than it does with short turns.
    std::uint64_t turn_units(const Flow& flow) const noexcept;

private:
    struct Tenant : Flow {
        explicit Tenant(std::uint32_t number) : Flow(nullptr, number) {}

        double share_ = 1.0;
        Bucket guarantee_{}, cap_{};
        double clock_ = 0;         // units that it used, divided by its share
        bool is_served_ = false;   // since it had no work
        std::uint64_t entry_ = 0;  // its number among all tenants that entered
        bool is_throttled_ = false;
        Clock::time_point throttled_since_{};
        Usage usage_{};
    };
    // Why a tenant is next; of two tenants the one with the lesser claim is.
    enum class Reason { urgent, guarantee, early, share };
    using Claim = std::tuple<Reason, double, double, bool, std::uint64_t>;

    static const Tenant& tenant_of(const Flow& flow) noexcept;
    static Tenant& tenant_of(Flow& flow) noexcept;
    Tenant& tenant(std::uint32_t number);
    void leave(Flow& flow) noexcept;
    static Flow& below(Flow& group, std::uint64_t name);
    static void stand(Flow& flow, Flow::Stands where) noexcept;
    static void hurry(Flow& flow) noexcept;
    void enter(Tenant& tenant) noexcept;
    void quit(Tenant& tenant) noexcept;
    bool is_throttled(Tenant& tenant, Clock::time_point now) noexcept;
    void end_throttling(Tenant& tenant, Clock::time_point now) noexcept;
    Claim claim_of(Tenant& tenant, Clock::time_point now) const noexcept;
    Flow& next_below(Flow& group) noexcept;
    void charge(Tenant& tenant, const Work& work, std::optional<Reason> reason, Clock::time_point now) noexcept;
    void begin_clocks_again() noexcept;
    void remember(Flow& key) noexcept;
    void recall(Flow& key) noexcept;
    void forget(Flow& key) noexcept;

    std::map<std::uint32_t, std::unique_ptr<Tenant>> tenants_;
    std::map<std::uint32_t, Bandwidth> bandwidth_;
    std::vector<Tenant*> working_;  // tenants that have work
    double clock_ = 0;              // of the last tenant that was next by its clock
    std::uint64_t entries_ = 0;
    // Units that go by shares before the next guarantee does, if they are a quantum. Below zero: urgent connections of tenants
    // that are not below a guarantee had these.
    std::int64_t owed_ = 0;
    Flow* chosen_ = nullptr;
    Reason reason_ = Reason::share;  // for which it was chosen
    Clock::time_point now_{};        // of the last call of next() or next_at()
    std::size_t keys_ = 0;           // that have connections
    Flow::Line remembered_{};        // keys that have none, in the order in which the last one left
};

}  // namespace farpool
