// The journal of a tenant's changes: what a reader sees that lists the objects once and follows the changes then.
#include "node/catalogue/journal.hpp"

#include <deque>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "node/catalogue/catalogue.hpp"
#include "tests/folder.hpp"
#include "tests/testing.hpp"

using farpool::Budget;
using farpool::Catalogue;
using farpool::Change;
using farpool::Changed;
using farpool::Found;
using farpool::Journal;
using farpool::Keep;
using farpool::Listed;
using farpool::ObjectHead;
using farpool::Status;
using farpool::testing::Folder;

namespace {

using Random = std::mt19937_64;

std::uint64_t below(Random& random, std::uint64_t count) { return random() % count; }

Status put(Catalogue& objects, const std::string& key, std::uint64_t nbytes) {
    const Found place = objects.prepare(key, nbytes, ObjectHead{});
    return place.status == Status::done ? objects.commit(place.offset, place.serial, 0).status : place.status;
}

// A reader's picture of the objects, by serial: true for kept ones.
using Picture = std::map<std::uint64_t, std::pair<std::string, bool>>;

void take(Picture& picture, const Changed& change) {
    switch (change.change) {
        case Change::stored:
            picture[change.serial] = {change.key, false};
            return;
        case Change::kept:
            picture[change.serial] = {change.key, true};
            return;
        case Change::let_go:
            picture[change.serial] = {change.key, false};
            return;
        case Change::outdated:
            picture.erase(picture.begin(), picture.lower_bound(change.serial));
            return;
        default:
            picture.erase(change.serial);
    }
}

// Reads all changes from `next` on; false if some are lost.
bool follow(const Journal& journal, std::uint64_t& next, Picture& picture) {
    if (next < journal.first()) {
        return false;
    }
    for (; next < journal.end(); ++next) {
        take(picture, journal.at(next));
    }
    return true;
}

Picture listed(const Catalogue& objects) {
    Picture picture;
    std::vector<Listed> found;
    std::uint64_t place = 0;
    do {
        objects.list(place, "", "", 1'000'000, found);
    } while (place != 0);
    for (const Listed& one : found) {
        picture[one.serial] = {one.key, one.kept};
    }
    return picture;
}

// Makes one change of a random kind.
void change(Catalogue& objects, Random& random, std::uint32_t& epoch) {
    const std::string key = "key-" + std::to_string(below(random, 60)) + std::string(below(random, 100), 'x');
    switch (below(random, 40)) {
        case 0:
            return objects.rotate(++epoch);
        case 1:
        case 2:
            objects.touch(key, 0, Keep::keep);
            return;
        case 3:
        case 4:
            objects.touch(key, 0, Keep::let_go);
            return;
        case 5:
        case 6:
        case 7:
        case 8:
            objects.remove(key);
            return;
        default:
            put(objects, key, below(random, 8'000));
    }
}

}  // namespace

TEST("a journal has the last changes in order, and forgets the oldest ones") {
    Random random(1);
    for (const std::uint64_t nbytes : {0, 3'000, 20'000}) {
        Journal journal;
        journal.add(Change::stored, 1, "before the start");
        journal.begin(nbytes);
        CHECK(journal.life() != 0);
        std::vector<Changed> all;
        for (std::uint64_t number = 0; number < 2'000; ++number) {
            const Changed one{
                static_cast<Change>(1 + below(random, 8)), random(), std::string(below(random, 257), 'a'), random(), random(),
                static_cast<std::uint8_t>(random())};
            journal.add(one.change, one.serial, one.key, one.nbytes, one.expiry, one.copies);
            all.push_back(one);
            CHECK_EQUAL(journal.end(), all.size());
            CHECK(journal.first() < journal.end());
            for (std::uint64_t at = journal.first(); at < journal.end(); ++at) {
                const Changed found = journal.at(at);
                CHECK_EQUAL(found.serial, all[at].serial);
                CHECK_EQUAL(found.key, all[at].key);
                CHECK(found.change == all[at].change && found.nbytes == all[at].nbytes);
                CHECK(found.expiry == all[at].expiry && found.copies == all[at].copies);
            }
        }
        CHECK(journal.nbytes() <= std::max<std::uint64_t>(nbytes, 500));
    }
}

TEST("a reader that lists the objects once and follows the changes has exactly the objects") {
    std::size_t lost = 0;
    std::uint64_t evictions = 0;
    for (std::uint64_t seed = 0; seed < 60; ++seed) {
        Random random(seed);
        const Folder folder;
        Budget budget(128 << 10);
        std::string note;
        Catalogue objects(folder.path(), 0, budget, nullptr, true, note);
        std::uint32_t epoch = 0;
        for (std::size_t count = below(random, 200); count > 0; --count) {
            change(objects, random, epoch);
        }
        objects.journal().begin(seed % 2 == 0 ? 3'000 : 100'000);
        const Journal& journal = objects.journal();
        Picture picture;
        std::uint64_t next = journal.end();
        std::uint64_t place = 0;
        std::string after;
        bool listing = true;
        for (int step = 0; step < 300; ++step) {
            for (std::size_t count = below(random, 4); count > 0; --count) {
                change(objects, random, epoch);
            }
            if (listing) {
                std::vector<Listed> found;
                place = place == 0 ? objects.place_of(after) : place;
                objects.list(place, after, "", 5, found);
                for (const Listed& one : found) {
                    picture[one.serial] = {one.key, one.kept};
                }
                after = found.empty() ? after : found.back().key;
                listing = place != 0;
            }
            if (below(random, 3) == 0 && !follow(journal, next, picture)) {
                ++lost;
                picture.clear();
                next = journal.end();
                place = 0;
                after.clear();
                listing = true;
            }
        }
        // The rest of the list, and the changes since the last answer.
        while (listing) {
            std::vector<Listed> found;
            place = place == 0 ? objects.place_of(after) : place;
            objects.list(place, after, "", 5, found);
            for (const Listed& one : found) {
                picture[one.serial] = {one.key, one.kept};
            }
            after = found.empty() ? after : found.back().key;
            listing = place != 0;
        }
        evictions += objects.counts().evictions;
        if (follow(journal, next, picture)) {
            CHECK(picture == listed(objects));
        } else {
            ++lost;
        }
    }
    CHECK(evictions > 0);
    CHECK(lost > 0);
    CHECK(lost < 60);
}

int main() { return farpool::testing::run(); }
