// Times of a node's answers, and when it has been late for many of them in a row.
#include "wire/answer_times.hpp"

#include <atomic>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <thread>
#include <vector>

#include "tests/testing.hpp"

using farpool::AnswerTimes;
using farpool::late_answer_seconds;
using farpool::late_answers;
using farpool::late_seconds;

namespace {

constexpr double prompt = late_answer_seconds / 10;
constexpr double late = late_answer_seconds * 10;

// Adds the same time again and again, so many seconds apart; the clock goes on from `now`.
void add(AnswerTimes& times, double& now, double seconds, std::uint32_t count, double every = 0.1) {
    for (std::uint32_t number = 0; number < count; ++number) {
        times.add(seconds, now += every);
    }
}

bool near(double value, double expected) { return std::abs(value - expected) < 0.01 * expected; }

}  // namespace

TEST("without answers there is no time and nothing is late") {
    AnswerTimes times;
    CHECK_EQUAL(times.seconds(), 0.0);
    CHECK_EQUAL(times.last(), 0.0);
    CHECK(!times.late());
    CHECK_EQUAL(times.take_late(), 0.0);
}

TEST("the smoothed time follows the answers, and the last one is kept as it is") {
    AnswerTimes times;
    double now = 0;
    add(times, now, prompt, 1);
    CHECK(near(times.seconds(), prompt));
    add(times, now, late, 100);
    CHECK(near(times.seconds(), late));
    add(times, now, prompt, 1);
    CHECK_EQUAL(times.last(), prompt);
    CHECK(times.seconds() > late / 2);
}

TEST("single answers change the smoothed time little, whatever they take") {
    for (const double seconds : {-1.0, 0.0, 1e9, std::numeric_limits<double>::infinity()}) {
        AnswerTimes times;
        double now = 0;
        add(times, now, prompt, 100);
        add(times, now, seconds, 1);
        CHECK(times.seconds() > 0);
        CHECK(times.seconds() < 2 * late_answer_seconds);
        CHECK(!times.late());
    }
}

TEST("a node is late after so many late answers that last so long, and not before") {
    AnswerTimes times;
    double now = 0;
    add(times, now, late, late_answers - 1);
    CHECK(!times.late());
    add(times, now, late, 1);
    CHECK(times.late());

    AnswerTimes together;
    now = 0;
    add(together, now, late, 100 * late_answers, late_seconds / 1000 / late_answers);
    CHECK(!together.late());
    add(together, now, late, 1, late_seconds);
    CHECK(together.late());
}

TEST("a report is taken once, and the next one needs as many answers") {
    AnswerTimes times;
    double now = 0;
    add(times, now, late, late_answers);
    const double first = times.take_late();
    CHECK(first > late_answer_seconds);
    CHECK(first <= late);
    CHECK_EQUAL(times.take_late(), 0.0);
    add(times, now, late, late_answers - 1);
    CHECK(!times.late());
    add(times, now, late, 1);
    CHECK(times.take_late() > 0.5 * late);
}

TEST("a report has the smallest smoothed time of its late answers") {
    AnswerTimes times;
    double now = 0;
    add(times, now, late, 100);
    times.take_late();
    add(times, now, 10 * late, 100);
    CHECK(times.take_late() < 3 * late);
    add(times, now, 10 * late, 100);
    CHECK(near(times.take_late(), 10 * late));
}

TEST("prompt answers that bring the smoothed time down end a run, and single ones do not") {
    AnswerTimes times;
    double now = 0;
    add(times, now, late, late_answers - 1);
    add(times, now, prompt, 1);
    add(times, now, late, 1);
    CHECK(times.late());

    AnswerTimes ended;
    now = 0;
    add(ended, now, late, late_answers - 1);
    add(ended, now, prompt, 100);
    add(ended, now, late, late_answers - 1);
    CHECK(!ended.late());
}

TEST("several threads may add and take at the same time") {
    AnswerTimes times;
    std::atomic<int> wrong{0};
    std::vector<std::thread> threads;
    for (int number = 0; number < 4; ++number) {
        threads.emplace_back([&] {
            double now = 0;
            for (int round = 0; round < 1000; ++round) {
                add(times, now, late, 10);
                const double taken = times.take_late();
                wrong += taken == 0 || (taken > late_answer_seconds && taken < 1.01 * late) ? 0 : 1;
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    CHECK_EQUAL(wrong.load(), 0);
    CHECK(near(times.seconds(), late));
}

int main() { return farpool::testing::run(); }
