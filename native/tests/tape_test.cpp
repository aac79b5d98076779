// The tape: predictions in loops, in nested loops, and after the program has done something else.
#include "pager/tape.hpp"

#include "tests/testing.hpp"

using farpool::pager::never;
using farpool::pager::Tape;

namespace {

// Plays the names and returns the number of names whose next use was known.
int play(Tape& tape, const std::vector<int>& names) {
    int known = 0;
    for (const int name : names) {
        known += tape.record(name, 1, 64, false, 1.0) < never;
    }
    return known;
}

std::vector<int> range(int first, int stop) {
    std::vector<int> names;
    for (int name = first; name < stop; ++name) {
        names.push_back(name);
    }
    return names;
}

}  // namespace

TEST("the second turn of a loop is predicted, with its distances") {
    Tape tape(1 << 12);
    play(tape, range(0, 20));
    play(tape, range(0, 20));
    CHECK_EQUAL(play(tape, range(0, 20)), 20);
    CHECK_EQUAL(tape.now() - tape.pointer(), 20);
    CHECK_EQUAL(tape.volume(tape.pointer(), tape.now()), 20 * 64);
    CHECK_EQUAL(tape.seconds(tape.pointer(), tape.now()), 20.0);
    CHECK_EQUAL(tape.upcoming().at(0), tape.pointer() + 1);
}

TEST("a loop longer than the history is not predicted") {
    Tape tape(16);
    for (int turn = 0; turn < 5; ++turn) {
        CHECK_EQUAL(play(tape, range(0, 40)), 0);
    }
}

TEST("an inserted access does not lose the tape") {
    Tape tape(1 << 12);
    for (int turn = 0; turn < 3; ++turn) {
        play(tape, range(0, 30));
    }
    const std::int64_t before = tape.divergences();
    play(tape, range(0, 10));
    play(tape, {99});
    play(tape, range(10, 30));
    CHECK(tape.followed());
    CHECK(tape.divergences() > before);
}

TEST("a history that wraps around forgets the oldest accesses and continues") {
    Tape tape(64);
    for (int turn = 0; turn < 50; ++turn) {
        play(tape, range(0, 20));
    }
    CHECK_EQUAL(tape.now(), 999);
    CHECK_EQUAL(play(tape, range(0, 20)), 20);
}

TEST("rows of one table in a row are one wildcard") {
    Tape tape(1 << 12);
    tape.record(0, 1, 64, false, 0.0);
    for (int row = 0; row < 10; ++row) {
        CHECK(tape.record_table(7, 0.5) >= never);
    }
    CHECK_EQUAL(tape.now(), 1);
    CHECK_EQUAL(tape.token(1).name, -1);
    CHECK_EQUAL(tape.seconds(0, 1), 5.0);
}

TEST("times that are reported late count from the access that they belong to") {
    Tape early(16);
    Tape late(16);
    for (int name = 0; name < 40; ++name) {
        early.record(name % 10, 1, 64, false, name == 0 ? 0.0 : static_cast<double>(name));
        late.record(name % 10, 1, 64, false, 0.0);
        if (name >= 3) {  // the time after access n is known when access n + 3 has been recorded
            const Tape::Late time{name - 3, static_cast<double>(name - 2)};
            late.add_times({&time, 1});
        }
    }
    late.add_times(std::vector<Tape::Late>{{38, 39.0}, {37, 38.0}, {39, 40.0}});
    CHECK_EQUAL(late.seconds(30, 39), early.seconds(30, 39));
    late.record(0, 1, 64, false, 0.0);
    CHECK_EQUAL(late.seconds(39, 40), 40.0);
}

TEST("times of accesses that the history has forgotten count for all later ones") {
    Tape tape(4);
    for (int name = 0; name < 8; ++name) {
        tape.record(name, 1, 64, false, 0.0);
    }
    const double before = tape.seconds(5, 7);
    tape.add_times(std::vector<Tape::Late>{{1, 100.0}, {5, 3.0}, {6, 4.0}, {6, 5.0}});
    CHECK_EQUAL(tape.seconds(4, 5), 0.0);
    CHECK_EQUAL(tape.seconds(5, 7) - before, 12.0);
    CHECK_EQUAL(tape.seconds(5, 6), 3.0);
}

int main() { return farpool::testing::run(); }
