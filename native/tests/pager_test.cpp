// The pager itself: refusals, undone transfers, and random programs with concurrent accesses of several threads.
#include "pager/pager.hpp"

#include <algorithm>
#include <map>
#include <random>
#include <set>

#include "core/error.hpp"
#include "core/extent_allocator.hpp"
#include "tests/testing.hpp"

using namespace farpool::pager;
using farpool::ExtentAllocator;
using farpool::PortFailure;

namespace {

class SimulatedSpace : public Space {
public:
    explicit SimulatedSpace(std::int64_t capacity) : extents_(capacity, 64) {}
    std::int64_t reserve(std::int64_t nbytes, int) override {
        if (full_then_broken && calls_++ % 2 == 0) {
            return nowhere;
        }
        if (full_then_broken) {
            throw std::runtime_error("told to fail");
        }
        return extents_.alloc(nbytes);
    }
    void free(std::int64_t offset, std::int64_t, int) override { extents_.free(offset); }
    std::int64_t used() const { return extents_.used(); }
    bool full_then_broken = false;

private:
    int calls_ = 0;
    ExtentAllocator extents_;
};

// A pager over one tier, whose transfers the test ends.
struct World {
    explicit World(std::int64_t capacity, std::int64_t below = 1 << 20)
        : space(std::make_shared<SimulatedSpace>(below)), pager(capacity, {space}, 1, 64, 1 << 12, true, false) {}

    BlockId create(std::int64_t nbytes) { return pager.create(std::vector<std::int64_t>{nbytes}, 0); }
    std::shared_ptr<Access> request(BlockId block, Mode mode) { return pager.request({{block, 1, mode, -1}}, now += 1e-4); }

    void start() {
        for (const Command& command : pager.take_commands()) {
            if (const auto* transfer = std::get_if<std::shared_ptr<const Transfer>>(&command)) {
                open[(*transfer)->id] = *transfer;
            }
        }
    }
    void end_all() {
        for (start(); !open.empty(); start()) {
            const auto transfer = open.begin()->second;
            open.erase(open.begin());
            pager.completed(transfer->id, now, now + 1e-6);
            pager.proceed(now += 1e-6);
        }
    }
    void touch(BlockId block, Mode mode) {
        const auto access = request(block, mode);
        end_all();
        CHECK(access->granted);
        pager.release(*access, true);
        end_all();
    }

    std::shared_ptr<SimulatedSpace> space;
    Pager pager;
    std::map<TransferId, std::shared_ptr<const Transfer>> open;
    double now = 0.0;
};

const Failure told_to = std::make_shared<const TransferFailure>(TransferFailure{{}, 0, 0});

}  // namespace

TEST("operands larger than the arena are refused, and nothing has changed") {
    World world(4096);
    const BlockId large = world.create(8192);
    CHECK_THROWS(Refused, world.request(large, Mode::read));
    CHECK_EQUAL(world.pager.counters().accesses, 0);
    CHECK(world.pager.waiting().empty());
}

TEST("a block whose bytes a tier has is fetched from there, and evicted without a write") {
    World world(4096);
    const std::int64_t place = world.space->reserve(4096, 0);
    const BlockId block = world.create(4096);
    world.pager.note_copy(block, 0, place);
    const auto access = world.request(block, Mode::read);
    world.start();
    CHECK_EQUAL(world.open.size(), 1U);
    const Transfer& fetch = *world.open.begin()->second;
    CHECK(fetch.kind == Kind::fetch);
    CHECK_EQUAL(fetch.pieces.front().offset, place);
    world.end_all();
    CHECK(access->granted);
    world.pager.release(*access, true);
    world.touch(world.create(4096), Mode::overwrite);
    CHECK_EQUAL(world.pager.counters().evictions, 1);
    CHECK_EQUAL(world.pager.counters().write_backs, 0);
    world.pager.retire(block, 1);
    CHECK(world.pager.forget(block, 1));
    CHECK_EQUAL(world.space->used(), 0);
}

TEST("only a block without content takes the copy of a tier") {
    World world(4096);
    const BlockId written = world.create(1024);
    world.touch(written, Mode::overwrite);
    CHECK_THROWS(PortFailure, world.pager.note_copy(written, 0, 0));
    const BlockId fresh = world.create(1024);
    CHECK_THROWS(PortFailure, world.pager.note_copy(fresh, 1, 0));
    CHECK_THROWS(PortFailure, world.pager.note_copy(fresh, -1, 0));
    CHECK_THROWS(PortFailure, world.pager.note_copy(fresh + 1, 0, 0));
    world.pager.note_copy(fresh, 0, world.space->reserve(1024, 0));
    CHECK_THROWS(PortFailure, world.pager.note_copy(fresh, 0, 0));
}

TEST("invalid calls are refused with the name of the call") {
    World world(4096);
    const BlockId block = world.create(512);
    CHECK_THROWS(PortFailure, world.request(block + 1, Mode::read));
    CHECK_THROWS(PortFailure, world.pager.create(std::vector<std::int64_t>{100, 64}, 0));
    CHECK_THROWS(PortFailure, world.pager.create(std::vector<std::int64_t>{64}, 1));
    CHECK_THROWS(PortFailure, world.pager.create(std::vector<std::int64_t>{}, 0));
    const auto access = world.request(block, Mode::overwrite);
    world.pager.release(*access, true);
    CHECK_THROWS(PortFailure, world.pager.release(*access, true));
}

TEST("a prefetched block that is written back does not count as prefetched any more") {
    World world(8 * 2048);
    std::vector<BlockId> blocks;
    for (int index = 0; index < 16; ++index) {
        blocks.push_back(world.create(2048));
        world.touch(blocks.back(), Mode::overwrite);
    }
    Residency& residency = world.pager.residency();
    const auto ready = [&] {
        return std::ranges::find_if(blocks, [&](BlockId b) { return residency[b].prefetched && residency.at_rest(b); });
    };
    for (int turn = 0; turn < 20 && ready() == blocks.end(); ++turn) {
        for (const BlockId block : blocks) {
            world.touch(block, Mode::read);
            if (ready() != blocks.end()) {
                break;
            }
        }
    }
    CHECK(ready() != blocks.end());
    const BlockId block = *ready();
    const std::int64_t before = residency.ahead_bytes();
    residency.soil(block);  // as if its copy below had been dropped for another block
    CHECK(residency.try_evict(block));
    CHECK_EQUAL(residency.ahead_bytes(), before - 2048);
    world.end_all();
}

TEST("the access that waits gets the error, and the next access tries again") {
    World world(4096);
    const BlockId first = world.create(4096);
    const BlockId second = world.create(4096);
    world.touch(first, Mode::overwrite);
    world.touch(second, Mode::overwrite);
    const auto access = world.request(first, Mode::read);
    world.start();
    while (!access->granted && std::holds_alternative<std::monostate>(access->refusal)) {
        const auto transfer = world.open.begin()->second;
        world.open.erase(world.open.begin());
        if (transfer->kind == Kind::fetch) {
            world.pager.failed(transfer->id, told_to);
        } else {
            world.pager.completed(transfer->id, 0.0, 0.0);
        }
        world.pager.proceed(world.now);
        world.start();
    }
    CHECK(!access->granted);
    CHECK(std::get<Failure>(access->refusal) == told_to);
    world.touch(first, Mode::read);
}

TEST("a tier whose bookkeeping fails loses neither a place in the line nor a victim") {
    World world(4096);
    std::vector<BlockId> blocks;
    for (int index = 0; index < 4; ++index) {
        blocks.push_back(world.create(1024));
        world.touch(blocks.back(), Mode::overwrite);
    }
    const BlockId other = world.create(1024);
    world.space->full_then_broken = true;  // the first victim is spared, the next one fails
    const std::vector<Run> runs{
        {blocks[0], 1, Mode::read, -1}, {blocks[1], 1, Mode::read, -1}, {other, 1, Mode::overwrite, -1}};
    for (int attempt = 0; attempt < 2; ++attempt) {
        CHECK_THROWS(std::runtime_error, world.pager.request(runs, world.now));
        CHECK(world.pager.waiting().empty());
    }
    for (const BlockId block : blocks) {
        CHECK(world.pager.residency()[block].heap_slot >= 0);
    }
    world.space->full_then_broken = false;
    world.touch(other, Mode::overwrite);
    for (const BlockId block : blocks) {
        world.touch(block, Mode::read);
    }
}

TEST("demoted blocks are evicted before their turn, and an access fetches them again") {
    World world(4096, 1024);
    const BlockId block = world.create(1024);
    const BlockId beyond = world.create(1024);
    world.touch(block, Mode::overwrite);
    world.touch(beyond, Mode::overwrite);
    const auto access = world.request(block, Mode::read);
    CHECK(!world.pager.demote(block, 1));  // in use
    world.pager.release(*access, true);
    CHECK(world.pager.demote(block, 1));
    world.end_all();
    CHECK(world.pager.residency()[block].state == State::absent);
    CHECK_EQUAL(world.space->used(), 1024);
    CHECK(world.pager.demote(block, 1));    // is evicted already
    CHECK(!world.pager.demote(beyond, 1));  // no room below
    CHECK(world.pager.residency()[beyond].state == State::resident);
    world.touch(block, Mode::read);
    CHECK(world.pager.residency()[block].state == State::resident);
}

// Checks that the map of the arena, the states of the blocks and the tier's extents agree.
void check_state(const World& world, const std::vector<std::shared_ptr<Access>>& granted) {
    const Residency& residency = world.pager.residency();
    std::int64_t end = 0;
    std::set<BlockId> owners;
    residency.arena().each_owner([&](BlockId block, std::int64_t place, std::int64_t nbytes) {
        CHECK(place >= end);
        CHECK_EQUAL(residency[block].place, place);
        owners.insert(block);
        end = place + nbytes;
        return true;
    });
    CHECK(end <= residency.arena().capacity());
    std::int64_t below = 0;
    for (const BlockId block : residency.blocks().used()) {
        const Block& b = residency[block];
        const bool here = b.state == State::resident || b.state == State::fetching;
        CHECK_EQUAL(owners.contains(block), here);
        CHECK(b.pins >= 0);
        CHECK(!(b.heap_slot >= 0 && (b.pins > 0 || b.state != State::resident || b.stuck)));
        below += b.tier >= 0 ? residency.arena().rounded(b.size) : 0;
    }
    CHECK_EQUAL(below, world.space->used());
    for (const auto& access : granted) {
        for (std::size_t index = 0; index < access->runs.size(); ++index) {
            CHECK_EQUAL(residency.place_of(access->runs[index]), access->places[index]);
        }
    }
}

TEST("random programs keep the map, the tier's extents and the pins in order") {
    for (unsigned seed = 0; seed < 300; ++seed) {
        std::mt19937 random(seed);
        World world(64 * (64 + static_cast<std::int64_t>(random() % 200)), 1 << (13 + random() % 8));
        Pager& pager = world.pager;
        struct Storage {
            BlockId first;
            int count;
        };
        std::vector<Storage> storages, retired;
        std::vector<std::shared_ptr<Access>> waiting, granted;
        const auto settle = [&] {
            std::erase_if(waiting, [&](const auto& access) {
                if (access->granted) {
                    granted.push_back(access);
                }
                return access->granted || !std::holds_alternative<std::monostate>(access->refusal);
            });
        };
        for (int step = 0; step < 400; ++step) {
            world.now += 1e-6 * static_cast<double>(random() % 50);
            std::erase_if(retired, [&](const Storage& s) { return pager.forget(s.first, s.count); });
            const unsigned chance = random() % 20;
            if (storages.empty() || (chance < 3 && storages.size() < 30)) {
                std::vector<std::int64_t> sizes(1 + random() % 3, 64 * (1 + static_cast<std::int64_t>(random() % 8)));
                const BlockId first = pager.create(sizes, 0);
                storages.push_back({first, static_cast<int>(sizes.size())});
            } else if (chance == 3) {
                const std::size_t at = random() % storages.size();
                pager.retire(storages[at].first, storages[at].count);
                retired.push_back(storages[at]);
                storages.erase(storages.begin() + static_cast<std::ptrdiff_t>(at));
            } else if (chance < 12) {
                const Storage& storage = storages[random() % storages.size()];
                try {
                    waiting.push_back(
                        pager.request({{storage.first, storage.count, static_cast<Mode>(random() % 3), -1}}, world.now));
                } catch (const Refused&) {
                }
            } else if (chance == 12 && !waiting.empty()) {
                pager.abandon(waiting.back());
                waiting.pop_back();
            } else if (chance < 16 && !granted.empty()) {
                pager.release(*granted.back(), true);
                granted.pop_back();
            }
            world.start();
            if (!world.open.empty() && random() % 2 == 0) {
                const auto ready = std::ranges::find_if(world.open, [&](const auto& entry) {
                    return std::ranges::none_of(entry.second->after, [&](TransferId id) { return world.open.contains(id); });
                });
                const auto transfer = ready->second;
                world.open.erase(ready);
                if (!transfer->pieces.empty() && random() % 20 == 0) {
                    pager.failed(transfer->id, told_to);
                    std::erase_if(world.open, [&](const auto& entry) {
                        return pager.residency().transfers().find(entry.first) == nullptr;
                    });
                } else {
                    pager.completed(transfer->id, world.now, world.now + 1e-7);
                }
                pager.proceed(world.now);
                world.start();
            }
            settle();
            check_state(world, granted);
        }
    }
}

TEST("rows that replace rows move no other blocks") {
    World world(16 << 10);
    const BlockId table = world.pager.create(std::vector<std::int64_t>(100, 1024), 0);
    std::mt19937 random(0);
    for (int step = 0; step < 300; ++step) {
        std::set<BlockId> rows;
        while (rows.size() < 4) {
            rows.insert(static_cast<BlockId>(random() % 100));
        }
        std::vector<Run> runs;
        for (const BlockId row : rows) {
            runs.push_back({table + row, 1, Mode::write, table});
        }
        const auto access = world.pager.request(std::move(runs), world.now += 1e-4);
        world.end_all();
        CHECK(access->granted);
        world.pager.release(*access, true);
        world.end_all();
    }
    CHECK(world.pager.counters().evictions > 500);
    CHECK_EQUAL(world.pager.counters().moves, std::int64_t{0});
}

int main() { return farpool::testing::run(); }
