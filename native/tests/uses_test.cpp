// Uses and the runs that cover them.
#include "pager/uses.hpp"

#include <random>

#include "tests/testing.hpp"

using namespace farpool::pager;

namespace {

std::shared_ptr<const Layout> layout(BlockId first, std::int32_t count, std::int64_t nbytes, std::int64_t offset = 0,
                                     bool shared = false) {
    return std::make_shared<const Layout>(Layout{first, count, offset, 256, nbytes, shared});
}

}  // namespace

TEST("a use is covered by the blocks that it touches") {
    const auto storage = layout(10, 4, 1000);
    const auto [run, offset] = cover({storage, 300, 520, Mode::write});
    CHECK(run == (Run{11, 2, Mode::write, -1}));
    CHECK_EQUAL(offset, 44);
}

TEST("an overwrite needs no fetch only if no other bytes of its blocks must be kept") {
    CHECK(cover({layout(0, 4, 1000), 0, 1000, Mode::overwrite}).run.mode == Mode::overwrite);
    CHECK(cover({layout(0, 4, 1000), 0, 999, Mode::overwrite}).run.mode == Mode::write);
    CHECK(cover({layout(0, 4, 1000), 256, 512, Mode::overwrite}).run.mode == Mode::overwrite);
    CHECK(cover({layout(0, 1, 100, 0, true), 0, 100, Mode::overwrite}).run.mode == Mode::write);
}

TEST("aliases share a run, and an empty use has none") {
    const auto storage = layout(0, 4, 1000);
    const std::vector<Use> uses{{storage, 0, 1000, Mode::read}, {storage, 5, 5, Mode::write}, {storage, 0, 1000, Mode::read}};
    const Runs joined = runs_of(uses, false);
    CHECK_EQUAL(joined.runs.size(), std::size_t{1});
    CHECK_EQUAL(joined.places[0].run, 0);
    CHECK_EQUAL(joined.places[1].run, -1);
    CHECK_EQUAL(joined.places[2].run, 0);
}

TEST("for random uses, each use is whole in its run, runs do not overlap, and writes are known") {
    std::mt19937 random(3);
    const auto below = [&](std::int64_t limit) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(limit)); };
    for (int trial = 0; trial < 5000; ++trial) {
        std::vector<std::shared_ptr<const Layout>> storages{layout(0, 8, 2000), layout(8, 1, 100, 0, true),
                                                            layout(8, 1, 90, 128, true), layout(20, 3, 700)};
        std::vector<Use> uses;
        for (std::int64_t count = 1 + below(9); count > 0; --count) {
            const auto& storage = storages[static_cast<std::size_t>(below(4))];
            const std::int64_t start = below(storage->nbytes);
            uses.push_back({storage, start, start + below(storage->nbytes - start + 1), static_cast<Mode>(below(3))});
        }
        const bool rows = trial % 3 == 0;
        const Runs joined = runs_of(uses, rows);
        CHECK_EQUAL(joined.places.size(), uses.size());
        for (std::size_t left = 0; left < joined.runs.size(); ++left) {
            for (std::size_t right = 0; right < left; ++right) {
                const Run &a = joined.runs[left], &b = joined.runs[right];
                CHECK(a.stop() <= b.first || b.stop() <= a.first);
            }
        }
        for (std::size_t index = 0; index < uses.size(); ++index) {
            const Use& use = uses[index];
            if (use.empty()) {
                CHECK_EQUAL(joined.places[index].run, -1);
                continue;
            }
            const Run& run = joined.runs[static_cast<std::size_t>(joined.places[index].run)];
            const Layout& storage = *use.storage;
            const std::int64_t begins = (storage.first - run.first) * storage.block_bytes + storage.offset + use.start;
            CHECK_EQUAL(joined.places[index].offset, begins);
            CHECK(begins >= 0);
            CHECK(begins + use.stop - use.start <= run.count * storage.block_bytes);
            CHECK(use.mode == Mode::read || run.mode != Mode::read);
            CHECK_EQUAL(run.table, rows ? storage.first : -1);
        }
    }
}

int main() { return farpool::testing::run(); }
