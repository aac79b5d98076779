// Rows picked by data are kept by recency or by frequency, whichever misses fewer bytes.
#include "pager/row_policy.hpp"

#include "pager/tape.hpp"
#include "tests/testing.hpp"

using farpool::pager::BlockId;
using farpool::pager::moment;
using farpool::pager::RowPolicy;

namespace {

constexpr std::int64_t room = 256;  // blocks of one byte, so that all are in the sample

class Dice {
public:
    std::int64_t below(std::int64_t limit) {
        state_ = state_ * 6364136223846793005u + 1442695040888963407u;
        return static_cast<std::int64_t>((state_ >> 33) % static_cast<std::uint64_t>(limit));
    }

private:
    std::uint64_t state_ = 7;
};

// Makes accesses, half of them to a few blocks, the others to so many that each is a new one.
void mix(RowPolicy& policy, Dice& dice, int accesses, std::int64_t position) {
    for (int access = 0; access < accesses; ++access) {
        const bool popular = dice.below(2) == 0;
        policy.access(static_cast<BlockId>(popular ? dice.below(250) : 1000 + dice.below(1'000'000)), 1, 1, position);
    }
}

// Makes accesses to a window of blocks that moves on.
void move_on(RowPolicy& policy, Dice& dice, int accesses, std::int64_t position) {
    for (int access = 0; access < accesses; ++access) {
        policy.access(static_cast<BlockId>(2'000'000 + access / 4 + dice.below(240)), 1, 1, position);
    }
}

}  // namespace

TEST("recency is followed until there is evidence") {
    RowPolicy policy(room);
    CHECK(!policy.by_frequency());
    CHECK_EQUAL(policy.access(1, 1, 1, 5), moment(5));
    CHECK_EQUAL(policy.access(2, 1, 9, 5), moment(5) + 1);  // however often it was used
    CHECK_EQUAL(policy.access(1, 1, 2, 6), moment(6));
}

TEST("blocks that are used again and again among many that are not are kept by frequency") {
    RowPolicy policy(room);
    Dice dice;
    mix(policy, dice, 20'000, 0);
    CHECK(policy.by_frequency());
    policy.left(1000);
    const std::int64_t once = policy.access(5'000'000, 1, 1, 0);
    const std::int64_t often = policy.access(5'000'001, 1, 4, 0);
    CHECK(often - 1000 > 3 * (once - 1000));
}

TEST("rows that were popular long ago are evicted, and recency is followed again") {
    RowPolicy policy(room);
    Dice dice;
    mix(policy, dice, 20'000, 0);
    CHECK(policy.by_frequency());
    move_on(policy, dice, 40'000, 1);
    CHECK(!policy.by_frequency());
}

TEST("a pool of another size is measured again") {
    RowPolicy policy(room);
    Dice dice;
    mix(policy, dice, 20'000, 0);
    policy.set_room(1'000'000);
    move_on(policy, dice, 10'000, 1);
    CHECK(policy.by_frequency());  // no row leaves the shadows, so there is no evidence for the other policy
}

int main() { return farpool::testing::run(); }
