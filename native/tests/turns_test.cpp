// Turns by tenant, key and connection: the part of each in the work, rates, and how long an idle connection waits.
#include "node/turns.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "tests/testing.hpp"

using farpool::Bandwidth;
using farpool::Bucket;
using farpool::Turns;
using farpool::Work;

namespace {

using Time = farpool::Clock::time_point;
using Policy = std::map<std::uint32_t, Bandwidth>;

constexpr std::uint64_t quantum = Turns::quantum;
constexpr double capacity = 1e9;  // units a second: a unit takes a nanosecond

Work other(std::uint64_t units) { return Work{0, 0, units}; }

// Connections that always have work, and the units that each of them has used.
struct Busy {
    explicit Busy(unsigned seed) : random(seed) {}

    void add(std::uint32_t tenant, std::uint64_t key, std::size_t count, bool latency = false) {
        for (std::size_t number = 0; number < count; ++number) {
            seats.push_back(turns.join(tenant, key, ++numbers, latency));
            turns.want(*seats.back());
            tenant_of[numbers] = tenant;
            key_of[numbers] = key;
        }
    }
    Turns::Flow* next() { return turns.next(now); }
    void charge(Turns::Flow& flow, std::uint64_t units) {
        turns.charge(flow, other(units), now);
        now += std::chrono::nanoseconds(units);
    }
    // Serves one turn, of random cost that may exceed a quantum; returns the connection. Sleeps before if all are capped.
    std::uint64_t serve() {
        Turns::Flow* flow = next();
        if (flow == nullptr) {
            const auto at = turns.next_at(now);
            CHECK(at && *at > now);
            now = *at;
            flow = next();
        }
        CHECK(flow != nullptr);
        const std::uint64_t units = 1 + random() % most;
        charge(*flow, units);
        used[flow->name()] += units;
        of_tenants[tenant_of[flow->name()]] += units;
        of_keys[key_of[flow->name()]] += units;
        return flow->name();
    }

    static constexpr std::uint64_t most = 3 * quantum / 2;
    std::mt19937 random;
    Time now{std::chrono::hours(1)};
    Turns turns;
    std::vector<Turns::Seat> seats;
    std::uint64_t numbers = 0;
    std::map<std::uint64_t, std::uint32_t> tenant_of;
    std::map<std::uint64_t, std::uint64_t> key_of, used, of_keys;
    std::map<std::uint32_t, std::uint64_t> of_tenants;
};

template <typename Used>
std::uint64_t spread(const Used& used) {
    const auto [least, most] =
        std::minmax_element(used.begin(), used.end(), [](auto& a, auto& b) { return a.second < b.second; });
    return most->second - least->second;
}

}  // namespace

TEST("tenants have equal parts, then keys, then connections, however many there are") {
    for (unsigned seed = 0; seed < 20; ++seed) {
        Busy busy(seed);
        busy.add(1, 10, 16);
        busy.add(1, 11, 1);
        busy.add(2, 20, 1);
        busy.add(3, 30, 3);
        for (int turn = 0; turn < 4000; ++turn) {
            busy.serve();
        }
        constexpr std::uint64_t bound = 3 * (quantum + Busy::most);
        CHECK(busy.of_tenants.size() == 3 && spread(busy.of_tenants) <= bound);
        const std::uint64_t first = busy.of_keys.at(10);
        const std::uint64_t second = busy.of_keys.at(11);
        CHECK(std::max(first, second) - std::min(first, second) <= bound);
        std::map<std::uint64_t, std::uint64_t> of_key;
        for (const auto& [number, units] : busy.used) {
            if (busy.key_of[number] == 10) {
                of_key[number] = units;
            }
        }
        CHECK(of_key.size() == 16 && spread(of_key) <= bound);
    }
}

TEST("a flow that had no work is next, at each level") {
    Busy busy(7);
    busy.add(1, 10, 64);
    const Turns::Seat idle = busy.turns.join(2, 20, 1000);
    const Turns::Seat idle_key = busy.turns.join(1, 11, 1001);
    const Turns::Seat idle_connection = busy.turns.join(1, 10, 1002);
    for (int round = 0; round < 50; ++round) {
        for (const Turns::Seat* seat : {&idle, &idle_key, &idle_connection}) {
            for (int turn = 0; turn < 300; ++turn) {  // until its place in line is given up
                busy.serve();
            }
            busy.turns.want(**seat);
            // A group above it that is being served keeps its turn, so others of this group may be first once.
            int others = 0;
            for (; busy.serve() != (*seat)->name(); ++others) {
            }
            CHECK(others <= (seat == &idle ? 0 : 2));
            busy.turns.rest(**seat);
        }
    }
}

TEST("a connection that asks again and again waits for a quantum of each other tenant, no more") {
    Busy busy(3);
    busy.add(1, 10, 64);
    busy.add(2, 20, 64);
    const Turns::Seat victim = busy.turns.join(3, 30, 1000);
    for (int request = 0; request < 2000; ++request) {
        busy.turns.want(*victim);
        std::uint64_t waited = 0;
        for (Turns::Flow* next = busy.next(); next != victim.get(); next = busy.next()) {
            waited += quantum / 4;
            busy.charge(*next, quantum / 4);
        }
        CHECK(waited <= 2 * (quantum + quantum / 4));
        busy.charge(*victim, quantum / 10);
        busy.turns.rest(*victim);
        for (unsigned turn = busy.random() % 12; turn > 0; --turn) {
            busy.serve();
        }
    }
}

TEST("an idle connection saves nothing up, and one that pauses after each large turn gains nothing") {
    Busy busy(5);
    busy.add(1, 10, 1);
    const Turns::Seat other = busy.turns.join(2, 20, 1000);
    for (int turn = 0; turn < 1000; ++turn) {
        busy.serve();
    }
    std::uint64_t began = busy.of_tenants[1];
    std::uint64_t of_other = 0;
    for (int turn = 0; turn < 2000; ++turn) {
        busy.turns.want(*other);
        if (busy.next() == other.get()) {
            busy.charge(*other, 5 * quantum);
            of_other += 5 * quantum;
            busy.turns.rest(*other);
        } else {
            busy.serve();
        }
    }
    began = busy.of_tenants[1] - began;
    CHECK(of_other <= began + 7 * quantum);
    CHECK(began <= of_other + 7 * quantum);
}

TEST("a client that connects again for each large request pays for it, against another tenant and another key") {
    for (const bool same_tenant : {false, true}) {
        Busy busy(5);
        busy.add(1, 10, 1);
        Turns::Seat other;
        std::uint64_t of_other = 0;
        for (std::uint64_t turn = 0; turn < 2000; ++turn) {
            if (other == nullptr) {
                other = busy.turns.join(same_tenant ? 1 : 2, 20, 1000 + turn);
                busy.turns.want(*other);
            }
            if (busy.next() == other.get()) {
                busy.charge(*other, 5 * quantum);
                of_other += 5 * quantum;
                other.reset();
            } else {
                busy.serve();
            }
        }
        const std::uint64_t began = busy.of_keys[10];
        CHECK(of_other <= began + 7 * quantum);
        CHECK(began <= of_other + 7 * quantum);
    }
}

TEST("a key that has paid its debt without a connection is first again when it is back") {
    Busy busy(5);
    busy.add(1, 10, 1);
    busy.serve();
    busy.serve();
    for (std::uint64_t round = 0; round < 20; ++round) {
        Turns::Seat other = busy.turns.join(2, 20, 1000 + round);
        busy.turns.want(*other);
        CHECK(busy.next() == other.get());
        busy.charge(*other, 3 * quantum);
        other.reset();
        for (int turn = 0; turn < 20; ++turn) {
            busy.serve();
        }
    }
}

TEST("of the keys that were left a bounded number is remembered, those that were left last") {
    for (const bool same_tenant : {false, true}) {
        Busy busy(5);
        busy.add(1, 1, 1);
        busy.serve();
        busy.serve();
        constexpr std::uint64_t count = Turns::remembered_max + 1;
        const auto joined = [&](std::uint64_t number) {
            const std::uint64_t key = 100 + number;
            Turns::Seat seat = busy.turns.join(same_tenant ? 1 : static_cast<std::uint32_t>(key), key, key);
            busy.turns.want(*seat);
            return seat;
        };
        for (std::uint64_t number = 0; number < count; ++number) {
            const Turns::Seat seat = joined(number);
            CHECK(busy.next() == seat.get());
            busy.charge(*seat, 1000 * quantum);
        }
        const auto waits = [&](std::uint64_t number) {
            const Turns::Seat seat = joined(number);
            return busy.next() != seat.get();
        };
        for (const std::uint64_t number : {std::uint64_t{1}, count / 2, count - 1}) {
            CHECK(waits(number));
        }
        // Of the key that left first only the tenant's debt is left, if it was the tenant's own.
        CHECK_EQUAL(waits(0), !same_tenant);
    }
}

TEST("only connections with work are served, through random arrivals, pauses and ends") {
    for (unsigned seed = 0; seed < 30; ++seed) {
        std::mt19937 random(seed);
        const Time now{};
        Turns turns;
        std::map<std::uint64_t, Turns::Seat> seats;
        std::map<std::uint64_t, std::uint64_t> key_of;
        std::set<std::uint64_t> working;
        for (std::uint64_t act = 0; act < 5000; ++act) {
            const std::uint64_t some = seats.empty() ? 0 : std::next(seats.begin(), random() % seats.size())->first;
            switch (random() % 6) {
                case 0:
                    if (seats.size() < 40) {
                        key_of[act] = random() % 6;
                        seats.emplace(act, turns.join(static_cast<std::uint32_t>(key_of[act] % 3), key_of[act], act));
                    }
                    break;
                case 1:
                    if (some != 0 && random() % 4 == 0) {
                        seats.erase(some);
                        key_of.erase(some);
                        working.erase(some);
                    }
                    break;
                case 2:
                    if (some != 0) {
                        turns.want(*seats.at(some));
                        working.insert(some);
                    }
                    break;
                case 3:
                    if (some != 0) {
                        turns.rest(*seats.at(some));
                        working.erase(some);
                    }
                    break;
                default:
                    Turns::Flow* const next = turns.next(now);
                    CHECK_EQUAL(next == nullptr, working.empty());
                    if (next != nullptr) {
                        CHECK(working.contains(next->name()));
                        turns.charge(*next, other(random() % (4 * quantum)), now);
                    }
            }
            std::set<std::uint64_t> keys;
            for (const auto& [number, key] : key_of) {
                keys.insert(key);
            }
            CHECK_EQUAL(turns.is_shared(), keys.size() > 1);
            CHECK_EQUAL(turns.next_at(now).has_value(), !working.empty());
        }
    }
}

TEST("tenants have parts in proportion to their shares, to a turn of each") {
    for (unsigned seed = 0; seed < 20; ++seed) {
        Busy busy(seed);
        Policy policy;
        for (std::uint32_t tenant = 1; tenant <= 6; ++tenant) {
            busy.add(tenant, tenant, 1 + busy.random() % 20);
            if (tenant > 1) {  // the first one has the default
                policy[tenant].share = std::exp2(static_cast<double>(busy.random() % 1000) / 100 - 5);
            }
        }
        busy.turns.set_bandwidth(policy, busy.now);
        CHECK(busy.turns.bandwidth() == policy);
        for (int turn = 0; turn < 5000; ++turn) {
            busy.serve();
        }
        for (const auto& [one, units] : busy.of_tenants) {
            for (const auto& [another, others] : busy.of_tenants) {
                const double difference =
                    static_cast<double>(units) / policy[one].share - static_cast<double>(others) / policy[another].share;
                CHECK(difference <= Busy::most / policy[one].share + Busy::most / policy[another].share);
            }
        }
    }
}

TEST("a tenant with 64 connections and one with one have the same units, to two turns") {
    Busy busy(1);
    busy.add(1, 10, 64);
    busy.add(2, 20, 1);
    for (int turn = 0; turn < 5000; ++turn) {
        busy.serve();
        CHECK(turn == 0 || spread(busy.of_tenants) <= 2 * Busy::most);
    }
}

// The rates that tenants have in the long run: the part by the share, but at least the guarantee and at most the cap.
std::map<std::uint32_t, double> expected_rates(const Policy& policy) {
    const auto rate = [](const Bandwidth& one, double level) {
        const double wanted = std::max(level * one.share, static_cast<double>(one.guarantee));
        return one.cap == 0 ? wanted : std::min(wanted, static_cast<double>(one.cap));
    };
    double low = 0, high = 1e15;
    for (int halving = 0; halving < 200; ++halving) {
        const double level = (low + high) / 2;
        double sum = 0;
        for (const auto& [tenant, one] : policy) {
            sum += rate(one, level);
        }
        (sum < capacity ? low : high) = level;
    }
    std::map<std::uint32_t, double> rates;
    for (const auto& [tenant, one] : policy) {
        rates[tenant] = rate(one, low);
    }
    return rates;
}

TEST("each tenant has its guarantee or the part of its share, whichever is more, and its cap at most") {
    for (unsigned seed = 0; seed < 40; ++seed) {
        Busy busy(seed);
        Policy policy;
        double left = 0.9 * capacity;  // to guarantee
        for (std::uint32_t tenant = 1; tenant <= 5; ++tenant) {
            busy.add(tenant, tenant, 1 + busy.random() % 8);
            Bandwidth& one = policy[tenant];
            one.share = std::exp2(static_cast<double>(busy.random() % 600) / 100 - 3);
            if (busy.random() % 2 == 0) {
                one.guarantee = static_cast<std::uint64_t>(left * static_cast<double>(busy.random() % 100) / 100);
                left -= static_cast<double>(one.guarantee);
            }
            if (busy.random() % 3 == 0) {
                one.cap = std::max<std::uint64_t>(one.guarantee, 10'000'000 + busy.random() % 300'000'000);
            }
        }
        busy.turns.set_bandwidth(policy, busy.now);
        for (int turn = 0; turn < 5000; ++turn) {  // until no bucket is full from the beginning
            busy.serve();
        }
        busy.of_tenants.clear();
        const Time begun = busy.now;
        for (int turn = 0; turn < 40'000; ++turn) {
            busy.serve();
        }
        const double seconds = std::chrono::duration<double>(busy.now - begun).count();
        for (const auto& [tenant, rate] : expected_rates(policy)) {
            const double got = static_cast<double>(busy.of_tenants[tenant]) / seconds;
            CHECK(std::abs(got - rate) <= 0.01 * rate + 0.002 * capacity);
        }
    }
}

// The largest excess of what a tenant had over a rate, over all intervals.
class Excess {
public:
    explicit Excess(double rate) : rate_(rate) {}
    // Units that were charged at a time, which does not fall.
    void add(Time at, std::uint64_t units) {
        const double ahead = used_ - rate_ * std::chrono::duration<double>(at.time_since_epoch()).count();
        least_ = std::min(least_, ahead);
        used_ += static_cast<double>(units);
        most_ = std::max(most_, ahead + static_cast<double>(units) - least_);
    }
    double most() const { return most_; }

private:
    double rate_, used_ = 0, most_ = 0;
    double least_ = 1e300;
};

double depth(double rate) { return std::max(Bucket::least, rate * std::chrono::duration<double>(Bucket::filled_in).count()); }

TEST("over any time a tenant has its cap, 20 ms of it and a turn at most, in turns and outside of them") {
    for (unsigned seed = 0; seed < 20; ++seed) {
        Busy busy(seed);
        const std::uint64_t cap = 1'000'000 + busy.random() % 400'000'000;
        busy.add(1, 10, 4);
        busy.add(2, 20, 1);
        busy.turns.set_bandwidth({{1, {1.0, cap / 2, cap}}}, busy.now);
        Excess excess(static_cast<double>(cap));
        for (int turn = 0; turn < 20'000; ++turn) {
            if (busy.random() % 50 == 0) {
                busy.turns.rest(*busy.seats.back());
            } else if (busy.random() % 20 == 0) {
                busy.turns.want(*busy.seats.back());
            }
            if (busy.random() % 500 == 0) {
                busy.now += std::chrono::microseconds(busy.random() % 50'000);  // the node stands still
            }
            if (busy.turns.below_cap_at(1, busy.now) == busy.now && busy.random() % 8 == 0) {
                const std::uint64_t units = busy.random() % quantum;
                busy.turns.charge_tenant(1, other(units), busy.now);
                excess.add(busy.now, units);
            }
            if (busy.turns.next_at(busy.now) == busy.now) {
                Turns::Flow* const next = busy.next();
                const std::uint64_t units = 1 + busy.random() % Busy::most;
                if (busy.tenant_of[next->name()] == 1) {
                    excess.add(busy.now, units);
                }
                busy.charge(*next, units);
            } else {
                busy.now = busy.turns.next_at(busy.now).value_or(busy.now + std::chrono::milliseconds(1));
            }
        }
        CHECK(excess.most() <= depth(static_cast<double>(cap)) + Busy::most + 1);
        CHECK(excess.most() > 0);
    }
}

TEST("a tenant alone has long turns, as far as its cap allows") {
    Busy busy(0);
    busy.add(1, 1, 1);
    const auto units = [&] { return busy.turns.turn_units(*busy.next()); };
    constexpr auto lone = static_cast<std::uint64_t>(Turns::lone_turn);
    CHECK_EQUAL(units(), lone);
    busy.turns.set_bandwidth({{1, {1.0, 0, std::uint64_t{1} << 40}}}, busy.now);
    CHECK_EQUAL(units(), lone);
    // A cap that gives 1 MB in the time for which it is filled: turns end with it, but not before a quantum.
    busy.turns.set_bandwidth({{1, {1.0, 0, 50'000'000}}}, busy.now);
    CHECK_EQUAL(units(), std::uint64_t{1'000'000});
    busy.turns.charge(*busy.next(), other(700'000), busy.now);
    CHECK_EQUAL(units(), std::uint64_t{300'000});
    busy.turns.charge(*busy.next(), other(299'999), busy.now);
    CHECK_EQUAL(units(), quantum);
    busy.add(2, 2, 1);
    busy.turns.set_bandwidth({}, busy.now);
    CHECK_EQUAL(units(), quantum);
}

TEST("over any time a tenant has its cap, 20 ms of it and a quantum, if its turns are as long as they may be") {
    for (const std::uint64_t cap : {1'000'000, 50'000'000, 400'000'000}) {
        Busy busy(0);
        busy.add(1, 1, 2);
        busy.turns.set_bandwidth({{1, {1.0, 0, cap}}}, busy.now);
        Excess excess(static_cast<double>(cap));
        for (int turn = 0; turn < 5000; ++turn) {
            Turns::Flow* flow = busy.next();
            if (flow == nullptr) {
                busy.now = busy.turns.next_at(busy.now).value();
                flow = busy.next();
            }
            const std::uint64_t units = busy.turns.turn_units(*flow);
            excess.add(busy.now, units);
            busy.charge(*flow, units);
        }
        CHECK(excess.most() <= depth(static_cast<double>(cap)) + static_cast<double>(quantum) + 1);
    }
}

TEST("a cap counts bytes of both directions, and other work if that is more") {
    for (const Work& work :
         {Work{1000, 99'000, 5000}, Work{60'000, 40'000, 100'000}, Work{0, 0, 100'000}, Work{10, 20, 100'000}}) {
        Busy busy(1);
        busy.add(1, 10, 1);
        busy.turns.set_bandwidth({{1, {1.0, 0, 10'000'000}}}, busy.now);
        const Time begun = busy.now;
        std::uint64_t turns = 0;
        while (busy.now < begun + std::chrono::seconds(1)) {
            Turns::Flow* const next = busy.next();
            if (next == nullptr) {
                busy.now = *busy.turns.next_at(busy.now);
                continue;
            }
            busy.turns.charge(*next, work, busy.now);
            ++turns;
        }
        // 100 turns, as many as a full bucket has, and one that may exceed it
        CHECK(turns >= 100 && turns <= 104);
        const Turns::Usage usage = busy.turns.usage(1, busy.now);
        CHECK_EQUAL(usage.work.bytes_in, turns * work.bytes_in);
        CHECK_EQUAL(usage.work.bytes_out, turns * work.bytes_out);
        CHECK_EQUAL(usage.work.other, turns * work.other);
        // no turn takes time here, so the tenant was throttled all the time
        CHECK(usage.throttled >= std::chrono::milliseconds(990) && usage.throttled <= std::chrono::milliseconds(1020));
    }
}

TEST("a tenant that has work has its guarantee over any time, whatever others do, if guarantees are 15/16 of the node") {
    for (unsigned seed = 0; seed < 20; ++seed) {
        Busy busy(seed);
        Policy policy;
        std::uint64_t left = static_cast<std::uint64_t>(capacity) / 16 * 15;
        const std::uint64_t guarantee = 20'000'000 + busy.random() % (left / 2);
        left -= guarantee;
        policy[1] = {1.0 / 64, guarantee, 0};
        busy.add(1, 10, 1 + busy.random() % 3);
        for (std::uint32_t tenant = 2; tenant <= 6; ++tenant) {
            const std::uint64_t some = tenant == 6 ? left : busy.random() % left;
            left -= some;
            policy[tenant] = {std::exp2(static_cast<double>(busy.random() % 8)), some, 0};
            busy.add(tenant, 10 * tenant, 4, tenant % 2 == 0);
        }
        busy.add(7, 70, 64);  // without a guarantee
        busy.turns.set_bandwidth(policy, busy.now);
        const double rate = static_cast<double>(guarantee);
        double most_ahead = 0, worst_lag = 0, got = 0;
        const Time begun = busy.now;
        for (int turn = 0; turn < 30'000; ++turn) {
            for (int change = 0; change < 3; ++change) {  // others come and go
                const Turns::Seat& seat = busy.seats[3 + busy.random() % (busy.seats.size() - 3)];
                if (busy.tenant_of[seat->name()] != 1) {
                    busy.random() % 2 == 0 ? busy.turns.want(*seat) : busy.turns.rest(*seat);
                }
            }
            const std::uint64_t before = busy.of_tenants[1];
            busy.serve();
            got += static_cast<double>(busy.of_tenants[1] - before);
            const double ahead = got - rate * std::chrono::duration<double>(busy.now - begun).count();
            most_ahead = std::max(most_ahead, ahead);
            worst_lag = std::max(worst_lag, most_ahead - ahead);
        }
        const double fair = rate * std::chrono::duration<double>(busy.now - begun).count();
        CHECK(got >= fair - depth(rate));
        // What it got beyond its guarantee is not held against it.
        CHECK(got > fair || worst_lag <= depth(rate));
    }
}

TEST("no tenant and no connection starves, also if guarantees are twice what the node can do") {
    for (unsigned seed = 0; seed < 10; ++seed) {
        Busy busy(seed);
        Policy policy;
        for (std::uint32_t tenant = 1; tenant <= 4; ++tenant) {
            policy[tenant] = {1.0, static_cast<std::uint64_t>(capacity / 2), 0};
            busy.add(tenant, tenant, 2, tenant == 1);
        }
        busy.add(5, 50, 3);
        busy.add(5, 51, 1);
        busy.turns.set_bandwidth(policy, busy.now);
        std::map<std::uint64_t, int> last;
        for (int turn = 0; turn < 20'000; ++turn) {
            last[busy.serve()] = turn;
            for (std::uint64_t number = 1; number <= busy.numbers; ++number) {
                CHECK(turn - last[number] < 2000);
            }
        }
        for (std::uint32_t tenant = 1; tenant <= 5; ++tenant) {
            CHECK(busy.of_tenants[tenant] * 200 > busy.of_tenants[1]);
        }
    }
}

TEST("a small request of the latency class is next, before busy tenants, busy connections of its tenant and guarantees") {
    Busy busy(9);
    busy.turns.set_bandwidth({{3, {1.0, 100'000'000, 0}}}, busy.now);
    busy.add(1, 10, 64);
    busy.add(2, 20, 64);
    busy.add(3, 30, 2);
    const Turns::Seat urgent = busy.turns.join(1, 11, 1000, true);
    const Turns::Seat another = busy.turns.join(1, 12, 1001, true);
    const Turns::Seat bulk = busy.turns.join(1, 13, 1002);
    int delayed = 0;
    for (int request = 0; request < 1000; ++request) {
        for (int turn = 0; turn < 30; ++turn) {
            busy.serve();
        }
        busy.turns.want(*bulk);
        busy.turns.want(*urgent);
        busy.turns.want(*another);
        CHECK(busy.next() == urgent.get());
        busy.turns.rest(*urgent);
        busy.charge(*urgent, quantum / 4);
        CHECK(busy.next() == another.get());
        busy.turns.rest(*another);
        busy.charge(*another, quantum / 4);
        delayed += busy.next() != bulk.get() ? 1 : 0;
        busy.turns.rest(*bulk);
    }
    CHECK(delayed > 900);
}

TEST("a request of the latency class that needs more than a turn waits like others") {
    Busy busy(9);
    busy.add(1, 10, 8);
    busy.add(2, 20, 8);
    const Turns::Seat large = busy.turns.join(1, 11, 1000, true);
    for (int turn = 0; turn < 100; ++turn) {
        busy.serve();
    }
    busy.turns.want(*large);
    CHECK(busy.next() == large.get());
    busy.charge(*large, quantum / 2);  // it still has work
    CHECK(busy.next() != large.get());
    for (int turn = 0; turn < 100; ++turn) {
        busy.serve();
    }
    CHECK(busy.used[1000] > 0);  // in its turn
    busy.turns.rest(*large);
    for (int turn = 0; turn < 100; ++turn) {
        busy.serve();
    }
    busy.turns.want(*large);
    CHECK(busy.next() == large.get());
}

TEST("the latency class takes no more than the part of its tenant, and of its key in the tenant") {
    for (const bool same_tenant : {false, true}) {
        Busy busy(4);
        busy.add(1, 10, 4);
        std::vector<Turns::Seat> flood;
        for (std::uint64_t number = 0; number < 50; ++number) {
            // A tenant is bounded as a whole, also with many keys.
            flood.push_back(busy.turns.join(same_tenant ? 1 : 2, same_tenant ? 20 : 20 + number, 1000 + number, true));
        }
        std::uint64_t of_flood = 0;
        for (int turn = 0; turn < 20'000; ++turn) {
            for (const Turns::Seat& seat : flood) {
                busy.turns.want(*seat);
            }
            Turns::Flow* const next = busy.next();
            if (next->name() < 1000) {
                const std::uint64_t units = 1 + busy.random() % Busy::most;
                busy.charge(*next, units);
                busy.of_keys[10] += units;
                continue;
            }
            busy.turns.rest(*next);  // each request is small
            busy.charge(*next, quantum / 4);
            of_flood += quantum / 4;
            const std::uint64_t bulk = busy.of_keys[10];
            CHECK(of_flood <= bulk + Turns::ahead + 2 * Busy::most);
            CHECK(bulk <= of_flood + Turns::ahead + 2 * Busy::most);
        }
    }
}

TEST("latency keys of a tenant take turns") {
    Busy busy(4);
    busy.add(1, 10, 4);
    std::vector<Turns::Seat> seats;
    for (std::uint64_t number = 0; number < 6; ++number) {
        seats.push_back(busy.turns.join(1, number < 5 ? 20 : 21, 1000 + number, true));
    }
    for (const Turns::Seat& seat : seats) {
        busy.turns.want(*seat);
    }
    for (const std::uint64_t expected : {1000, 1005, 1001}) {
        Turns::Flow* const next = busy.next();
        CHECK_EQUAL(next->name(), expected);
        busy.turns.rest(*next);
        busy.charge(*next, quantum / 16);
    }
}

// Takes both tenants' bandwidths away: from then on they must have equal parts.
void check_equal_after(Busy& busy) {
    busy.turns.set_bandwidth({}, busy.now);
    busy.of_tenants.clear();
    for (int turn = 0; turn < 500; ++turn) {
        busy.serve();
    }
    CHECK(busy.of_tenants.size() == 2 && spread(busy.of_tenants) <= 2 * Busy::most + Turns::ahead);
}

TEST("a tenant that was throttled saves nothing up, and one that had much by its guarantee owes nothing") {
    for (const Bandwidth& before : {Bandwidth{1.0, 0, 1'000'000}, Bandwidth{1.0, 900'000'000, 0}}) {
        Busy busy(2);
        busy.add(1, 10, 1);
        busy.add(2, 20, 1);
        busy.turns.set_bandwidth({{1, before}}, busy.now);
        for (int turn = 0; turn < 5000; ++turn) {
            busy.serve();
        }
        check_equal_after(busy);
    }
}

TEST("what a tenant had in addition to its guarantee is not held against it for longer than its bucket takes to fill") {
    Busy busy(2);
    busy.add(1, 10, 1);
    busy.turns.set_bandwidth({{1, {1.0 / 64, 100'000'000, 0}}}, busy.now);
    for (int turn = 0; turn < 20'000; ++turn) {  // a second, alone
        busy.serve();
    }
    busy.add(2, 20, 1);
    busy.of_tenants.clear();
    const Time begun = busy.now;
    while (busy.now < begun + std::chrono::milliseconds(200)) {
        busy.serve();
    }
    CHECK(static_cast<double>(busy.of_tenants[1]) >= 100'000'000 * 0.2 - 2 * depth(100'000'000));
}

TEST("what a tenant did outside of turns while no connection had work is not held against it") {
    Busy busy(2);
    const Turns::Seat first = busy.turns.join(1, 10, 1000);
    const Turns::Seat second = busy.turns.join(2, 20, 1001);
    for (int handshake = 0; handshake < 100'000; ++handshake) {  // for example of a program that asks for counters
        busy.turns.charge_tenant(1, other(farpool::work::handshake), busy.now);
    }
    busy.turns.want(*first);
    busy.turns.want(*second);
    std::map<std::uint64_t, int> turns;
    for (int turn = 0; turn < 100; ++turn) {
        Turns::Flow* const next = busy.next();
        ++turns[next->name()];
        busy.charge(*next, quantum);
    }
    CHECK(turns[1000] >= 49 && turns[1001] >= 49);
    // Next to others that have work, it counts.
    for (int handshake = 0; handshake < 100; ++handshake) {
        busy.turns.charge_tenant(1, other(farpool::work::handshake), busy.now);
    }
    turns.clear();
    for (int turn = 0; turn < 100; ++turn) {
        Turns::Flow* const next = busy.next();
        ++turns[next->name()];
        busy.charge(*next, quantum);
    }
    CHECK(turns[1000] <= 1);
}

TEST("work outside of turns keeps a tenant from its cap for ten seconds at most") {
    Busy busy(2);
    busy.add(1, 10, 1);
    busy.turns.set_bandwidth({{1, {1.0, 0, 1'000'000}}}, busy.now);
    for (int handshake = 0; handshake < 100'000; ++handshake) {  // for a day
        busy.turns.charge_tenant(1, other(farpool::work::handshake), busy.now);
        busy.now += std::chrono::seconds(1);
        if (handshake % 10'000 == 0) {
            CHECK(busy.turns.below_cap_at(1, busy.now) <= busy.now + std::chrono::seconds(10));
        }
    }
    busy.turns.charge_tenant(1, other(100'000'000), busy.now);
    CHECK(busy.next() == nullptr);
    busy.now += std::chrono::seconds(10);
    CHECK(busy.next() != nullptr);
    // What a turn has moved is paid in full.
    busy.charge(*busy.next(), 20'000'000);
    CHECK(busy.turns.below_cap_at(1, busy.now) > busy.now + std::chrono::seconds(19));
}

TEST("shares hold after months of work: clocks stay exact") {
    for (const double share : {1.0, 1024.0, 1024.0 * 1024}) {
        Busy busy(2);
        for (int month = 0; month < 3; ++month) {
            busy.turns.charge_tenant(1, other(std::uint64_t{1} << 57), busy.now);
        }
        busy.add(1, 10, 1);
        busy.turns.charge(*busy.next(), other(1), busy.now);
        busy.turns.set_bandwidth({{2, {share, 0, 0}}}, busy.now);
        busy.add(2, 20, 1);
        constexpr std::uint64_t least = farpool::work::call;
        const int all = static_cast<int>(std::min(share, 4096.0)) * 4;
        std::map<std::uint32_t, int> turns;
        for (int turn = 0; turn < all; ++turn) {
            Turns::Flow* const next = busy.next();
            const std::uint32_t tenant = busy.tenant_of[next->name()];
            ++turns[tenant];
            // With the largest share, the other tenant's turns are small, so that the test is short.
            busy.turns.charge(*next, other(tenant == 1 && share > 4096 ? least / 256 : least), busy.now);
        }
        const double expected = share > 4096 ? all / 4097.0 : all / (share + 1);
        CHECK(turns[1] >= expected - 1 && turns[1] <= expected + 2);
    }
}

TEST("a bandwidth that cannot be kept is refused, and nothing changes") {
    Busy busy(1);
    const Policy before = {{1, {2.0, 10, 100'000}}};
    busy.turns.set_bandwidth(before, busy.now);
    const double nan = std::nan("");
    for (const Bandwidth& wrong : {Bandwidth{0, 0, 0}, Bandwidth{-1, 0, 0}, Bandwidth{nan, 0, 0}, Bandwidth{1e-9, 0, 0},
                                   Bandwidth{1e9, 0, 0}, Bandwidth{1, 0, 1000}, Bandwidth{1, 200'000, 100'000}}) {
        bool refused = false;
        try {
            busy.turns.set_bandwidth({{1, {3.0, 0, 0}}, {2, wrong}}, busy.now);
        } catch (const std::invalid_argument& error) {
            refused = std::string(error.what()).find("tenant 2") != std::string::npos;
        }
        CHECK(refused);
        CHECK(busy.turns.bandwidth() == before);
    }
}

TEST("a new bandwidth holds from then on: debts stay units, and a tenant that is not named has no cap") {
    Busy busy(1);
    busy.add(1, 10, 1);
    busy.turns.set_bandwidth({{1, {1.0, 0, 1'000'000}}}, busy.now);
    Turns::Flow* const flow = busy.next();
    busy.turns.charge(*flow, other(Bucket::least + 1'000'000), busy.now);
    CHECK(busy.next() == nullptr);
    CHECK(busy.turns.below_cap_at(1, busy.now) == busy.now + std::chrono::seconds(1));
    busy.turns.set_bandwidth({{1, {1.0, 0, 10'000'000}}}, busy.now);
    CHECK(busy.turns.next_at(busy.now) == busy.now + std::chrono::milliseconds(100));
    busy.turns.set_bandwidth({}, busy.now);
    CHECK(busy.next() == flow);
    busy.turns.set_bandwidth({{1, {1.0, 0, 1'000'000}}}, busy.now);
    CHECK(busy.next() == flow);  // a cap begins with a full bucket
}

namespace {

// Connections that come and go, and have work or not, under bandwidths that change; with checks after each turn.
class Changing {
public:
    explicit Changing(unsigned seed) : busy_(seed) {}

    void act() {
        const std::uint64_t some = seats_.empty() ? 0 : std::next(seats_.begin(), below(seats_.size()))->first;
        switch (below(16)) {
            case 0:
                return seats_.size() < 30 ? connect() : void();
            case 1:
                return some != 0 && below(6) == 0 ? disconnect(some) : void();
            case 2:
            case 3:
            case 4:
                return some != 0 ? want(some) : void();
            case 5:
                return some != 0 ? rest(some) : void();
            case 6:
                busy_.now += std::chrono::microseconds(below(300));
                return below(20) == 0 ? change_bandwidth() : void();
            default:
                serve();
        }
    }

private:
    // Units that others may have while a tenant has work and is below its cap.
    static constexpr std::uint64_t most_waited = 100 << 20;

    struct Tenant {
        std::set<std::uint64_t> working{};  // connections
        std::uint64_t waited = 0;           // units of others since its last turn
    };

    long below(std::size_t bound) { return static_cast<long>(busy_.random() % bound); }
    void connect() {
        const auto tenant = static_cast<std::uint32_t>(1 + below(5));
        const auto key = static_cast<std::uint64_t>(below(3));
        const std::uint64_t number = ++numbers_;
        seats_.emplace(number, busy_.turns.join(tenant, key, number, below(3) == 0));
        tenant_of_[number] = tenant;
    }
    void disconnect(std::uint64_t number) {
        seats_.erase(number);
        tenants_[tenant_of_[number]].working.erase(number);
    }
    void want(std::uint64_t number) {
        busy_.turns.want(*seats_.at(number));
        tenants_[tenant_of_[number]].working.insert(number);
    }
    void rest(std::uint64_t number) {
        busy_.turns.rest(*seats_.at(number));
        tenants_[tenant_of_[number]].working.erase(number);
    }
    void change_bandwidth() {
        Policy policy;
        for (std::uint32_t tenant = 1; tenant <= 5; ++tenant) {
            const auto guarantee = static_cast<std::uint64_t>(below(3) == 0 ? below(200'000'000) : 0);
            const auto cap = below(3) == 0 ? guarantee + 1'000'000 + static_cast<std::uint64_t>(below(100'000'000)) : 0;
            policy[tenant] = {std::exp2(static_cast<double>(below(7)) - 3), guarantee, cap};
        }
        busy_.turns.set_bandwidth(policy, busy_.now);
    }
    // The tenants that have work and are below their caps. The others do not wait for the node.
    std::set<std::uint32_t> waiting() {
        std::set<std::uint32_t> found;
        for (auto& [tenant, one] : tenants_) {
            if (!one.working.empty() && busy_.turns.below_cap_at(tenant, busy_.now) == busy_.now) {
                found.insert(tenant);
            } else {
                one.waited = 0;
            }
        }
        return found;
    }
    void serve() {
        const std::set<std::uint32_t> waiting = this->waiting();
        const bool have_work =
            std::any_of(tenants_.begin(), tenants_.end(), [](const auto& one) { return !one.second.working.empty(); });
        const auto at = busy_.turns.next_at(busy_.now);
        CHECK_EQUAL(at.has_value(), have_work);
        CHECK_EQUAL(at.has_value() && *at == busy_.now, !waiting.empty());
        Turns::Flow* const next = busy_.next();
        CHECK_EQUAL(next != nullptr, !waiting.empty());
        if (next == nullptr) {
            busy_.now = at.value_or(busy_.now);
            return;
        }
        const std::uint32_t served = tenant_of_[next->name()];
        CHECK(waiting.contains(served) && tenants_[served].working.contains(next->name()));
        const auto units = static_cast<std::uint64_t>(1 + below(Busy::most));
        if (below(2) == 0) {
            rest(next->name());
        }
        busy_.charge(*next, units);
        for (const std::uint32_t tenant : waiting) {
            std::uint64_t& waited = tenants_[tenant].waited;
            waited = tenant == served ? 0 : waited + units;
            CHECK(waited < most_waited);
        }
    }

    Busy busy_;
    std::map<std::uint64_t, Turns::Seat> seats_;
    std::map<std::uint64_t, std::uint32_t> tenant_of_;
    std::map<std::uint32_t, Tenant> tenants_;
    std::uint64_t numbers_ = 0;
};

}  // namespace

TEST("the node is never idle while a tenant below its cap has work, and each such tenant has turns, through random changes") {
    for (unsigned seed = 0; seed < 30; ++seed) {
        Changing changing(seed);
        for (int act = 0; act < 8000; ++act) {
            changing.act();
        }
    }
}

int main() { return farpool::testing::run(); }
