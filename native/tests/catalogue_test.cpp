// A tenant's objects and what a node lends, without the node round them.
#include "node/catalogue/catalogue.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <random>
#include <set>
#include <string>

#include "core/crc32c.hpp"
#include "node/catalogue/nvme.hpp"
#include "tests/folder.hpp"
#include "tests/testing.hpp"

using farpool::Budget;
using farpool::Catalogue;
using farpool::Found;
using farpool::Keep;
using farpool::ObjectHead;
using farpool::Status;
using farpool::testing::Folder;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

// A system that gives memory to each file up to a limit, or to all `together`, and then refuses more; some calls are
// interrupted first.
struct System {
    System() { present = this; }
    ~System() { present = nullptr; }
    System(const System&) = delete;
    System& operator=(const System&) = delete;
    static System* present;

    std::uint64_t taken_with(int fd) {
        if (!together) {
            files.clear();
        }
        files.insert(fd);
        std::uint64_t sum = 0;
        for (const int file : files) {
            struct stat status{};
            CHECK(fstat(file, &status) == 0);
            sum += static_cast<std::uint64_t>(status.st_blocks) * 512;
        }
        return sum;
    }

    bool together = false;
    std::set<int> files;  // that have asked; all stay open as long as the test runs
    std::uint64_t most = ~std::uint64_t{0};
    int refusal = ENOSPC;
    int interruptions = 0;
};
System* System::present = nullptr;

// A wall clock that stands still until it is moved, for as long as this exists.
struct StoppedClock {
    explicit StoppedClock(std::uint64_t milliseconds) { now = milliseconds; }
    ~StoppedClock() { now = 0; }
    StoppedClock(const StoppedClock&) = delete;
    StoppedClock& operator=(const StoppedClock&) = delete;
    static std::uint64_t now;  // 0: the system's clock counts
};
std::uint64_t StoppedClock::now = 0;

Catalogue opened(const Folder& folder, Budget& budget, std::uint32_t tenant = 0) {
    std::string note;
    return Catalogue(folder.path(), tenant, budget, nullptr, true, note);
}

Found announced(Catalogue& objects, const std::string& key, std::uint64_t nbytes) {
    return objects.prepare(key, nbytes, ObjectHead{}, Catalogue::Arrival::in_slices);
}

Status put(Catalogue& objects, const std::string& key, std::uint64_t nbytes, std::uint32_t cost_us = 0) {
    ObjectHead head{};
    head.recompute_us = cost_us;
    const Found place = objects.prepare(key, nbytes, head);
    return place.status == Status::done ? objects.commit(place.offset, place.serial, 0).status : place.status;
}

// Puts so many objects of 100 kB, each of which has to be taken.
void put_small(Catalogue& objects, int count) {
    for (int number = 0; number < count; ++number) {
        CHECK(put(objects, std::to_string(number), 100'000) == Status::done);
    }
}

// Extends a prepared payload as a connection does when bytes come; false where there was no room.
bool arrives(Catalogue& objects, const Found& place, std::uint64_t nbytes) {
    while (objects.writable(place.offset) < nbytes) {
        if (objects.extend(place.offset) != Status::done) {
            return false;
        }
    }
    return true;
}

}  // namespace

// Instead of the system's: the wall clock may stand.
extern "C" int clock_gettime(clockid_t clock, timespec* time) noexcept {
    if (clock != CLOCK_REALTIME || StoppedClock::now == 0) {
        return static_cast<int>(syscall(SYS_clock_gettime, clock, time));
    }
    time->tv_sec = static_cast<time_t>(StoppedClock::now / 1000);
    time->tv_nsec = static_cast<long>(StoppedClock::now % 1000 * 1'000'000);
    return 0;
}

// Instead of the system's: it refuses as a file system does that is full, if anything a little early.
extern "C" int posix_fallocate(int fd, off_t offset, off_t nbytes) {
    if (System* const system = System::present; system != nullptr) {
        if (system->interruptions > 0) {
            --system->interruptions;
            return EINTR;
        }
        if (system->taken_with(fd) + static_cast<std::uint64_t>(nbytes) > system->most) {
            return system->refusal;
        }
    }
    return fallocate(fd, 0, offset, nbytes) == 0 ? 0 : errno;
}

TEST("where the system has less memory than is lent, objects go for those that come") {
    for (const std::uint64_t nbytes : {std::uint64_t{16'448}, std::uint64_t{300'000}, std::uint64_t{1000}}) {
        System system;
        const Folder folder;
        Budget budget{16 * mib};
        Catalogue objects = opened(folder, budget);
        system.most = 4 * mib;
        CHECK(put(objects, "kept", nbytes) == Status::done);
        CHECK(objects.touch("kept", 0, Keep::keep).status == Status::done);
        for (std::uint64_t at = 0; at < 32 * mib; at += nbytes) {
            CHECK(put(objects, std::to_string(at), nbytes) == Status::done);
            CHECK(objects.find(std::to_string(at), false).status == Status::done);
        }
        CHECK(objects.find("kept", false).status == Status::done);
        CHECK(budget.backed() <= system.most);
        CHECK(objects.counts().payload_bytes > 3 * mib);  // not many more go than have to
        system.most = ~std::uint64_t{0};
        for (std::uint64_t at = 0; at < 32 * mib; at += nbytes) {
            CHECK(put(objects, "later " + std::to_string(at), nbytes) == Status::done);
        }
        CHECK(objects.counts().payload_bytes > 12 * mib);
    }
}

TEST("an object in slices evicts others if the system has no more memory, and is refused if none may be evicted") {
    System system;
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    system.most = 6 * mib;
    put_small(objects, 100);
    const Found one = announced(objects, "one", 4 * mib);
    CHECK(one.status == Status::done && arrives(objects, one, 4 * mib));
    CHECK(announced(objects, "other", 4 * mib).status == Status::full);
    CHECK(put(objects, "small", 2 * mib) == Status::full);
    CHECK(put(objects, "small", mib) == Status::done);
    CHECK(objects.commit(one.offset, one.serial, 0).status == Status::done);
    CHECK(put(objects, "large", 4 * mib) == Status::done);
    CHECK(objects.find("one", false).status == Status::missing);
}

TEST("an object that would not fit if all others left lets none of them go") {
    System system;
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    system.most = 4 * mib;
    put_small(objects, 30);
    CHECK(put(objects, "large", 8 * mib) == Status::full);
    const Found large = announced(objects, "large", 8 * mib);  // there is memory for its first slice
    CHECK(large.status == Status::done && !arrives(objects, large, 8 * mib));
    CHECK(objects.abort(large.offset, large.serial));
    CHECK_EQUAL(objects.counts().evictions, 0u);
    CHECK(put(objects, "not so large", 2 * mib) == Status::done);
}

TEST("an object in slices stops without evicting when other programs take the memory that was left for it") {
    System system;
    const Folder folder;
    std::uint64_t others = 0;
    Budget budget{16 * mib, {}, [&] { return 12 * mib - std::min(12 * mib, budget.backed() + others); }};
    Catalogue objects = opened(folder, budget);
    system.most = 12 * mib;
    put_small(objects, 30);
    const Found place = announced(objects, "large", 8 * mib);
    CHECK(place.status == Status::done && arrives(objects, place, 2 * mib));
    others = 6 * mib;
    system.most -= others;
    CHECK(!arrives(objects, place, 8 * mib));
    CHECK_EQUAL(objects.counts().evictions, 0u);
    others = 3 * mib;
    system.most = 9 * mib;
    CHECK(arrives(objects, place, 8 * mib));
    CHECK(objects.counts().evictions > 0u && objects.counts().evictions < 30u);
}

TEST("where the system has less memory than is lent, who comes later gets a share of what there is") {
    System system;
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue first = opened(folder, budget, 1);
    Catalogue second = opened(folder, budget, 2);
    system.together = true;
    system.most = 5 * mib;  // less than the first one's half of the limit
    put_small(first, 200);
    put_small(second, 200);
    CHECK(first.counts().payload_bytes > mib);
    CHECK(second.counts().payload_bytes > mib);
}

TEST("where the system has less memory than is lent, some objects are forgotten and others go to the file") {
    System system;
    const Folder folder;
    Budget budget{16 * mib};
    farpool::Nvme nvme(folder.path() + "/shelf", 64 * mib, true, [] {});
    std::string note;
    Catalogue objects(folder.path(), 0, budget, &nvme, true, note);
    system.most = 4 * mib;
    put_small(objects, 100);
    nvme.close();
    CHECK(objects.counts().evictions > 0u);  // on their way they would keep their memory
    CHECK(objects.counts().demotions > 0u);
}

TEST("a call that was interrupted is made again, and a refusal for another reason lets no object go") {
    System system;
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    for (int number = 0; number < 100; ++number) {
        system.interruptions = 5;
        CHECK(put(objects, std::to_string(number), 100'000) == Status::done);
    }
    system.most = mib;
    system.refusal = EFBIG;
    CHECK(put(objects, "another", mib) == Status::full);
    CHECK_EQUAL(objects.counts().evictions, 0u);
}

TEST("an announced object is charged a slice at a time, and an abort gives all its bytes back") {
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    const Found place = announced(objects, "large", 10 * mib);
    CHECK(place.status == Status::done);
    constexpr std::uint64_t slice = mib / 8;
    CHECK(budget.used() <= slice + 128);
    for (std::uint64_t slices = 2; slices <= 80; ++slices) {
        CHECK(objects.extend(place.offset) == Status::done);
        CHECK_EQUAL(objects.writable(place.offset), slices * slice);
        CHECK(budget.used() <= slices * slice + 128);
    }
    CHECK(objects.abort(place.offset, place.serial));
    CHECK_EQUAL(budget.used(), 0u);
    CHECK(!objects.may_announce(16 * mib + 1));
}

TEST("random puts, in slices or not, keep the accounts right and stay within the node's bytes") {
    for (unsigned seed = 0; seed < 30; ++seed) {
        std::mt19937 random(seed);
        const Folder folder;
        Budget budget{8 * mib};
        Catalogue objects = opened(folder, budget);
        std::map<std::string, std::pair<Found, std::uint64_t>> arriving;
        for (int step = 0; step < 600; ++step) {
            const std::string key = std::to_string(random() % 60);
            const std::uint64_t nbytes = random() % (random() % 4 == 0 ? 5 * mib : 100'000);
            switch (random() % 5) {
                case 0:
                    if (!arriving.contains(key)) {
                        const Found place = announced(objects, key, nbytes);
                        if (place.status == Status::done) {
                            arriving.emplace(key, std::pair(place, nbytes));
                        }
                    }
                    break;
                case 1:
                    if (!arriving.empty()) {
                        const auto [place, size] = arriving.begin()->second;
                        const bool whole = arrives(objects, place, size);
                        if (whole) {
                            CHECK(objects.commit(place.offset, place.serial, 0).status != Status::unknown);
                        } else {
                            CHECK(objects.abort(place.offset, place.serial));
                        }
                        arriving.erase(arriving.begin());
                    }
                    break;
                case 2:
                    if (!arriving.empty()) {
                        static_cast<void>(objects.extend(arriving.rbegin()->second.first.offset));
                    }
                    break;
                case 3:
                    static_cast<void>(objects.remove(key));
                    break;
                default:
                    static_cast<void>(put(objects, key, nbytes));
            }
            CHECK_EQUAL(budget.used(), objects.used());
            CHECK(budget.used() <= budget.limit());
            CHECK(budget.taken() <= budget.limit() + 4096);
        }
        for (const auto& [key, one] : arriving) {
            CHECK(objects.abort(one.first.offset, one.first.serial));
        }
        for (int key = 0; key < 60; ++key) {
            static_cast<void>(objects.remove(std::to_string(key)));
        }
        CHECK_EQUAL(objects.used(), objects.tables());
    }
}

TEST("an extension that finds no room leaves what there is as it was") {
    const Folder folder;
    constexpr std::uint64_t slice = mib / 8;
    Budget budget{4 * mib - slice / 2};
    Catalogue objects = opened(folder, budget);
    const Found one = announced(objects, "one", 20 * slice);
    const Found other = announced(objects, "other", 12 * slice);
    CHECK(one.status == Status::done && other.status == Status::done);
    CHECK(arrives(objects, one, 20 * slice - 200));
    const std::uint64_t used = budget.used();
    CHECK(objects.extend(other.offset) == Status::full);  // there is room for the next slice, and not for the rest
    CHECK_EQUAL(budget.used(), used);
    CHECK(objects.writable(other.offset) <= slice);
    CHECK(objects.commit(one.offset, one.serial, 0).status == Status::done);
    CHECK(arrives(objects, other, 12 * slice - 200));  // the node may evict the committed object
    CHECK(objects.find("one", false).status == Status::missing);
}

TEST("a tenant's kept objects leave room for the shares of all expected tenants") {
    const Folder folder;
    Budget budget{16 * mib, {{7, 4 * mib}}};
    Catalogue one = opened(folder, budget, 1);
    CHECK_EQUAL(budget.share_of_fixed(1), 12 * mib);
    budget.expect({1, 2, 3, 7});
    CHECK_EQUAL(budget.share(1), 12 * mib);
    CHECK_EQUAL(budget.share_of_fixed(1), 4 * mib);
    CHECK_EQUAL(budget.share_of_fixed(7), 4 * mib);
    CHECK_EQUAL(budget.share_of_fixed(9), 3 * mib);
    for (int number = 0; number < 11; ++number) {
        CHECK(put(one, std::to_string(number), mib - 1024) == Status::done);
    }
    int kept = 0;
    for (int number = 0; number < 11; ++number) {
        kept += one.touch(std::to_string(number), 0, Keep::keep).status == Status::done ? 1 : 0;
    }
    CHECK_EQUAL(kept, 3);  // of 4 MiB, because an eighth is reserved for objects that can be evicted
    CHECK(budget.may_fix(2, 4 * mib));
    CHECK(!budget.may_fix(2, 4 * mib + 64));
}

TEST("an object that was used lately is not evicted because its neighbour is") {
    const Folder folder;
    Budget budget{mib};
    Catalogue objects = opened(folder, budget);
    std::uint64_t nbytes = 10'000;
    for (int number = 0; number < 2000; ++number) {  // each larger than any hole: at last holes have to be made
        CHECK(put(objects, std::to_string(number), nbytes) == Status::done);
        nbytes = nbytes < 60'000 ? nbytes + 64 : 10'000;
        for (int hot = 0; hot < std::min(number, 8); ++hot) {
            CHECK(objects.find(std::to_string(hot), true).status == Status::done);
        }
    }
}

TEST("an object is demoted when it is asked for, unless somebody needs it in memory") {
    const Folder folder;
    Budget budget{8 * mib};
    Catalogue without_file = opened(folder, budget);
    CHECK(put(without_file, "key", mib) == Status::done);
    CHECK(without_file.demote(without_file.find("key", false)) == Status::unknown);
    CHECK_EQUAL(without_file.counts().demotions, 0u);

    const Folder other;
    Budget own{8 * mib};
    farpool::Nvme nvme(other.path() + "/shelf", 2 * mib, true, [] {});
    std::string note;
    Catalogue objects(other.path(), 0, own, &nvme, true, note);
    CHECK(put(objects, "one", mib) == Status::done);
    CHECK(put(objects, "kept", mib) == Status::done);
    CHECK(put(objects, "large", 3 * mib) == Status::done);
    CHECK(objects.touch("kept", 0, Keep::keep).status == Status::done);
    const std::uint64_t used = own.used();
    const Found one = objects.find("one", false);
    objects.pin(one);
    CHECK(objects.demote(one) == Status::busy);
    CHECK(objects.demote(objects.find("kept", false)) == Status::busy);
    CHECK(objects.demote(objects.find("large", false)) == Status::too_large);
    objects.unpin(one.offset);
    CHECK_EQUAL(own.used(), used);

    CHECK(objects.demote(one) == Status::done);
    CHECK(objects.demote(one) == Status::done);  // on its way
    CHECK_EQUAL(objects.counts().demotions, 1u);
    CHECK(own.used() + mib <= used + 4096);
    nvme.close();
    for (const auto& then : nvme.finished()) {
        then();
    }
    const Found moved = objects.find("one", false);
    CHECK(moved.status == Status::done && !moved.is_mapped_by_readers && moved.view == nullptr);
    CHECK_EQUAL(moved.serial, one.serial);
    CHECK(objects.demote(moved) == Status::done);
    CHECK_EQUAL(objects.counts().demotions, 1u);
    CHECK_EQUAL(own.moving(), 0u);
}

TEST("an object that is costly to compute again stays while cheaper ones that are used as often are evicted") {
    for (const bool costs : {false, true}) {
        const Folder folder;
        Budget budget{4 * mib};
        Catalogue objects = opened(folder, budget);
        for (int number = 0; number < 1000; ++number) {
            const bool costly = number < 20;
            const std::string key = std::to_string(number);
            CHECK(put(objects, key, 30'000, !costs ? 0 : costly ? 1'000'000 : 1000) == Status::done);
            CHECK(objects.find(key, true).status == Status::done);
        }
        int there = 0;
        for (int number = 0; number < 20; ++number) {
            there += objects.find(std::to_string(number), false).status == Status::done ? 1 : 0;
        }
        CHECK_EQUAL(there, costs ? 20 : 0);
        for (int number = 0; number < 4000; ++number) {  // whose time comes, too
            CHECK(put(objects, "later " + std::to_string(number), 30'000, costs ? 1'000'000 : 0) == Status::done);
            CHECK(objects.find("later " + std::to_string(number), true).status == Status::done);
        }
        for (int number = 0; number < 20; ++number) {
            CHECK(objects.find(std::to_string(number), false).status == Status::missing);
        }
    }
}

TEST("a mapped reader's mark is worth what the object costs, and a kept object keeps its cost") {
    const Folder folder;
    Budget budget{4 * mib};
    Catalogue objects = opened(folder, budget);
    CHECK(put(objects, "costly", 30'000, 1'000'000) == Status::done);
    CHECK(objects.touch("costly", 0, Keep::keep).status == Status::done);
    CHECK(objects.touch("costly", 0, Keep::let_go).status == Status::done);
    CHECK_EQUAL(objects.find("costly", false).head.recompute_us, 1'000'000u);
    const farpool::File marks(objects.visits().open(7));
    const farpool::Mapping area(marks.fd(), objects.visits().session_nbytes(), true);
    for (int number = 0; number < 1000; ++number) {
        CHECK(put(objects, std::to_string(number), 30'000, 1000) == Status::done);
        for (const std::string& key : {std::to_string(number), std::string("costly")}) {
            const Found found = objects.find(key, false);
            CHECK(found.status == Status::done);
            area.data()[farpool::segment_header_nbytes + found.slot] = std::byte{1};
        }
    }
    objects.end_visits(7);
}

TEST("a touch that names a mark is refused once another has kept the object, let it go or extended it") {
    const Folder folder;
    Budget budget{4 * mib};
    Catalogue objects = opened(folder, budget);
    CHECK_EQUAL(objects.touch("never", 0, Keep::let_go).mark, 0u);
    CHECK(put(objects, "never", 100) == Status::done);
    const auto touch = [&](Keep keep, std::uint64_t seen, std::uint64_t ttl_ms = 0) {
        return objects.touch("never", ttl_ms, keep, seen);
    };
    const std::uint64_t fresh = touch(Keep::as_it_is, 0).mark;  // without an end
    CHECK(fresh != 0);
    const farpool::Touched kept = touch(Keep::keep, fresh);
    CHECK(kept.status == Status::done);
    CHECK(touch(Keep::let_go, fresh, 60'000).status == Status::unknown);
    const farpool::Touched again = touch(Keep::keep, fresh);  // kept is kept
    CHECK(again.status == Status::done);
    CHECK(again.mark != kept.mark);
    CHECK(touch(Keep::let_go, kept.mark, 60'000).status == Status::unknown);
    CHECK(put(objects, "never", 100) == Status::present);
    CHECK_EQUAL(touch(Keep::as_it_is, 0).mark, again.mark);
    CHECK_EQUAL(objects.find("never", false).head.ttl_ms, 0u);
    const farpool::Touched gone = touch(Keep::let_go, again.mark, 60'000);
    CHECK(gone.status == Status::done);
    CHECK(objects.find("never", false).head.ttl_ms > 0);
    const farpool::Touched twice = touch(Keep::let_go, gone.mark, 60'000);
    CHECK(twice.mark != gone.mark);
    CHECK(touch(Keep::keep, gone.mark).status == Status::unknown);
    CHECK(touch(Keep::as_it_is, gone.mark).status == Status::unknown);
    CHECK((objects.find("never", false).head.flags & farpool::kept_object) == 0);
    CHECK(touch(Keep::keep, twice.mark).status == Status::done);
}

TEST(
    "no two changes give an object the same mark, in one tick of the clock, with any time to live, after a restart or a drop") {
    const std::vector<std::pair<Keep, std::uint64_t>> changes{
        {Keep::keep, 60'000}, {Keep::keep, 60'000}, {Keep::let_go, 60'000}, {Keep::let_go, 60'000}, {Keep::keep, 60'000},
        {Keep::let_go, 0},    {Keep::let_go, 0},    {Keep::keep, 0},        {Keep::let_go, 60'000}, {Keep::as_it_is, 0}};
    StoppedClock clock(1'800'000'000'000);
    const Folder folder;
    Budget budget{4 * mib};
    std::set<std::uint64_t> marks;
    for (int start = 0; start < 3; ++start) {
        std::string note;
        Catalogue objects(folder.path(), 0, budget, nullptr, false, note);
        CHECK_EQUAL(note, "");
        CHECK_EQUAL(objects.size(), start == 0 ? 0u : 1u);
        for (int life = 0; life < 2; ++life) {
            const Status status = put(objects, "key", 100);
            CHECK(status == (start > 0 && life == 0 ? Status::present : Status::done));
            for (int turn = 0; turn < 4; ++turn) {
                for (const auto& [keep, ttl_ms] : changes) {
                    // A time to live that is shorter by as much as has passed ends at the same time.
                    const std::uint64_t late = StoppedClock::now - 1'800'000'000'000;
                    const std::uint64_t mark = objects.touch("key", ttl_ms == 0 ? 0 : ttl_ms - late, keep).mark;
                    CHECK(mark != 0 && mark != farpool::mark_of_none);
                    CHECK(marks.insert(mark).second);
                }
                StoppedClock::now += 1;
            }
            if (life == 0) {
                CHECK(objects.remove("key") == Status::done);
            }
        }
    }
}

TEST("a touch that names the mark of no object keeps only an object that is kept already") {
    const Folder folder;
    Budget budget{4 * mib};
    Catalogue objects = opened(folder, budget);
    CHECK(objects.touch("key", 0, Keep::keep, farpool::mark_of_none).status == Status::missing);
    CHECK(put(objects, "key", 100) == Status::done);
    CHECK(objects.touch("key", 0, Keep::keep, farpool::mark_of_none).status == Status::unknown);
    const farpool::Touched kept = objects.touch("key", 0, Keep::keep);
    CHECK(objects.touch("key", 0, Keep::keep, farpool::mark_of_none).status == Status::done);
    CHECK(objects.touch("key", 1000, Keep::let_go, kept.mark).status == Status::unknown);
    CHECK(objects.touch("key", 1000, Keep::let_go).status == Status::done);
    CHECK(objects.touch("key", 0, Keep::keep, farpool::mark_of_none).status == Status::unknown);
}

TEST("an object that was let go expires when its time is over, whatever it was before") {
    StoppedClock clock(1'800'000'000'000);
    const Folder folder;
    Budget budget{4 * mib};
    Catalogue objects = opened(folder, budget);
    for (const std::uint64_t ttl_ms : {std::uint64_t{0}, std::uint64_t{5'000}}) {
        CHECK(put(objects, "key", 100) == Status::done);
        CHECK(objects.touch("key", ttl_ms, Keep::keep).status == Status::done);
        CHECK(objects.touch("key", 1000, Keep::let_go).status == Status::done);
        CHECK_EQUAL(objects.find("key", false).head.ttl_ms, 1000u);
        CHECK(objects.touch("key", 2000, Keep::as_it_is).status == Status::done);
        CHECK_EQUAL(objects.find("key", false).head.ttl_ms, 2000u);
        StoppedClock::now += 1999;
        CHECK(objects.find("key", false).status == Status::done);
        StoppedClock::now += 1;
        CHECK(objects.find("key", false).status == Status::missing);
    }
    CHECK(put(objects, "key", 100) == Status::done);
    CHECK(objects.touch("key", 1000, Keep::let_go).status == Status::done);
    CHECK(objects.touch("key", ~std::uint64_t{0}, Keep::as_it_is).status == Status::done);
    StoppedClock::now *= 100;
    CHECK(objects.find("key", false).head.ttl_ms > StoppedClock::now);
}

TEST("memory that holes have kept for long goes back to the system, a part at a time, and comes again when it is needed") {
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    put_small(objects, 150);
    const std::uint64_t full = objects.taken();
    for (int number = 0; number < 150; number += 2) {
        CHECK(objects.remove(std::to_string(number)) == Status::done);
    }
    for (int round = 1; round < farpool::Ram::idle_rounds; ++round) {
        CHECK(!objects.return_idle(16 * mib));
    }
    CHECK_EQUAL(objects.taken(), full);
    CHECK(objects.return_idle(2 * mib));
    CHECK(objects.taken() >= full - 2 * mib - 4096 && objects.taken() < full - mib);
    while (objects.return_idle(2 * mib)) {
    }
    CHECK(objects.taken() <= full - 75 * 90'000);
    CHECK_EQUAL(objects.counts().evictions, 0u);
    for (int number = 0; number < 150; number += 2) {
        CHECK(put(objects, std::to_string(number), 100'000) == Status::done);
    }
    for (int number = 0; number < 150; ++number) {
        CHECK(objects.remove(std::to_string(number)) == Status::done);
    }
    for (int round = 0; round < 20 * farpool::Ram::idle_rounds; ++round) {
        static_cast<void>(objects.return_idle(16 * mib));
    }
    CHECK(budget.backed() <= 4096);
    CHECK(objects.taken() <= full - 14 * mib);
}

TEST("memory of holes that were used in one of the last rounds stays") {
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    put_small(objects, 100);
    for (int number = 0; number < 100; ++number) {
        CHECK(objects.remove(std::to_string(number)) == Status::done);
    }
    const std::uint64_t full = objects.taken();
    for (int round = 0; round < 10 * farpool::Ram::idle_rounds; ++round) {
        if (round % (farpool::Ram::idle_rounds / 2) == 0) {
            put_small(objects, 80);
        }
        static_cast<void>(objects.return_idle(16 * mib));
        for (int number = 0; number < 80; ++number) {
            static_cast<void>(objects.remove(std::to_string(number)));
        }
    }
    CHECK(objects.taken() >= 8 * mib - mib && objects.taken() <= full - mib);
}

namespace {

Status put_retained(Catalogue& objects, const std::string& key, std::uint64_t nbytes, std::uint32_t priority,
                    std::uint64_t session = 0) {
    ObjectHead head{};
    head.flags = priority << farpool::priority_shift;
    const Found place = objects.prepare(key, nbytes, head);
    const Status status = place.status == Status::done ? objects.commit(place.offset, place.serial, 0).status : place.status;
    if (session != 0) {
        CHECK(objects.retain(key, {static_cast<std::uint8_t>(priority), session}, true) == Status::done);
    }
    return status;
}

// How many of the objects `prefix`0, `prefix`1, ... are there.
int present(Catalogue& objects, const std::string& prefix, int count) {
    int found = 0;
    for (int number = 0; number < count; ++number) {
        found += objects.find(prefix + std::to_string(number), false).status == Status::done ? 1 : 0;
    }
    return found;
}

}  // namespace

TEST("objects of a lower priority are evicted first, whatever was used since") {
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    for (int number = 0; number < 40; ++number) {
        CHECK(put_retained(objects, "low " + std::to_string(number), 100'000, 1) == Status::done);
        CHECK(put_retained(objects, "high " + std::to_string(number), 100'000, 7) == Status::done);
    }
    for (int number = 0; number < 1000; ++number) {  // each is used once more before the next one comes
        CHECK(put(objects, "ordinary " + std::to_string(number), 100'000) == Status::done);
        CHECK(objects.find("ordinary " + std::to_string(number), true).status == Status::done);
    }
    CHECK_EQUAL(present(objects, "low ", 40), 40);
    CHECK_EQUAL(present(objects, "high ", 40), 40);
    CHECK_EQUAL(objects.counts().retained, 80u);
    CHECK_EQUAL(objects.counts().retained_bytes, 8'000'000u);
    CHECK_EQUAL(objects.counts().retained_evictions, 0u);
    for (int number = 0; number < 100; ++number) {
        CHECK(put_retained(objects, "more " + std::to_string(number), 100'000, 7) == Status::done);
    }
    CHECK_EQUAL(present(objects, "high ", 40), 40);
    CHECK_EQUAL(present(objects, "more ", 100), 100);
    CHECK(present(objects, "low ", 40) < 40);  // no ordinary one was left
    CHECK_EQUAL(present(objects, "ordinary ", 1000), 0);
    CHECK(objects.counts().retained_evictions > 0u);
}

TEST("a tenant full of objects of the highest priority still takes objects of every priority and size") {
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    for (int number = 0; number < 400; ++number) {  // 2.5 times its room
        CHECK(put_retained(objects, "first " + std::to_string(number), 100'000, 7, 1) == Status::done);
    }
    CHECK_EQUAL(objects.size(), objects.counts().retained);
    CHECK(put(objects, "ordinary", 100'000) == Status::done);
    CHECK(objects.find("ordinary", false).status == Status::done);
    CHECK(put(objects, "large", 12 * mib) == Status::done);  // most retained objects go for it
    CHECK(objects.find("large", false).status == Status::done);
    CHECK(put_retained(objects, "high", 100'000, 7) == Status::done);
    CHECK(budget.used() <= budget.limit());
    const std::uint64_t before = objects.counts().retained;
    CHECK(put(objects, "whole", 15 * mib) == Status::done);
    CHECK(objects.counts().retained < before);
}

TEST("of the lowest priority present the least recent object is evicted") {
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    for (int number = 0; number < 30; ++number) {
        CHECK(put_retained(objects, "old " + std::to_string(number), 100'000, 3) == Status::done);
    }
    for (int number = 0; number < 130; ++number) {
        CHECK(put_retained(objects, "new " + std::to_string(number), 100'000, 3) == Status::done);
        CHECK(objects.find("new " + std::to_string(number), true).status == Status::done);
    }
    for (int number = 0; number < 15; ++number) {
        CHECK(put_retained(objects, "next " + std::to_string(number), 100'000, 3) == Status::done);
    }
    CHECK(present(objects, "old ", 30) < 30);
    CHECK(present(objects, "new ", 130) > 120);
}

TEST("the end of a session takes the priority of its objects and of no others, also if they are many") {
    const Folder folder;
    Budget budget{64 * mib};
    Catalogue objects = opened(folder, budget);
    for (int number = 0; number < 6000; ++number) {
        CHECK(put_retained(objects, "its " + std::to_string(number), 1000, 5, 11) == Status::done);
    }
    CHECK(put_retained(objects, "other's 0", 1000, 5, 12) == Status::done);
    CHECK(put_retained(objects, "nobody's 0", 1000, 5) == Status::done);
    CHECK_EQUAL(objects.end_session(99), 0u);
    CHECK_EQUAL(objects.end_session(11), 6000u);
    CHECK(objects.counts().retained > 2u && objects.counts().retained < 6002u);  // it is done in steps
    CHECK(put_retained(objects, "later 0", 1000, 5, 11) == Status::done);        // a session that begins again is another one
    objects.sweep(2000);  // looks at the objects of the session first, not at 2000 of all
    CHECK_EQUAL(objects.counts().retained, 3u);
    CHECK_EQUAL(objects.find("its 17", false).head.flags, 0u);
    CHECK_EQUAL(objects.find("later 0", false).head.flags, 5u << farpool::priority_shift | farpool::priority_ends);
    CHECK_EQUAL(objects.find("nobody's 0", false).head.flags, 5u << farpool::priority_shift);
    CHECK_EQUAL(objects.end_session(11), 1u);
    CHECK_EQUAL(objects.end_session(11), 0u);
    CHECK_EQUAL(objects.counts().retained, 2u);
    CHECK(objects.remove("other's 0") == Status::done);
    CHECK_EQUAL(objects.end_session(12), 0u);
    CHECK_EQUAL(objects.counts().retained_bytes, 1000u);
}

TEST("a put of a present object raises its priority, and only retaining it lowers that") {
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    const auto priority = [&] { return objects.find("key", false).head.flags >> farpool::priority_shift; };
    CHECK(put_retained(objects, "key", 1000, 2, 21) == Status::done);
    CHECK(put(objects, "key", 1000) == Status::present);
    CHECK_EQUAL(priority(), 2u);
    CHECK(put_retained(objects, "key", 1000, 4, 22) == Status::present);
    CHECK_EQUAL(priority(), 4u);
    CHECK_EQUAL(objects.end_session(21), 0u);
    CHECK(put_retained(objects, "key", 1000, 4) == Status::present);
    CHECK(put_retained(objects, "key", 1000, 4, 23) == Status::present);  // of the same priority, the later session counts
    CHECK_EQUAL(objects.end_session(22), 0u);
    CHECK(put_retained(objects, "key", 1000, 3, 24) == Status::present);
    CHECK_EQUAL(objects.end_session(24), 0u);
    CHECK(objects.retain("key", {1, 23}) == Status::done);
    CHECK_EQUAL(priority(), 1u);
    CHECK_EQUAL(objects.end_session(23), 1u);
    CHECK_EQUAL(priority(), 0u);
    CHECK(objects.retain("key", {7, 0}) == Status::done);
    CHECK(objects.retain("key", {}) == Status::done);
    CHECK_EQUAL(objects.counts().retained, 0u);
    CHECK(objects.retain("no key", {7, 0}) == Status::missing);
}

TEST("a put gives a present object its priority if a higher one has ended, also before the sweep that takes that") {
    const Folder folder;
    Budget budget{64 * mib};
    Catalogue objects = opened(folder, budget);
    StoppedClock clock(1'700'000'000'000);
    const auto flags = [&](const std::string& key) { return objects.find(key, false).head.flags; };
    CHECK(put(objects, "in time", 1000) == Status::done);
    CHECK(objects.retain("in time", {5, 0, StoppedClock::now + 1000}) == Status::done);
    StoppedClock::now += 1000;
    CHECK(put_retained(objects, "in time", 1000, 2) == Status::present);
    for (int number = 0; number < 6000; ++number) {
        CHECK(put_retained(objects, "its " + std::to_string(number), 1000, 5, 11) == Status::done);
    }
    CHECK_EQUAL(objects.end_session(11), 6000u);
    CHECK(objects.counts().retained > 1u);  // not all have been swept
    for (int number = 0; number < 6000; ++number) {
        const std::string key = "its " + std::to_string(number);
        CHECK_EQUAL(flags(key), 0u);
        CHECK(put_retained(objects, key, 1000, 3) == Status::present);
    }
    objects.sweep(10'000);
    CHECK_EQUAL(flags("in time"), 2u << farpool::priority_shift);
    CHECK_EQUAL(flags("its 0"), 3u << farpool::priority_shift);
    CHECK_EQUAL(objects.counts().retained, 6001u);
    CHECK_EQUAL(objects.end_session(11), 0u);
}

TEST("a priority ends with its time, and the object stays") {
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    StoppedClock clock(1'700'000'000'000);
    CHECK(put(objects, "key", 1000) == Status::done);
    CHECK(objects.retain("key", {5, 3, StoppedClock::now + 1000}) == Status::done);
    objects.sweep(100);
    CHECK_EQUAL(objects.find("key", false).head.flags, 5u << farpool::priority_shift | farpool::priority_ends);
    StoppedClock::now += 1000;
    CHECK_EQUAL(objects.find("key", false).head.flags, 0u);
    CHECK_EQUAL(objects.counts().retained, 1u);
    objects.sweep(100);
    CHECK_EQUAL(objects.counts().retained, 0u);
    CHECK(objects.find("key", false).status == Status::done);
    CHECK_EQUAL(objects.end_session(3), 0u);
    CHECK(objects.retain("key", {2}) == Status::done);
    StoppedClock::now += 1'000'000;
    objects.sweep(100);
    CHECK_EQUAL(objects.counts().retained, 1u);
}

TEST("retention stays with an object that is kept, let go, pinned or expires, and ends with the object") {
    const Folder folder;
    Budget budget{16 * mib};
    Catalogue objects = opened(folder, budget);
    CHECK(put_retained(objects, "key", 1000, 3, 5) == Status::done);
    CHECK(objects.touch("key", 0, Keep::keep).status == Status::done);
    CHECK(objects.retain("key", {6, 5}) == Status::done);
    CHECK(objects.touch("key", 0, Keep::let_go).status == Status::done);
    CHECK_EQUAL(objects.find("key", false).head.flags >> farpool::priority_shift, 6u);
    const Found pinned = objects.find("key", true);
    objects.pin(pinned);
    CHECK(objects.remove("key") == Status::done);
    CHECK_EQUAL(objects.counts().retained, 0u);
    CHECK(put(objects, "key", 1000) == Status::done);
    objects.unpin(pinned.offset);
    CHECK_EQUAL(objects.find("key", false).head.flags, 0u);
    StoppedClock clock(1'700'000'000'000);
    ObjectHead head{};
    head.ttl_ms = 1000;
    head.flags = 7u << farpool::priority_shift;
    const Found place = objects.prepare("short", 1000, head);
    CHECK(objects.commit(place.offset, place.serial, 0).status == Status::done);
    CHECK_EQUAL(objects.counts().retained, 1u);
    StoppedClock::now += 2000;
    objects.sweep(100);
    CHECK_EQUAL(objects.counts().retained, 0u);
}

int main() { return farpool::testing::run(); }
