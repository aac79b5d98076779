// The order in which a node serves its connections: turns by tenant, then by access key, then by connection.
//
// Deficit round robin on three levels, with the lists of fq_codel (RFC 8290): flows that had no work come first, once, and all
// other flows follow one another. Each tenant, each key of a tenant and each connection of a key gets `quantum` units of work a
// round and pays for the units that it uses. If it uses more in one turn, it pays that debt in later rounds.
//
// A key or a tenant whose last connection ends keeps its debt and its place in line until its turn comes. So a client that
// connects again for each request pays as much as one that stays.
//
// This class knows units and no sockets. Only join() allocates. A turn takes constant time, apart from the rounds in which
// flows pay debts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <list>
#include <map>
#include <memory>

namespace farpool {

class Turns {
public:
    // Units of work in a turn. A unit is about the work of moving a byte.
    static constexpr std::int64_t quantum = 64 * 1024;
    // We remember so many access keys without a connection. If there are more, we forget the key that left first.
    static constexpr std::size_t remembered_max = 1024;

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

        Flow* above_;
        std::uint64_t name_;
        Line own_;              // has the one element of this flow, unless that is in a line of `above_`
        Line::iterator place_;  // that element
        Line left_{this};       // of a key: the same for `remembered_`
        Line::iterator left_place_ = left_.begin();
        Stands stands_ = Stands::nowhere;
        std::int64_t credit_ = 0;
        bool has_work_ = false;
        std::size_t joined_ = 0;   // connections below, or the connection itself
        std::size_t working_ = 0;  // flows below that have work
        Line fresh_{};             // flows below that had no work until now
        Line old_{};               // flows below that have been served since
        std::map<std::uint64_t, std::unique_ptr<Flow>> below_{};
    };

    struct Leave {
        Turns* turns;
        void operator()(Flow* flow) const noexcept { turns->leave(*flow); }
    };
    using Seat = std::unique_ptr<Flow, Leave>;

    Turns() = default;
    Turns(const Turns&) = delete;
    Turns& operator=(const Turns&) = delete;

    // Adds a connection, without work, until its seat is destroyed. No other connection of the key may have the same number.
    Seat join(std::uint32_t tenant, std::uint64_t key, std::uint64_t number);

    // Notes that a connection has work, or has none. Idempotent.
    void want(Flow& flow) noexcept;
    void rest(Flow& flow) noexcept;

    // Returns the connection whose turn it is; null if none has work. It keeps its turn until charge().
    Flow* next() noexcept;
    // Charges a connection, its key and its tenant for the units of work of a turn.
    void charge(Flow& flow, std::uint64_t units) noexcept;

    bool has_work() const noexcept { return root_.working_ > 0; }
    // True if connections of more than one access key have joined.
    bool is_shared() const noexcept { return keys_ > 1; }

private:
    void leave(Flow& flow) noexcept;
    static Flow& below(Flow& group, std::uint64_t name);
    static void stand(Flow& flow, Flow::Stands where) noexcept;
    Flow& next_below(Flow& group) noexcept;
    void remember(Flow& key) noexcept;
    void recall(Flow& key) noexcept;
    void forget(Flow& flow) noexcept;

    Flow root_{nullptr, 0};
    std::size_t keys_ = 0;     // that have connections
    Flow::Line remembered_{};  // keys that have none, in the order in which the last one left
};

}  // namespace farpool
