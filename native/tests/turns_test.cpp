// Turns by tenant, key and connection: the share of each in the work, and how long an idle connection waits.
#include "node/turns.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "tests/testing.hpp"

using farpool::Turns;

namespace {

constexpr std::uint64_t quantum = Turns::quantum;

// Connections that always have work, and the units that each of them has used.
struct Busy {
    explicit Busy(unsigned seed) : random(seed) {}

    void add(std::uint32_t tenant, std::uint64_t key, std::size_t count) {
        for (std::size_t number = 0; number < count; ++number) {
            seats.push_back(turns.join(tenant, key, ++numbers));
            turns.want(*seats.back());
            tenant_of[numbers] = tenant;
            key_of[numbers] = key;
        }
    }
    // Serves one turn, of random cost that may exceed a quantum; returns the connection.
    std::uint64_t serve() {
        Turns::Flow* const flow = turns.next();
        CHECK(flow != nullptr);
        const std::uint64_t units = 1 + random() % most;
        turns.charge(*flow, units);
        used[flow->name()] += units;
        of_tenants[tenant_of[flow->name()]] += units;
        of_keys[key_of[flow->name()]] += units;
        return flow->name();
    }

    static constexpr std::uint64_t most = 3 * quantum / 2;
    std::mt19937 random;
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
        for (Turns::Flow* next = busy.turns.next(); next != victim.get(); next = busy.turns.next()) {
            waited += quantum / 4;
            busy.turns.charge(*next, quantum / 4);
        }
        CHECK(waited <= 2 * (quantum + quantum / 4));
        busy.turns.charge(*victim, quantum / 10);
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
        if (busy.turns.next() == other.get()) {
            busy.turns.charge(*other, 5 * quantum);
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
            if (busy.turns.next() == other.get()) {
                busy.turns.charge(*other, 5 * quantum);
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
        CHECK(busy.turns.next() == other.get());
        busy.turns.charge(*other, 3 * quantum);
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
            CHECK(busy.turns.next() == seat.get());
            busy.turns.charge(*seat, 1000 * quantum);
        }
        const auto waits = [&](std::uint64_t number) {
            const Turns::Seat seat = joined(number);
            return busy.turns.next() != seat.get();
        };
        for (const std::uint64_t number : {std::uint64_t{1}, count / 2, count - 1}) {
            CHECK(waits(number));
        }
        CHECK(!waits(0));
    }
}

TEST("only connections with work are served, through random arrivals, pauses and ends") {
    for (unsigned seed = 0; seed < 30; ++seed) {
        std::mt19937 random(seed);
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
                    Turns::Flow* const next = turns.next();
                    CHECK_EQUAL(next == nullptr, working.empty());
                    if (next != nullptr) {
                        CHECK(working.contains(next->name()));
                        turns.charge(*next, random() % (4 * quantum));
                    }
            }
            std::set<std::uint64_t> keys;
            for (const auto& [number, key] : key_of) {
                keys.insert(key);
            }
            CHECK_EQUAL(turns.is_shared(), keys.size() > 1);
            CHECK_EQUAL(turns.has_work(), !working.empty());
        }
    }
}

int main() { return farpool::testing::run(); }
