// Guesses which pages a thread needs next, and whether such guesses pay.
//
// A thread may walk through several arrays in turn, so each thread has several *trails*: places at which it needed pages and
// went on at the next. A thread that takes steps of another length has one step that most of its latest faults took (`Strides`,
// after Leap: Al Maruf and Chowdhury, "Effectively Prefetching Remote Memory with Leap", USENIX ATC 2020).
//
// The length of runs grows while a trail goes on. Its limit follows from what became of earlier runs: it is halved if many
// pages left memory unused, and doubled if nearly all were used. A limit of one page means that nothing is loaded ahead; the
// limit rises again when trails go on that would have been guessed.
#pragma once

#include <array>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "pager/strides.hpp"
#include "region/mapping.hpp"

namespace farpool::region {

struct Run {
    Page first;
    Page count;
};

class Streams {
public:
    // `longest`: pages of the longest run.
    explicit Streams(Page longest) : longest_(longest), limit_(longest) {}

    // Notes that a thread needed `count` pages from `first` on; the runs that it needs next, the soonest first. `eager`: the
    // program has said that it reads on. `loaded`: the pages had been loaded ahead, so the thread may have used some between
    // unseen.
    std::vector<Run> note(std::uint32_t thread, Page first, Page count, bool eager, bool loaded = false);
    // Pages from `first` on that the thread needs next if it goes on as before: 1 if it is on no trail there.
    Page expected(std::uint32_t thread, Page first) const;
    // Notes that a thread writes to a page that was protected; the number of pages from there on that it probably writes.
    Page note_write(std::uint32_t thread, Page page);
    // Note what became of pages that were loaded ahead.
    void used(Page count) { judge(count, 0); }
    void wasted(Page count) { judge(0, count); }
    Page limit() const noexcept { return limit_; }

private:
    struct Trail {
        Page next = 0;
        Page length = 0;  // of the run that follows; 0: there is no trail here
        std::uint64_t noted = 0;
    };
    struct Thread {
        std::array<Trail, 8> trails;
        pager::Strides strides;
        Page write_next = 0;
        Page write_length = 0;
        std::uint64_t noted = 0;
    };

    Thread& of(std::uint32_t thread);
    void judge(Page used, Page wasted);

    const Page longest_;
    Page limit_;
    Page used_ = 0;
    Page wasted_ = 0;
    Page missed_ = 0;  // steps that would have been guessed, while the limit was 1
    std::uint64_t notes_ = 0;
    std::unordered_map<std::uint32_t, Thread> threads_;
};

}  // namespace farpool::region
