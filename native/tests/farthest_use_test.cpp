// The order of eviction compared with a plain sort, over random changes.
#include "pager/farthest_use.hpp"

#include <algorithm>
#include <random>

#include "tests/testing.hpp"

using farpool::pager::BlockId;
using farpool::pager::BlockTable;
using farpool::pager::FarthestUse;

TEST("the victim is the farthest block, the lowest number among equals, after random changes") {
    std::mt19937 random(7);
    BlockTable blocks;
    blocks.create(std::vector<std::int64_t>(200, 64), 0);
    FarthestUse order(blocks);
    std::vector<BlockId> inside;
    for (int step = 0; step < 20000; ++step) {
        const auto block = static_cast<BlockId>(random() % 200);
        if (random() % 3 == 0) {
            order.remove(block);
            std::erase(inside, block);
        } else {
            blocks[block].next_use = static_cast<std::int64_t>(random() % 50);
            order.insert(block);
            if (std::ranges::find(inside, block) == inside.end()) {
                inside.push_back(block);
            }
        }
        const auto victim = std::ranges::min_element(inside, [&](BlockId left, BlockId right) {
            return std::pair{-blocks[left].next_use, left} < std::pair{-blocks[right].next_use, right};
        });
        CHECK_EQUAL(order.victim(), victim == inside.end() ? -1 : *victim);
        CHECK_EQUAL(order.victim_next_use(), victim == inside.end() ? -1 : blocks[*victim].next_use);
    }
}

int main() { return farpool::testing::run(); }
