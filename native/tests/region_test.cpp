// Regions: threads that read, write and advise, tiers that fail, and what the operating system counts.
#include "region/region.hpp"

#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>

#include "core/memory_port.hpp"
#include "tests/testing.hpp"

using namespace farpool;
using farpool::region::Advice;
using farpool::region::Counters;
using farpool::region::Page;
using farpool::region::page_nbytes;
using farpool::region::Region;
using farpool::region::Settings;

namespace {

// What a tier does: it waits, or makes copies, or lets others copy.
enum class Way { waits, copies, lets_copy };
constexpr std::array all_ways{Way::waits, Way::copies, Way::lets_copy};
constexpr std::array ways_that_fail{Way::waits, Way::copies};

// A tier in memory, which may wait, fail and change bytes.
class TestPort : public Port {
public:
    TestPort(std::size_t nbytes, Way way) : memory(nbytes), inner_(memory), way_(way) {}
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override {
        // A page that is read alone is one that a thread waits for: if it fails, it is lost.
        const unsigned call = nbytes > page_nbytes ? calls_++ : 1;
        if (fails_reads || fails(call)) {
            fail_tier("test", "reads fail");
        }
        inner_.read(offset, into, nbytes);
        if (damages || fails(call + 2)) {
            static_cast<char*>(into)[nbytes / 2] ^= 1;
        }
    }
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override {
        if (fails_writes || fails(calls_++)) {
            ++refused;
            fail_tier("test", "writes fail");
        }
        inner_.write(offset, from, nbytes);
    }
    unsigned concurrency() const noexcept override { return 2; }
    bool copies() const noexcept override { return way_ != Way::waits; }
    std::byte* address(std::uint64_t offset, std::size_t nbytes) const override {
        return way_ == Way::lets_copy ? inner_.address(offset, nbytes) : nullptr;
    }

    Memory memory;
    std::atomic<bool> fails_reads = false;
    std::atomic<bool> fails_writes = false;
    std::atomic<bool> damages = false;
    std::atomic<unsigned> fails_each = 0;
    std::atomic<unsigned> refused = 0;  // writes

private:
    bool fails(unsigned call) const { return fails_each > 3 && call % fails_each == 0; }

    std::atomic<unsigned> calls_ = 0;
    MemoryPort inner_;
    Way way_;
};

struct World {
    explicit World(
        Page pages, Page budget, Way way = Way::copies, std::function<void(Settings&)> change = [](Settings&) {})
        : port(std::size_t{pages} * 2 * page_nbytes, way),
          second(std::size_t{pages} * 2 * page_nbytes, way == Way::waits ? Way::copies : Way::waits),
          region([&] {
              Settings settings{.name = "region 'test'", .most = 4 * pages, .budget = budget, .longest = 32, .timeout = 20};
              change(settings);
              return settings;
          }()) {
        region.grow(pages, {{&port, 0, pages, "test", way != Way::lets_copy}});
        bytes = reinterpret_cast<unsigned char*>(region.data());
    }
    ~World() { region.close(); }

    TestPort port;
    TestPort second;  // for a test that grows the region
    Region region;
    unsigned char* bytes;
};

bool is_allowed() {
    static const bool allowed = [] {
        try {
            const Region region({.name = "trial", .most = 16, .budget = 16});
            return true;
        } catch (const PortFailure& failure) {
            std::cout << "skipped: " << failure.what() << "\n";
            return false;
        }
    }();
    return allowed;
}

unsigned char value_at(std::size_t index) { return static_cast<unsigned char>((index * 2654435761u) >> 13); }

void fill(World& world, std::size_t nbytes) {
    for (std::size_t at = 0; at < nbytes; ++at) {
        world.bytes[at] = value_at(at);
    }
}

std::size_t wrong(const World& world, std::size_t nbytes) {
    std::size_t count = 0;
    const volatile unsigned char* const bytes = world.bytes;  // read them even if nobody uses the count
    for (std::size_t at = 0; at < nbytes; ++at) {
        count += bytes[at] != value_at(at) ? 1 : 0;
    }
    return count;
}

// Waits until `holds`, at most 20 s.
bool eventually(const std::function<bool()>& holds) {
    for (int attempt = 0; attempt < 2000; ++attempt) {
        if (holds()) {
            return true;
        }
        std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
    return false;
}

// Runs `body` in a child process, in which SIGBUS ends the process with status 42; its status, and what it wrote to stderr.
std::pair<int, std::string> in_child(const std::function<void()>& body) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    std::cout.flush();
    const pid_t child = fork();
    if (child == 0) {
        dup2(ends[1], STDERR_FILENO);
        alarm(60);
        signal(SIGBUS, [](int) { _exit(42); });
        try {
            body();
        } catch (const std::exception& error) {
            dprintf(STDERR_FILENO, "%s", error.what());
            _exit(1);
        }
        _exit(0);
    }
    close(ends[1]);
    std::string text;
    char part[512];
    for (ssize_t got; (got = read(ends[0], part, sizeof part)) > 0;) {
        text.append(part, static_cast<std::size_t>(got));
    }
    close(ends[0]);
    int status = 0;
    waitpid(child, &status, 0);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status), text};
}

// How a game is played: on tiers of this way, and of which each nth call fails or changes bytes (0: none does).
struct Rules {
    unsigned seed;
    Way way;
    std::string policy;
    unsigned fails_each;
    int steps;
};

constexpr Page first_pages = 256;  // in the first tier, and as many in the second
constexpr Page all_pages = 2 * first_pages;
constexpr Page more_pages = 40;  // by which the region grows and shrinks
constexpr unsigned players = 3;
constexpr Page game_budget = 64;

// Reads and writes pages, each `players`th one, by loads, stores and system calls; the number of differences from `plain`.
int use(const World& world, std::vector<unsigned char>& plain, unsigned player, const Rules& rules) {
    int ends[2];
    if (pipe(ends) != 0) {
        return 1;
    }
    std::mt19937 dice(rules.seed * 31 + player);
    Page walk = player;
    int differences = 0;
    for (int step = 0; step < rules.steps; ++step) {
        const unsigned what = dice() % 100;
        walk = what < 60 ? (walk + players) % (all_pages - players) / players * players + player
                         : dice() % (all_pages / players) * players + player;
        const std::size_t begin = std::size_t{walk} * page_nbytes + dice() % 4000;
        const std::size_t nbytes = 1 + dice() % 90;
        const auto moved = static_cast<ssize_t>(nbytes);
        std::array<unsigned char, 90> other;
        switch (what % 4) {
            case 0:
                for (std::size_t at = begin; at < begin + nbytes; ++at) {
                    plain[at] = world.bytes[at] = static_cast<unsigned char>(dice());
                }
                break;
            case 1:
                differences += std::memcmp(&plain[begin], world.bytes + begin, nbytes) != 0 ? 1 : 0;
                break;
            case 2:
                plain[begin] = static_cast<unsigned char>(dice());
                differences += write(ends[1], &plain[begin], nbytes) != moved ? 1 : 0;
                differences += read(ends[0], world.bytes + begin, nbytes) != moved ? 1 : 0;
                break;
            default:
                differences += write(ends[1], world.bytes + begin, nbytes) != moved ? 1 : 0;
                differences += read(ends[0], other.data(), nbytes) != moved ? 1 : 0;
                differences += std::memcmp(&plain[begin], other.data(), nbytes) != 0 ? 1 : 0;
        }
    }
    close(ends[0]);
    close(ends[1]);
    return differences;
}

// Grows the region, uses the new pages, and shrinks it again.
void resize(World& world) {
    world.region.grow(all_pages + more_pages, {{&world.second, first_pages * page_nbytes, more_pages, "second", true}});
    for (std::size_t page = all_pages; page < all_pages + more_pages; ++page) {
        CHECK_EQUAL(static_cast<int>(world.bytes[page * page_nbytes + 5]), 0);
        world.bytes[page * page_nbytes + 5] = 9;
    }
    world.region.shrink(all_pages);
}

// Gives one piece of advice, or changes the size. True if a tier has refused it.
bool advise(World& world, std::mt19937& dice) {
    const Page first = dice() % all_pages;
    const Page count = 1 + dice() % std::min<Page>(all_pages - first, 40);
    try {
        switch (dice() % 7) {
            case 0:
                world.region.sync(first, count);
                break;
            case 1:
                world.region.will_need(first, count);
                break;
            case 2:
                world.region.dont_need(first, count);
                break;
            case 3:
                world.region.advise(first, count, static_cast<Advice>(dice() % 3));
                break;
            case 4:
                world.region.pin(first, std::min<Page>(count, 8));
                break;
            case 5:
                world.region.unpin(0, all_pages);
                break;
            default:
                resize(world);
        }
    } catch (const PortFailure&) {
        return true;
    }
    return false;
}

void play(const Rules& rules) {
    World world(first_pages, game_budget, rules.way, [&](Settings& settings) { settings.policy = rules.policy; });
    world.region.grow(all_pages, {{&world.second, 0, first_pages, "second", true}});
    for (TestPort* const port : {&world.port, &world.second}) {
        port->fails_each = rules.fails_each;
    }
    std::vector<unsigned char> plain(all_pages * page_nbytes);
    std::atomic<int> differences = 0;
    std::atomic<bool> done = false;
    int refused = 0;
    std::string wrong;  // what a check on the adviser's thread has found
    std::vector<std::thread> threads;
    for (unsigned player = 0; player < players; ++player) {
        threads.emplace_back([&, player] { differences += use(world, plain, player, rules); });
    }
    std::thread adviser([&] {
        std::mt19937 dice(rules.seed);
        try {
            while (!done) {
                refused += advise(world, dice) ? 1 : 0;
                std::this_thread::sleep_for(std::chrono::microseconds(200));
            }
        } catch (const std::exception& error) {
            wrong = error.what();
        }
    });
    for (std::thread& thread : threads) {
        thread.join();
    }
    done = true;
    adviser.join();
    CHECK_EQUAL(wrong, "");
    CHECK_EQUAL(differences.load(), 0);
    if (rules.fails_each == 0) {
        CHECK_EQUAL(refused, 0);
    }
    world.port.fails_each = world.second.fails_each = 0;
    CHECK(std::memcmp(plain.data(), world.bytes, plain.size()) == 0);
    world.region.sync(0, all_pages);
    const std::size_t half = first_pages * page_nbytes;
    CHECK(std::memcmp(plain.data(), world.port.memory.data(), half) == 0);
    CHECK(std::memcmp(plain.data() + half, world.second.memory.data(), half) == 0);
    const Counters counters = world.region.counters();
    CHECK(counters.peak_pages <= game_budget);
    CHECK(counters.backed_bytes <= game_budget * page_nbytes);
    CHECK_EQUAL(counters.lost_pages, 0U);
    CHECK(counters.evicted_pages > game_budget);
}

}  // namespace

TEST("a region four times its budget gives all bytes back, and its memory stays within the budget") {
    for (const Way way : all_ways) {
        if (!is_allowed()) {
            return;
        }
        World world(512, 128, way);
        for (std::size_t page = 0; page < 512; ++page) {
            for (std::size_t at = page * page_nbytes; at < (page + 1) * page_nbytes; ++at) {
                world.bytes[at] = value_at(at);
            }
            CHECK(world.region.counters().backed_bytes <= 128 * page_nbytes);
        }
        for (int pass = 0; pass < 2; ++pass) {
            CHECK_EQUAL(wrong(world, 512 * page_nbytes), 0U);
        }
        const Counters counters = world.region.counters();
        CHECK(counters.backed_bytes <= 128 * page_nbytes);
        CHECK(counters.peak_pages <= 128);
        CHECK(counters.evicted_pages >= 384);
    }
}

TEST("fresh memory reads as zeros, and zeros that were only read are not written below") {
    if (!is_allowed()) {
        return;
    }
    World world(256, 64);
    std::memset(world.port.memory.data(), 7, 256 * page_nbytes);
    for (std::size_t at = 0; at < 256 * page_nbytes; at += 64) {
        CHECK_EQUAL(static_cast<int>(world.bytes[at]), 0);
    }
    CHECK_EQUAL(world.region.counters().written_bytes, 0U);
}

TEST("sync writes every byte below, also bytes written again while they are being saved") {
    if (!is_allowed()) {
        return;
    }
    for (const Way way : all_ways) {
        World world(64, 64, way);
        for (unsigned round = 0; round < 200; ++round) {
            for (std::size_t page = 0; page < 64; ++page) {
                world.bytes[page * page_nbytes + round] = static_cast<unsigned char>(round + page);
            }
            world.region.sync(0, 64);
            CHECK(std::memcmp(world.port.memory.data(), world.bytes, 64 * page_nbytes) == 0);
        }
    }
}

TEST("threads that read, write and are advised see what a plain array holds") {
    if (!is_allowed()) {
        return;
    }
    unsigned seed = 0;
    for (const std::string policy : {"sieve", "lru", "s3-fifo"}) {
        for (const Way way : all_ways) {
            play({++seed, way, policy, 0, 4000});
        }
    }
}

TEST("threads see what a plain array holds while tiers refuse writes, fail to read runs, and damage them") {
    if (!is_allowed()) {
        return;
    }
    for (const unsigned seed : {101u, 102u}) {
        for (const Way way : ways_that_fail) {
            play({seed, way, "sieve", 7, 4000});
        }
    }
}

TEST("a walk through a region is loaded ahead, and random accesses are not") {
    if (!is_allowed()) {
        return;
    }
    World world(1024, 128);
    fill(world, 1024 * page_nbytes);
    world.region.sync(0, 1024);
    const Counters before = world.region.counters();
    for (int pass = 0; pass < 2; ++pass) {
        CHECK_EQUAL(wrong(world, 1024 * page_nbytes), 0U);
    }
    const Counters walked = world.region.counters();
    CHECK(walked.ahead_used - before.ahead_used > 1024);
    CHECK(walked.faults - before.faults < 512);
    std::mt19937 dice(5);
    unsigned sum = 0;
    for (int step = 0; step < 2000; ++step) {
        sum += world.bytes[dice() % 1024 * page_nbytes];
    }
    CHECK(sum > 0);
    CHECK(world.region.counters().ahead_pages - walked.ahead_pages < 200);
}

TEST("a system call reads into pages that are not in memory, and writes from them") {
    if (!is_allowed()) {
        return;
    }
    World world(256, 64);
    fill(world, 256 * page_nbytes);
    int ends[2];
    CHECK(pipe(ends) == 0);
    for (std::size_t page = 0; page < 128; ++page) {
        CHECK_EQUAL(write(ends[1], world.bytes + page * page_nbytes, page_nbytes), static_cast<ssize_t>(page_nbytes));
        CHECK_EQUAL(read(ends[0], world.bytes + (page + 128) * page_nbytes, page_nbytes), static_cast<ssize_t>(page_nbytes));
    }
    close(ends[0]);
    close(ends[1]);
    CHECK(std::memcmp(world.bytes, world.bytes + 128 * page_nbytes, 128 * page_nbytes) == 0);
}

TEST("pinned pages stay in memory, and not more than half of the budget can be pinned") {
    if (!is_allowed()) {
        return;
    }
    World world(256, 64);
    fill(world, 256 * page_nbytes);
    CHECK(!world.region.pin(0, 33));
    CHECK(world.region.pin(8, 16));
    CHECK_EQUAL(wrong(world, 256 * page_nbytes), 0U);
    const std::uint64_t faults = world.region.counters().demand_pages;
    for (std::size_t page = 8; page < 24; ++page) {
        CHECK_EQUAL(world.bytes[page * page_nbytes], value_at(page * page_nbytes));
    }
    CHECK_EQUAL(world.region.counters().demand_pages, faults);
    world.region.unpin(0, 256);
    CHECK(world.region.pin(100, 32));
}

TEST("pages of no more need leave memory, and come back when they are used") {
    if (!is_allowed()) {
        return;
    }
    World world(64, 64);
    fill(world, 64 * page_nbytes);
    world.region.dont_need(0, 64);
    CHECK(eventually([&] {
        world.region.dont_need(0, 64);
        return world.region.counters().backed_bytes == 0;
    }));
    CHECK_EQUAL(wrong(world, 64 * page_nbytes), 0U);
    world.region.sync(0, 64);
    world.region.dont_need(0, 64);
    world.region.will_need(0, 32);
    CHECK(eventually([&] { return world.region.counters().resident_pages == 32; }));
}

TEST("a region that has become smaller and larger again has zeros in its new pages") {
    if (!is_allowed()) {
        return;
    }
    World world(128, 32);
    fill(world, 128 * page_nbytes);
    CHECK_EQUAL(world.region.shrink(40), 128U);  // the only extent is still in use
    CHECK_EQUAL(wrong(world, 40 * page_nbytes), 0U);
    world.region.grow(200, {{&world.port, 128 * page_nbytes, 100, "test", true}});
    CHECK_EQUAL(wrong(world, 40 * page_nbytes), 0U);
    for (std::size_t at = 40 * page_nbytes; at < 200 * page_nbytes; at += 512) {
        CHECK_EQUAL(static_cast<int>(world.bytes[at]), 0);
    }
    fill(world, 200 * page_nbytes);
    CHECK_EQUAL(wrong(world, 200 * page_nbytes), 0U);
}

TEST("bytes that a tier does not give back are answered with SIGBUS and a message") {
    if (!is_allowed()) {
        return;
    }
    for (const Way way : ways_that_fail) {
        const auto [status, text] = in_child([&] {
            World world(256, 64, way);
            fill(world, 256 * page_nbytes);
            world.port.fails_reads = true;
            wrong(world, 256 * page_nbytes);
        });
        CHECK_EQUAL(status, 42);
        CHECK(text.find("farpool: region 'test': bytes 0 to 4096 cannot be read: test: reads fail") != std::string::npos);
    }
}

TEST("bytes that come back damaged are answered with SIGBUS and a message") {
    if (!is_allowed()) {
        return;
    }
    const auto [status, text] = in_child([&] {
        World world(256, 64);
        fill(world, 256 * page_nbytes);
        world.port.damages = true;
        wrong(world, 256 * page_nbytes);
    });
    CHECK_EQUAL(status, 42);
    CHECK(text.find("are not those that were written") != std::string::npos);
}

TEST("a tier that refuses writes loses nothing: sync raises, and writes go on when the tier does") {
    if (!is_allowed()) {
        return;
    }
    World world(256, 64);
    fill(world, 128 * page_nbytes);
    world.region.sync(0, 128);
    world.port.fails_writes = true;
    fill(world, 8 * page_nbytes);
    CHECK_THROWS(PortFailure, world.region.sync(0, 8));
    // Clean pages still come and go.
    for (int pass = 0; pass < 3; ++pass) {
        CHECK_EQUAL(wrong(world, 128 * page_nbytes), 0U);
    }
    std::atomic<bool> filled = false;
    std::thread writer([&] {
        fill(world, 256 * page_nbytes);
        filled = true;
    });
    CHECK(eventually([&] { return world.region.counters().waits_for_room > 0; }));
    CHECK(!filled);
    world.port.fails_writes = false;
    writer.join();
    CHECK_EQUAL(wrong(world, 256 * page_nbytes), 0U);
    world.region.sync(0, 256);
    CHECK(std::memcmp(world.port.memory.data(), world.bytes, 256 * page_nbytes) == 0);
}

TEST("a tier that refuses writes for good does not stop the pages of another tier") {
    if (!is_allowed()) {
        return;
    }
    World world(128, 64);
    world.region.grow(256, {{&world.second, 0, 128, "second", true}});
    world.port.fails_writes = true;
    fill(world, 24 * page_nbytes);
    CHECK_THROWS(PortFailure, world.region.sync(0, 24));
    const std::size_t half = 128 * page_nbytes;
    for (std::size_t at = half; at < 2 * half; ++at) {
        world.bytes[at] = value_at(at);
    }
    std::size_t differences = 0;
    for (std::size_t at = half; at < 2 * half; ++at) {
        differences += world.bytes[at] != value_at(at) ? 1 : 0;
    }
    CHECK_EQUAL(differences, 0U);
    CHECK_EQUAL(wrong(world, 24 * page_nbytes), 0U);
    // The pages of the other tier left memory without a trial of this one each time.
    CHECK(world.region.counters().waits_for_room < 24);
    CHECK(world.port.refused < 24);
    world.port.fails_writes = false;
    world.region.sync(0, 256);
    CHECK(std::memcmp(world.port.memory.data(), world.bytes, 24 * page_nbytes) == 0);
    CHECK(std::memcmp(world.second.memory.data(), world.bytes + half, half) == 0);
}

TEST("memory full of bytes that no tier takes ends the access with SIGBUS, not with a hang") {
    if (!is_allowed()) {
        return;
    }
    const auto [status, text] = in_child([&] {
        World world(256, 64, Way::copies, [](Settings& settings) { settings.timeout = 0.2; });
        world.port.fails_writes = true;
        fill(world, 256 * page_nbytes);
    });
    CHECK_EQUAL(status, 42);
    CHECK(text.find("writes fail") != std::string::npos);
}

// What a program does that locks its memory: pages must leave it all the same.
void lock_and_use(const std::function<bool(World&)>& lock) {
    World world(256, 64);
    if (!lock(world)) {
        std::cout << "skipped: this process may not lock its memory\n";
        return;
    }
    fill(world, 256 * page_nbytes);
    CHECK_EQUAL(wrong(world, 256 * page_nbytes), 0U);
    CHECK(world.region.counters().backed_bytes <= 64 * page_nbytes);
}

TEST("a program that locks a region's memory loses no byte, and the budget holds") {
    if (!is_allowed()) {
        return;
    }
    lock_and_use([](World& world) { return mlock(world.bytes, 256 * page_nbytes) == 0; });
}

TEST("a region of a program that locks all memory to come stays within its budget") {
    if (!is_allowed()) {
        return;
    }
    const auto [status, text] = in_child([&] {
        if (mlockall(MCL_FUTURE) == 0) {
            lock_and_use([](World&) { return true; });
        }
    });
    CHECK_EQUAL(text, "");
    CHECK_EQUAL(status, 0);
}

TEST("writes to pages that were loaded ahead are kept") {
    if (!is_allowed()) {
        return;
    }
    for (const Way way : all_ways) {
        World world(512, 256, way);
        fill(world, 512 * page_nbytes);
        const auto leave = [&] {
            world.region.dont_need(0, 512);
            return world.region.counters().resident_pages == 0;
        };
        for (Page round = 0; round < 4; ++round) {
            world.region.sync(0, 512);
            CHECK(eventually(leave));
            const Page begin = 100 * round;
            Page page = begin;
            CHECK(eventually([&] {
                CHECK_EQUAL(world.bytes[page * page_nbytes + 9], value_at(page * page_nbytes + 9));
                ++page;
                return world.region.counters().resident_pages >= page - begin + 12;
            }));
            const Page end = page + 12;
            for (Page written = page; written < end; written += 3) {
                world.bytes[written * page_nbytes] = static_cast<unsigned char>(written + round);
            }
            CHECK(eventually(leave));
            for (; page < end; page += 3) {
                CHECK_EQUAL(static_cast<int>(world.bytes[page * page_nbytes]),
                            static_cast<int>(static_cast<unsigned char>(page + round)));
            }
        }
    }
}

TEST("a forked child that lives on keeps no memory of a region that was closed") {
    if (!is_allowed()) {
        return;
    }
    int closed[2];
    CHECK(pipe(closed) == 0);
    pid_t child = 0;
    {
        World world(64, 64);
        fill(world, 64 * page_nbytes);
        child = fork();
        if (child == 0) {
            alarm(60);
            close(closed[1]);
            char none;
            (void)!read(closed[0], &none, 1);  // until the parent has closed the region
            std::uint64_t kept = 0;
            for (int fd = 3; fd < 256; ++fd) {
                const std::string link = "/proc/self/fd/" + std::to_string(fd);
                char target[64] = {};
                struct stat file{};
                if (readlink(link.c_str(), target, sizeof target - 1) > 0 &&
                    std::strstr(target, "memfd:farpool-region") != nullptr && fstat(fd, &file) == 0) {
                    kept += static_cast<std::uint64_t>(file.st_blocks) + (kept == 0 ? 1 : 0);
                }
            }
            _exit(kept == 1 ? 0 : kept == 0 ? 2 : 1);  // the file was found, and is empty
        }
    }
    close(closed[0]);
    close(closed[1]);
    int status = 0;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status));
    CHECK_EQUAL(WEXITSTATUS(status), 0);
}

TEST("a forked child has no such memory") {
    if (!is_allowed()) {
        return;
    }
    World world(16, 16);
    fill(world, 16 * page_nbytes);
    const auto [status, text] = in_child([&] {
        signal(SIGSEGV, [](int) { _exit(43); });
        const volatile unsigned char value = world.bytes[0];
        (void)value;
    });
    CHECK_EQUAL(status, 43);
    CHECK_EQUAL(wrong(world, 16 * page_nbytes), 0U);
}

int main() { return testing::run(); }
