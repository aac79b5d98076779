// Prefixes on sequences worked out by hand, times of reuse that are learnt, and a tree in random calls.
#include <cmath>
#include <map>
#include <random>
#include <set>

#include "core/error.hpp"
#include "policy/prefix_eviction.hpp"
#include "tests/testing.hpp"

using namespace farpool::policy;
using farpool::PortFailure;

namespace {

// Inserts a block of one byte that costs a second; returns the evicted ids, and the block's own if it was refused.
std::vector<std::uint64_t> put(PrefixEviction& cache, std::uint64_t id, std::uint64_t parent, std::uint64_t size = 1) {
    std::vector<Evicted> evicted;
    const bool admitted = cache.insert(id, parent, size, 1.0, 0, evicted);
    std::vector<std::uint64_t> left;
    for (const Evicted& block : evicted) {
        left.push_back(block.id);
    }
    if (!admitted) {
        left.push_back(id);
    }
    return left;
}

using Ids = std::vector<std::uint64_t>;

TEST("the oldest prefix is evicted from its end") {
    PrefixEviction cache(4, "lru");
    for (const std::uint64_t id : {1, 2, 3}) {
        CHECK_EQUAL(put(cache, id, id - 1), Ids{});
    }
    CHECK_EQUAL(put(cache, 10, 0), Ids{});
    CHECK_EQUAL(put(cache, 11, 10), Ids{3});
    CHECK_EQUAL(put(cache, 12, 11, 2), (Ids{2, 1}));
    CHECK_EQUAL(cache.used(), 4u);
}

TEST("a held block and its predecessors make no room, and no block is evicted for nothing") {
    for (const std::string_view policy : online_policies) {
        PrefixEviction cache(3, policy);
        put(cache, 1, 0);
        put(cache, 2, 1);
        put(cache, 3, 0);
        cache.pin(2);
        CHECK_EQUAL(put(cache, 4, 0, 2), Ids{4});
        CHECK(cache.contains(3));
        cache.unpin(2);
        cache.remove(1);
        CHECK_EQUAL(put(cache, 5, 0, 2), Ids{2});
    }
}

TEST("a use at a certain age is expected if uses came at that age") {
    ReuseModel model;
    model.remember(10000);
    // Blocks 1 to 100 come again and again in a loop; each of the others comes once.
    std::uint64_t once = 1000;
    std::uint32_t uses = 0;
    for (int turn = 0; turn < 20; ++turn) {
        for (std::uint64_t id = 1; id <= 100; ++id) {
            uses = model.use(id);
            model.use(++once);
        }
    }
    CHECK_EQUAL(uses, 19u);
    CHECK(model.worth(19, model.now() - 100) > 10 * model.worth(0, model.now() - 1000));
    // The use after 200 comes soon.
    CHECK(model.worth(19, model.now() - 190) > model.worth(19, model.now() - 20));
}

TEST("a loop that does not fit is kept in part once it is known") {
    PrefixEviction cache(100, "");
    std::uint64_t hits = 0;
    for (int turn = 0; turn < 100; ++turn) {
        for (std::uint64_t id = 1; id <= 150; ++id) {
            if (cache.touch(id)) {
                ++hits;
            } else {
                put(cache, id, 0);
            }
        }
    }
    CHECK(hits > 4000);
    CHECK(cache.switches() > 0);
    CHECK_EQUAL(cache.tenants()[0].hits, hits);
}

TEST("wrong blocks are refused with an error") {
    PrefixEviction cache(4, "");
    CHECK_THROWS(PortFailure, put(cache, 0, 0));
    CHECK_THROWS(PortFailure, put(cache, 7, 7));
    CHECK_THROWS(PortFailure, put(cache, 7, 0, 0));
    CHECK_THROWS(PortFailure, PrefixEviction(4, "belady"));
    CHECK_EQUAL(cache.size(), 0u);
}

TEST("in random programs bytes fit, pinned blocks stay, and each block has its predecessor") {
    for (unsigned seed = 0; seed < 24; ++seed) {
        std::mt19937 dice(seed);
        const auto throw_die = [&](unsigned sides) { return dice() % sides; };
        const unsigned number = seed % 7;
        PrefixEviction cache(60, number == 6 ? "" : online_policies[number]);
        std::map<std::uint64_t, unsigned> pins;
        for (int step = 0; step < 20000; ++step) {
            const std::uint64_t id = 1 + throw_die(100);
            switch (throw_die(8)) {
                case 0:
                    if (throw_die(20) == 0) {
                        cache.use_policy(online_policies[throw_die(6)]);
                    }
                    break;
                case 1:
                    if (pins.size() < 4 && cache.pin(id)) {
                        ++pins[id];
                    }
                    break;
                case 2:
                    if (!pins.empty()) {
                        const auto first = pins.begin();
                        CHECK(cache.unpin(first->first));
                        if (--first->second == 0) {
                            pins.erase(first);
                        }
                    }
                    break;
                case 3:
                case 4:
                    cache.touch(id);
                    break;
                default:
                    put(cache, id, id / 3, 1 + throw_die(5));
            }
            CHECK(cache.used() <= 60);
            for (const auto& [pinned, count] : pins) {
                for (std::uint64_t at = pinned; at != 0; at /= 3) {
                    CHECK(cache.contains(at));
                }
            }
            if (step % 50 == 0) {
                for (std::uint64_t at = 3; at <= 100; ++at) {
                    CHECK(!cache.contains(at) || cache.contains(at / 3));
                }
            }
        }
    }
}

}  // namespace

int main() { return farpool::testing::run(); }
