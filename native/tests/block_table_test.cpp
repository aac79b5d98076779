// Numbers and names of blocks.
#include "pager/block_table.hpp"

#include "core/error.hpp"
#include "tests/testing.hpp"

using farpool::PortFailure;
using farpool::pager::BlockTable;

namespace {

std::vector<std::int64_t> sizes(int count) { return std::vector<std::int64_t>(static_cast<std::size_t>(count), 64); }

}  // namespace

TEST("a dropped block's name is free at once, its number only after forget") {
    BlockTable blocks;
    const auto first = blocks.create(sizes(3), 0);
    blocks.retire(first, 3);
    const auto second = blocks.create(sizes(3), 0);
    CHECK_EQUAL(second, 3);
    CHECK_EQUAL(blocks[second].name, 0);
    CHECK_EQUAL(blocks.named(2), second + 2);
    blocks.forget(first, 3);
    CHECK_EQUAL(blocks.create(sizes(2), 0), first);
}

TEST("the table grows, and numbers beyond it have no name") {
    BlockTable blocks;
    CHECK_EQUAL(blocks.create(sizes(1000), 0), 0);
    CHECK_EQUAL(blocks.create(sizes(1000), 0), 1000);
    CHECK_EQUAL(blocks.named(1 << 20), -1);
    CHECK_EQUAL(blocks.named(-1), -1);
}

TEST("blocks that are not in use are refused by number") {
    BlockTable blocks;
    blocks.create(sizes(4), 0);
    blocks.require_used(0, 4);
    CHECK_THROWS(PortFailure, blocks.require_used(0, 5));
    CHECK_THROWS(PortFailure, blocks.require_used(-1, 1));
    CHECK_THROWS(PortFailure, blocks.require_used(2, 0));
    CHECK_THROWS(PortFailure, blocks.require_used(2, 0x7fffffff));
}

int main() { return farpool::testing::run(); }
