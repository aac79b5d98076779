// Which pages leave memory first, and what their states allow.
#include "region/residency.hpp"

#include "tests/testing.hpp"

using farpool::policy::no_slot;
using farpool::region::Page;
using farpool::region::Residency;
using farpool::region::State;

namespace {

// Pages of a region that may have 16 in memory, so that 5 that were loaded ahead are many.
struct World {
    World() { pages.resize(64); }
    void load(Page first, Page count, State now) {
        for (Page page = first; page < first + count; ++page) {
            pages.begin_load(page);
            pages.end_load(page, now, now == State::ahead && page == first);
        }
    }

    Residency pages{16, "lru"};
};

}  // namespace

TEST("pages that were loaded ahead stay while others can leave, and leave only for urgent needs") {
    World world;
    world.load(1, 2, State::ahead);
    world.load(10, 2, State::resting);
    CHECK_EQUAL(world.pages.evict_next(false), 10U);
    CHECK_EQUAL(world.pages.evict_next(true), 11U);
    CHECK_EQUAL(world.pages.evict_next(false), no_slot);
    CHECK_EQUAL(world.pages.take_wasted(), 0U);
    CHECK_EQUAL(world.pages.evict_next(true), 1U);
    CHECK_EQUAL(world.pages.take_wasted(), 1U);
    CHECK(!world.pages.is_first(1));
    CHECK_EQUAL(world.pages.resident(), 1U);
}

TEST("many pages that were loaded ahead do not fill the memory") {
    World world;
    world.load(10, 2, State::resting);
    world.load(1, 5, State::ahead);
    CHECK_EQUAL(world.pages.evict_next(false), 1U);
    CHECK_EQUAL(world.pages.evict_next(false), 10U);
}

TEST("pages that were loaded ahead and are not used leave after a while") {
    World world;
    world.load(1, 1, State::ahead);
    world.load(10, 6, State::resting);
    for (Page page = 10; page < 15; ++page) {
        CHECK_EQUAL(world.pages.evict_next(false), page);
    }
    CHECK_EQUAL(world.pages.evict_next(false), 1U);
    CHECK_EQUAL(world.pages.evict_next(false), 15U);
}

TEST("the use of a run gives the pages that were loaded ahead more time") {
    World world;
    world.load(1, 2, State::ahead);
    world.load(10, 8, State::resting);
    for (Page page = 10; page < 14; ++page) {
        CHECK_EQUAL(world.pages.evict_next(false), page);
    }
    world.pages.map(1);
    CHECK(world.pages.state(1) == State::mapped);
    for (Page page = 14; page < 18; ++page) {
        CHECK_EQUAL(world.pages.evict_next(false), page);
    }
    CHECK(world.pages.state(2) == State::ahead);
}

TEST("a pinned page that was loaded ahead does not leave") {
    World world;
    world.load(1, 2, State::ahead);
    world.pages.pin(1, true);
    CHECK(!world.pages.evict(1));
    CHECK_EQUAL(world.pages.evict_next(true), 2U);
    CHECK_EQUAL(world.pages.evict_next(true), no_slot);
    world.pages.map(1);
    world.pages.pin(1, false);
    CHECK_EQUAL(world.pages.victim({}), 1U);
    world.pages.forget(1);
    CHECK_EQUAL(world.pages.resident(), 0U);
}

int main() { return farpool::testing::run(); }
