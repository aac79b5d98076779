// Which pages are guessed ahead, and when guessing stops.
#include "region/streams.hpp"

#include "tests/testing.hpp"

using farpool::region::Page;
using farpool::region::Run;
using farpool::region::Streams;

TEST("the runs of a walk double until they have the longest length") {
    Streams streams(64);
    CHECK(streams.note(1, 10, 1, false).empty());
    Page at = 11;
    Page length = 1;
    for (int step = 0; step < 8; ++step) {
        const std::vector<Run> runs = streams.note(1, at, length, false);
        CHECK_EQUAL(runs.size(), runs[0].count < 64 ? 1U : 2U);
        CHECK_EQUAL(runs[0].first, at + length);
        at += length;
        length = runs[0].count;
        CHECK_EQUAL(runs.back().first, at + (runs.size() - 1) * length);
    }
    CHECK_EQUAL(length, 64U);
}

TEST("a thread that walks through several arrays in turn has a trail in each") {
    Streams streams(64);
    for (Page step = 0; step < 4; ++step) {
        for (const Page array : {0u, 1000u, 3100u, 3900u, 7000u}) {  // no steps of one length
            CHECK_EQUAL(streams.note(1, array + step, 1, false).empty(), step == 0);
        }
    }
}

TEST("threads do not disturb each other") {
    Streams streams(64);
    streams.note(1, 10, 1, false);
    streams.note(2, 11, 1, false);
    CHECK_EQUAL(streams.note(1, 11, 1, false).size(), 1U);
}

TEST("a thread that takes steps is given the pages of the next steps") {
    Streams streams(64);
    std::vector<Run> runs;
    for (Page step = 0; step < 8; ++step) {
        runs = streams.note(1, 100 + 7 * step, 1, false);
    }
    CHECK(runs.size() > 1);
    CHECK_EQUAL(runs[0].first, 100U + 7 * 8);
    CHECK_EQUAL(runs[0].count, 1U);
}

TEST("wasted pages shorten the runs until nothing is guessed, and walks begin again with short ones") {
    Streams streams(64);
    for (int round = 0; round < 64; ++round) {
        streams.wasted(256);
    }
    CHECK_EQUAL(streams.limit(), 1U);
    CHECK(streams.note(1, 10, 1, false).empty());
    CHECK(streams.note(1, 11, 1, false).empty());
    for (Page step = 12; step < 80; ++step) {
        streams.note(1, step, 1, false);
    }
    CHECK_EQUAL(streams.limit(), 8U);
    for (int round = 0; round < 64; ++round) {
        streams.used(256);
    }
    CHECK_EQUAL(streams.limit(), 64U);
}

TEST("a walk that writes lets through twice as many pages each time") {
    Streams streams(16);
    CHECK_EQUAL(streams.note_write(1, 5), 1U);
    CHECK_EQUAL(streams.note_write(1, 6), 2U);
    CHECK_EQUAL(streams.note_write(1, 8), 4U);
    CHECK_EQUAL(streams.note_write(1, 30), 1U);
}

TEST("a walk goes on after pages that the thread used unseen, if they had been loaded ahead") {
    Streams streams(64);
    streams.note(1, 10, 1, false);
    CHECK_EQUAL(streams.note(1, 11, 1, false, true)[0].count, 2U);   // loads 12 and 13
    CHECK_EQUAL(streams.note(1, 14, 4, false, true)[0].first, 18U);  // the thread used 12 and 13 unseen
    CHECK(streams.note(1, 20, 1, false).empty());                    // a page that was not loaded is on no walk
    CHECK(streams.note(1, 18 + 9, 1, false, true).empty());          // this one is too far
    CHECK_EQUAL(streams.note(1, 18, 4, false, true)[0].first, 22U);
}

int main() { return farpool::testing::run(); }
