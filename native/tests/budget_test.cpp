// The memory budget under a policy: guarantees, bursts and priorities of tenants, with objects that only count their bytes.
#include "node/budget.hpp"

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <vector>

#include "tests/testing.hpp"

using farpool::Budget;

namespace {

// Objects of one tenant, oldest first; the fixed ones cannot be evicted.
class Objects final : public farpool::Evictable {
public:
    Objects(Budget& budget, std::uint32_t tenant) : budget_(budget), tenant_(tenant) { budget.join(tenant, *this); }
    ~Objects() { budget_.leave(tenant_); }
    Objects(const Objects&) = delete;
    Objects& operator=(const Objects&) = delete;

    bool put(std::uint64_t nbytes, bool fixed = false) {
        if (!budget_.may_fix(tenant_, nbytes) || !budget_.make_room(tenant_, nbytes)) {
            return false;
        }
        (fixed ? fixed_ : evictable_).push_back(nbytes);
        budget_.count_objects(nbytes);
        return true;
    }
    std::size_t count() const { return evictable_.size() + fixed_.size(); }
    std::uint64_t used() const noexcept override { return sum(evictable_) + sum(fixed_); }
    std::uint64_t reclaimable() const noexcept override { return sum(evictable_); }
    std::uint64_t fixed() const { return sum(fixed_); }
    bool evict_one(bool) override {
        if (evictable_.empty()) {
            return false;
        }
        budget_.count_objects(0 - evictable_.front());
        evictable_.pop_front();
        return true;
    }
    void trim() override {}

private:
    static std::uint64_t sum(const std::deque<std::uint64_t>& sizes) {
        std::uint64_t nbytes = 0;
        for (const std::uint64_t one : sizes) {
            nbytes += one;
        }
        return nbytes;
    }

    Budget& budget_;
    const std::uint32_t tenant_;
    std::deque<std::uint64_t> evictable_, fixed_;
};

void fill(Objects& objects, std::size_t count, std::uint64_t nbytes = 1) {
    for (std::size_t number = 0; number < count; ++number) {
        CHECK(objects.put(nbytes));
    }
}

}  // namespace

TEST("a guarantee of the policy takes the place of the share from the start, and without one that share stays") {
    Budget budget(100, {{1, 30}, {2, 20}});
    CHECK_EQUAL(budget.share(3), 50u);
    budget.allow({{1, {60, 0, 0}}, {2, {0, 0, 5}}});
    CHECK_EQUAL(budget.share(1), 60u);
    CHECK_EQUAL(budget.share(2), 20u);
    CHECK_EQUAL(budget.share(3), 20u);
    budget.allow({});
    CHECK_EQUAL(budget.share(1), 30u);
    CHECK_EQUAL(budget.share(3), 50u);
}

TEST("a tenant does not use more than its burst, and evicts its own objects for that") {
    Budget budget(100);
    Objects one(budget, 1), two(budget, 2);
    fill(two, 20);
    budget.allow({{1, {10, 25, 0}}});
    fill(one, 60);
    CHECK_EQUAL(one.used(), 25u);
    CHECK_EQUAL(two.used(), 20u);
    CHECK(!one.put(26));
    CHECK_EQUAL(one.used(), 25u);
}

TEST("bytes that cannot be evicted do not pass a burst") {
    Budget budget(100);
    Objects one(budget, 1);
    budget.allow({{1, {0, 10, 0}}});
    CHECK_EQUAL(budget.share(1), 10u);
    CHECK(one.put(9, true));
    CHECK(!budget.may_fix(1, 2));
    CHECK(!one.put(2, true));
    CHECK(one.put(1));
    CHECK(one.put(1));
    CHECK_EQUAL(one.used(), 10u);
    CHECK_EQUAL(one.fixed(), 9u);
}

TEST("a lowered burst evicts a bounded number of objects at a time, and no fixed ones") {
    Budget budget(1000);
    Objects one(budget, 1), two(budget, 2);
    CHECK(one.put(30, true));
    fill(one, 400);
    fill(two, 100);
    budget.allow({{1, {0, 100, 0}}});
    CHECK_EQUAL(one.used(), 430u);
    CHECK_EQUAL(budget.evict_above_bursts(50), 50u);
    CHECK(one.put(1));  // gives two bytes for the one that it takes
    CHECK_EQUAL(one.used(), 379u);
    while (budget.evict_above_bursts(50) > 0) {
    }
    CHECK_EQUAL(one.used(), 100u);
    budget.allow({{1, {0, 20, 0}}});
    while (budget.evict_above_bursts(50) > 0) {
    }
    CHECK_EQUAL(one.used(), 30u);
    CHECK_EQUAL(one.fixed(), 30u);
    CHECK(!one.put(1));
    CHECK_EQUAL(two.used(), 100u);
}

TEST("a burst that was lowered because others have grown takes objects only for the tenant's own puts") {
    Budget budget(1000), begun(1000);
    Objects one(budget, 1), kept(begun, 1);
    budget.allow({{1, {0, 400, 0}}});
    fill(one, 400);
    budget.allow({{1, {0, 100, 0}}}, false);
    CHECK_EQUAL(budget.evict_above_bursts(50), 0u);
    CHECK(one.put(1));  // gives two bytes for the one that it takes
    CHECK_EQUAL(one.used(), 399u);
    budget.allow({{1, {0, 300, 0}}}, false);
    CHECK_EQUAL(budget.evict_above_bursts(50), 0u);
    budget.allow({{1, {0, 100, 0}}});
    CHECK_EQUAL(budget.evict_above_bursts(50), 50u);
    fill(kept, 200);
    begun.allow({{1, {0, 100, 0}}}, false);  // a start with objects of an earlier one
    CHECK_EQUAL(begun.evict_above_bursts(50), 0u);
    CHECK_EQUAL(kept.used(), 200u);
}

TEST("a lowered burst forgets no objects that the lower medium cannot take at once") {
    Budget budget(100);
    Objects one(budget, 1);
    fill(one, 50);
    budget.allow({{1, {0, 10, 0}}});
    budget.count_moving(Budget::moving_bytes_max);
    CHECK_EQUAL(budget.evict_above_bursts(50), 0u);
    budget.count_moving(0 - Budget::moving_bytes_max);
    CHECK_EQUAL(budget.evict_above_bursts(50), 40u);
}

TEST("a lowered guarantee evicts nothing until another tenant needs the bytes") {
    Budget budget(100);
    budget.allow({{1, {80, 0, 0}}, {2, {20, 0, 0}}});
    Objects one(budget, 1), two(budget, 2);
    fill(one, 80);
    fill(two, 40);
    CHECK_EQUAL(one.used(), 80u);
    budget.allow({{1, {50, 0, 0}}, {2, {20, 0, 0}}});
    CHECK_EQUAL(budget.evict_above_bursts(100), 0u);
    CHECK_EQUAL(one.used(), 80u);
    fill(two, 10);
    CHECK_EQUAL(one.used(), 70u);
}

TEST("borrowed bytes of the lowest priority are evicted first, and bytes within a guarantee never for others") {
    Budget budget(120);
    budget.allow({{1, {10, 0, 0}}, {2, {10, 0, 5}}, {3, {30, 0, 0}}});
    Objects low(budget, 1), high(budget, 2), third(budget, 3);
    fill(high, 90);
    fill(low, 30);
    CHECK_EQUAL(low.used(), 30u);
    fill(third, 20);
    CHECK_EQUAL(low.used(), 10u);  // although the other one has borrowed more
    CHECK_EQUAL(high.used(), 90u);
    fill(third, 10);
    CHECK_EQUAL(low.used(), 10u);
    CHECK_EQUAL(high.used(), 80u);
}

TEST("under random puts and policies no tenant passes a burst that was not lowered, or loses guaranteed bytes to others") {
    for (unsigned seed = 0; seed < 200; ++seed) {
        std::mt19937 random(seed);
        const std::uint64_t limit = 200 + random() % 800;
        Budget budget(limit, {{1, limit / 10}});
        std::deque<Objects> tenants;
        for (std::uint32_t tenant = 0; tenant < 4; ++tenant) {
            tenants.emplace_back(budget, tenant);
        }
        for (int step = 0; step < 400; ++step) {
            if (random() % 40 == 0) {
                Budget::Allowances made;
                for (std::uint32_t tenant = 0; tenant < 4; ++tenant) {
                    const std::uint64_t guaranteed = random() % 3 == 0 ? 0 : random() % (limit / 4);
                    const std::uint64_t burst = random() % 2 == 0 ? 0 : guaranteed + random() % limit;
                    made[tenant] = {guaranteed, burst, static_cast<std::int32_t>(random() % 3)};
                }
                const std::uint64_t before = budget.used();
                budget.allow(made);
                CHECK_EQUAL(budget.used(), before);
            }
            const auto tenant = static_cast<std::uint32_t>(random() % 4);
            const std::uint64_t nbytes = 1 + random() % (limit / 8);
            std::vector<std::uint64_t> uses, fixed;
            for (const Objects& one : tenants) {
                uses.push_back(one.used());
                fixed.push_back(one.fixed());
            }
            const std::uint64_t burst = budget.allowance(tenant).burst;
            const std::uint64_t most = burst == 0 ? limit : std::max(burst, uses[tenant]);
            const bool done = random() % 5 > 0 ? tenants[tenant].put(nbytes) : tenants[tenant].put(nbytes, true);
            CHECK(budget.used() <= limit);
            CHECK(tenants[tenant].used() <= most);
            for (std::uint32_t other = 0; other < 4; ++other) {
                CHECK(tenants[other].fixed() >= fixed[other]);
                if (other != tenant && tenants[other].used() < uses[other]) {
                    // The largest object that was evicted may reach below the share.
                    CHECK(uses[other] > budget.share(other));
                    CHECK(tenants[other].used() + limit / 8 >= budget.share(other));
                }
                if (!done) {
                    CHECK_EQUAL(tenants[other].used(), uses[other]);
                }
            }
        }
    }
}

int main() { return farpool::testing::run(); }
