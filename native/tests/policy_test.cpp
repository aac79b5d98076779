// Policies on sequences worked out by hand, compared with plain models, and in random calls.
#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>

#include "core/error.hpp"
#include "policy/clock.hpp"
#include "policy/marked_reuse.hpp"
#include "policy/policies.hpp"
#include "policy/reuse_model.hpp"
#include "policy/s3_fifo.hpp"
#include "policy/sieve.hpp"
#include "policy/simulation.hpp"
#include "tests/testing.hpp"

using namespace farpool::policy;
using farpool::PortFailure;

namespace {

// A cache of `capacity` objects of size 1, whose keys are letters. Evictions come out in order.
class Cache {
public:
    Cache(std::string_view name, std::uint64_t capacity) : policy_(make(name, capacity)), capacity_(capacity) {}

    // Makes one request for each letter; returns the evicted keys.
    std::string request(std::string_view letters) {
        std::string evicted;
        for (const char letter : letters) {
            const auto found = slots_.find(letter);
            if (found != slots_.end()) {
                policy_->touch(found->second);
                continue;
            }
            while (slots_.size() >= capacity_) {
                const Slot victim = policy_->victim(item(letter));
                const auto who = std::ranges::find(slots_, victim, [](const auto& entry) { return entry.second; });
                CHECK(who != slots_.end());
                policy_->remove(victim, Leaving::evicted);
                evicted += who->first;
                free_.push_back(victim);
                slots_.erase(who);
            }
            Slot slot = static_cast<Slot>(slots_.size());
            if (!free_.empty()) {
                slot = free_.back();
                free_.pop_back();
            }
            policy_->insert(slot, item(letter));
            slots_[letter] = slot;
        }
        return evicted;
    }
    void drop(char letter) {
        policy_->remove(slots_.at(letter), Leaving::deleted);
        free_.push_back(slots_.at(letter));
        slots_.erase(letter);
    }

private:
    static Item item(char letter) { return {static_cast<std::uint64_t>(letter), 1, never, 1.0}; }

    std::unique_ptr<Policy> policy_;
    std::uint64_t capacity_;
    std::map<char, Slot> slots_;
    std::vector<Slot> free_;
};

std::string evictions(std::string_view name, std::uint64_t capacity, std::string_view letters) {
    return Cache(name, capacity).request(letters);
}

std::vector<std::string_view> all_names() {
    std::vector<std::string_view> all(names().begin(), names().end());
    all.push_back(of_nodes);
    return all;
}

// A queue with marks, as the papers describe CLOCK and SIEVE, and the order of use for LRU: newest in front.
class Model {
public:
    Model(std::string kind, std::size_t capacity) : kind_(std::move(kind)), capacity_(capacity) {}

    bool request(std::uint64_t key) {
        const auto found = std::ranges::find(queue_, key, &Entry::key);
        if (found != queue_.end()) {
            found->used = true;
            if (kind_ == "lru") {
                std::rotate(queue_.begin(), found, found + 1);
            }
            return true;
        }
        if (queue_.size() == capacity_) {
            evict();
        }
        queue_.push_front({key, false});
        if (hand_ >= 0) {
            ++hand_;
        }
        return false;
    }
    void drop(std::uint64_t key) {
        const auto found = std::ranges::find(queue_, key, &Entry::key);
        if (found != queue_.end()) {
            take_out(found - queue_.begin());
        }
    }

private:
    struct Entry {
        std::uint64_t key;
        bool used;
    };

    void evict() {
        if (kind_ == "clock") {
            while (queue_.back().used) {
                queue_.push_front({queue_.back().key, false});
                queue_.pop_back();
            }
        }
        if (kind_ != "sieve") {
            queue_.pop_back();
            return;
        }
        for (;;) {
            hand_ = hand_ < 0 ? static_cast<std::ptrdiff_t>(queue_.size()) - 1 : hand_;
            Entry& entry = queue_[static_cast<std::size_t>(hand_)];
            if (!entry.used) {
                take_out(hand_);
                return;
            }
            entry.used = false;
            --hand_;
        }
    }
    // Removes an object; a hand that stands at it goes on to the next newer one.
    void take_out(std::ptrdiff_t at) {
        queue_.erase(queue_.begin() + at);
        hand_ -= hand_ >= at ? 1 : 0;
    }

    std::string kind_;
    std::size_t capacity_;
    std::deque<Entry> queue_;
    std::ptrdiff_t hand_ = -1;
};

}  // namespace

TEST("LRU evicts the least recently used object") {
    CHECK_EQUAL(evictions("lru", 3, "abcadeb"), "bca");
    CHECK_EQUAL(evictions("lru", 2, "aabbccdd"), "ab");
}

TEST("CLOCK gives a used object a second chance, at the end of the queue") {
    // a is used, so it moves behind c; then b, c, a in this order, because no other object was used.
    CHECK_EQUAL(evictions("clock", 3, "abcadefg"), "bcad");
    CHECK_EQUAL(evictions("clock", 2, "ababc"), "a");
}

TEST("SIEVE leaves a used object in its place, and the hand moves on") {
    // d evicts b: the hand passes a and stands at c. e evicts c, f evicts d, and the hand begins again at a.
    CHECK_EQUAL(evictions("sieve", 3, "abcadefg"), "bcde");
    CHECK_EQUAL(evictions("sieve", 3, "abcabcd"), "a");
}

TEST("S3-FIFO keeps objects that are used twice or return, despite a scan") {
    // One object in the small queue, nine in the main one; the scan evicts itself, but for what it finds room for.
    Cache cache("s3-fifo", 10);
    CHECK_EQUAL(cache.request("abbcdefghij"), "");
    CHECK_EQUAL(cache.request("klm"), "akl");
    // k is remembered: it enters the main queue, which has ten objects then and lets its oldest unused one go next.
    CHECK_EQUAL(cache.request("kn"), "mc");
}

TEST("ARC evicts objects used once before objects used twice, and learns from those that return") {
    Cache cache("arc", 4);
    CHECK_EQUAL(cache.request("ababcd"), "");
    CHECK_EQUAL(cache.request("ef"), "cd");
    // c was evicted from the queue of those used once: its share grows, and c belongs to the others from now on.
    CHECK_EQUAL(cache.request("c"), "e");
    CHECK_EQUAL(cache.request("c"), "");
}

TEST("LIRS keeps the objects with the shortest distance between uses, despite a scan") {
    // 99 objects are LIR, one place is left for all others, which evict each other.
    const std::unique_ptr<Policy> policy = make("lirs", 100);
    for (Slot slot = 0; slot < 100; ++slot) {
        policy->insert(slot, {slot});
    }
    for (std::uint64_t key = 1000; key < 1050; ++key) {
        CHECK_EQUAL(policy->victim({key}), 99u);
        policy->remove(99, Leaving::evicted);
        policy->insert(99, {key});
    }
    // One of them comes back while S still knows it: it is LIR now, and the oldest LIR object the next to go.
    policy->remove(policy->victim({1048}), Leaving::evicted);
    policy->insert(99, {1048});
    CHECK_EQUAL(policy->victim({2000}), 0u);
}

TEST("LIRS finds its oldest LIR object also if others are below it") {
    const std::unique_ptr<Policy> policy = make("lirs", 100);
    for (Slot slot = 0; slot < 100; ++slot) {
        policy->insert(slot, {slot});
    }
    for (Slot slot = 0; slot < 99; ++slot) {
        policy->remove(slot, Leaving::deleted);
    }
    for (Slot slot = 0; slot < 99; ++slot) {  // LIR, above 99, which never was
        policy->insert(slot, {1000 + slot});
    }
    for (const std::uint64_t key : {2000, 2001, 2000}) {
        CHECK_EQUAL(policy->victim({key}), 99u);
        policy->remove(99, Leaving::evicted);
        policy->insert(99, {key});
    }
    // 2000 came back and is LIR, so the oldest LIR object is the next to go; the others follow in their order.
    for (Slot slot = 0; slot < 100; ++slot) {
        CHECK_EQUAL(policy->victim({3000}), slot);
        policy->remove(slot, Leaving::evicted);
    }
    CHECK_EQUAL(policy->size(), 0u);
}

TEST("GDSF weighs uses, cost and size") {
    const std::unique_ptr<Policy> policy = make("gdsf", 100);
    policy->insert(0, {0, 10, never, 1.0});
    policy->insert(1, {1, 20, never, 1.0});
    policy->insert(2, {2, 20, never, 8.0});
    CHECK_EQUAL(policy->victim({9}), 1u);
    policy->touch(1);
    policy->touch(1);
    CHECK_EQUAL(policy->victim({9}), 0u);
    policy->remove(0, Leaving::evicted);
    // An object that comes in now starts from the worth of the one evicted: 0.1 + 0.02.
    policy->insert(3, {3, 50, never, 1.0});
    CHECK_EQUAL(policy->victim({9}), 3u);
}

TEST("W-TinyLFU admits an object only if it was used more often than the one that it replaces") {
    // The window holds 5 objects; the first eviction fills the main part with the 495 oldest.
    const std::unique_ptr<Policy> policy = make("w-tiny-lfu", 500);
    for (Slot slot = 0; slot < 500; ++slot) {
        policy->insert(slot, {slot});
    }
    const auto bring = [&](std::uint64_t key) {
        const Slot victim = policy->victim({key});
        policy->remove(victim, Leaving::evicted);
        policy->insert(victim, {key});
        return victim;
    };
    for (std::uint64_t key = 1000; key < 1100; ++key) {
        CHECK(bring(key) >= 495);
    }
    // One that comes again has been counted more often by now than the oldest object of the main part.
    bring(1000);
    for (std::uint64_t key = 2000; key < 2004; ++key) {
        CHECK(bring(key) >= 495);
    }
    CHECK_EQUAL(bring(2004), 0u);
}

TEST("Belady evicts the object used farthest in the future") {
    const std::unique_ptr<Policy> policy = make("belady", 3);
    policy->insert(0, {0, 1, 10});
    policy->insert(1, {1, 1, 30});
    policy->insert(2, {2, 1, 20});
    CHECK_EQUAL(policy->victim({9}), 1u);
    policy->touch(1, 15);
    CHECK_EQUAL(policy->victim({9}), 2u);
    policy->touch(0, never);
    CHECK_EQUAL(policy->victim({9}), 0u);
}

TEST("LRU, CLOCK and SIEVE agree with plain models, also if objects are deleted at any time") {
    for (const std::string name : {"lru", "clock", "sieve"}) {
        std::mt19937 random(11);
        Cache cache(name, 20);
        Model model(name, 20);
        std::string inside;
        for (int step = 0; step < 20000; ++step) {
            const char letter = static_cast<char>('0' + std::min(random() % 60, random() % 60));
            const bool known = inside.find(letter) != std::string::npos;
            if (known && random() % 20 == 0) {
                cache.drop(letter);
                model.drop(static_cast<std::uint64_t>(letter));
                std::erase(inside, letter);
                continue;
            }
            const std::string evicted = cache.request({&letter, 1});
            CHECK_EQUAL(model.request(static_cast<std::uint64_t>(letter)), known);
            std::erase_if(inside, [&](char one) { return evicted.find(one) != std::string::npos; });
            inside += known ? "" : std::string(1, letter);
        }
    }
}

TEST("calls that contradict the contents are refused and change nothing") {
    for (const std::string_view name : all_names()) {
        const std::unique_ptr<Policy> policy = make(name, 100);
        CHECK_EQUAL(policy->victim({1}), no_slot);
        CHECK_THROWS(PortFailure, policy->touch(0));
        CHECK_THROWS(PortFailure, policy->remove(0, Leaving::evicted));
        CHECK_THROWS(PortFailure, policy->insert(no_slot, {1}));
        policy->insert(5, {5});
        CHECK_THROWS(PortFailure, policy->insert(5, {6}));
        CHECK_THROWS(PortFailure, policy->touch(4));
        CHECK_EQUAL(policy->size(), 1u);
        CHECK_EQUAL(policy->victim({1}), 5u);
    }
    CHECK_THROWS(PortFailure, make("fifo", 100));
}

TEST("no policy evicts an object that is held or absent, in random programs") {
    for (const std::string_view name : all_names()) {
        std::mt19937 random(5);
        const std::unique_ptr<Policy> policy = make(name, 2000);
        std::map<Slot, std::pair<std::uint64_t, std::uint64_t>> inside;  // key and size
        std::set<std::uint64_t> keys;
        std::uint64_t used = 0;
        const auto leave = [&](Slot slot, Leaving why) {
            policy->remove(slot, why);
            used -= inside.at(slot).second;
            keys.erase(inside.at(slot).first);
            inside.erase(slot);
        };
        for (int step = 0; step < 30000; ++step) {
            const Item item{random() % 300, 1 + random() % 100, static_cast<std::int64_t>(random() % 1000), 1.0};
            const std::uint32_t what = random() % 100;
            if (!inside.empty() && what < 45) {
                const auto at = std::next(inside.begin(), static_cast<std::ptrdiff_t>(random() % inside.size()));
                what < 40 ? policy->touch(at->first, item.next_use) : leave(at->first, Leaving::deleted);
                continue;
            }
            if (keys.contains(item.key)) {
                continue;
            }
            const Slot none_of = static_cast<Slot>(random() % 4);
            const auto held = [&](Slot slot) { return slot % 4 == none_of || what == 99; };
            while (used + item.size > 2000) {
                const Slot victim = policy->victim(item, held);
                const bool any = std::ranges::any_of(inside, [&](const auto& entry) { return !held(entry.first); });
                CHECK_EQUAL(victim != no_slot, any);
                if (victim == no_slot) {
                    break;
                }
                CHECK(inside.contains(victim) && !held(victim));
                leave(victim, Leaving::evicted);
            }
            Slot slot = 0;
            while (inside.contains(slot)) {
                ++slot;
            }
            policy->insert(slot, item);
            inside[slot] = {item.key, item.size};
            keys.insert(item.key);
            used += item.size;
            CHECK_EQUAL(policy->size(), inside.size());
        }
        while (!inside.empty()) {
            leave(policy->victim({9999}), Leaving::evicted);
        }
        CHECK_EQUAL(policy->size(), 0u);
    }
}

TEST("marks of other processes count as uses") {
    std::vector<std::uint8_t> memory(16);
    const std::vector<Marks::Area> nobody;
    std::vector<std::unique_ptr<Policy>> policies;
    policies.push_back(std::make_unique<Clock>(Marks(memory.data(), &nobody)));
    policies.push_back(std::make_unique<Sieve>(Marks(memory.data(), &nobody)));
    policies.push_back(std::make_unique<S3Fifo>(10, Marks(memory.data(), &nobody)));
    policies.push_back(std::make_unique<MarkedReuse>(Marks(memory.data(), &nobody)));
    for (const std::unique_ptr<Policy>& policy : policies) {
        for (Slot slot = 0; slot < 10; ++slot) {
            policy->insert(slot, {slot});
        }
        memory[0] = 1;
        const Slot victim = policy->victim({99});
        CHECK(victim != 0 && victim != no_slot);
        std::ranges::fill(memory, 1);
        CHECK(policy->victim({99}) != no_slot);
    }
}

TEST("the nodes' policy evicts the least recently used object before it has learnt anything") {
    CHECK_EQUAL(evictions("node", 3, "abcadeb"), "bca");
    CHECK_EQUAL(evictions("node", 2, "aabbccdd"), "ab");
}

TEST("the nodes' policy keeps objects that cost more per unit of size, and evicts them in the end") {
    MarkedReuse policy;
    for (Slot slot = 0; slot < 60; ++slot) {
        policy.insert(slot, {slot, slot == 1 ? 64u : 1u, never, slot < 2 ? 1600.0 : 100.0});
    }
    CHECK_EQUAL(policy.victim({999}), 1u);  // as large as it is, it costs least
    int turns = 0;
    for (Slot victim = no_slot; victim != 0; ++turns) {  // each new object is used once
        CHECK(turns < 9000);
        victim = policy.victim({999});
        policy.remove(victim, Leaving::evicted);
        policy.insert(victim, {1000u + static_cast<unsigned>(turns), 1, never, 100.0});
        policy.touch(victim);
    }
    CHECK(turns > 300);  // others stay for about 60
}

TEST("the nodes' policy evicts objects that were inserted together from their end") {
    // Conversations of 20 blocks each, of which every other one is used again soon, and then never more.
    MarkedReuse policy;
    std::map<Slot, std::uint64_t> inside;
    std::vector<Slot> unused;
    std::uint64_t in_order = 0;
    std::uint64_t evicted = 0;
    std::uint64_t before = 0;
    for (std::uint64_t conversation = 0; conversation < 400; ++conversation) {
        for (std::uint64_t block = 0; block < 20; ++block) {
            const std::uint64_t key = conversation * 20 + block;
            if (inside.size() == 1000) {
                const Slot victim = policy.victim({key});
                const std::uint64_t gone = inside.at(victim);
                in_order += gone + 1 == before || gone / 20 != before / 20 ? 1 : 0;
                ++evicted;
                before = gone;
                policy.remove(victim, Leaving::evicted);
                inside.erase(victim);
                unused.push_back(victim);
            }
            Slot slot = static_cast<Slot>(inside.size());
            if (!unused.empty()) {
                slot = unused.back();
                unused.pop_back();
            }
            policy.insert(slot, {key});
            inside[slot] = key;
        }
        for (const auto& [slot, key] : inside) {
            if (conversation % 2 == 0 && key / 20 + 10 == conversation) {
                policy.touch(slot);
            }
        }
    }
    CHECK_EQUAL(evicted, 7000u);  // in the order of arrival one in twenty would be
    CHECK(in_order > 5500);
}

// The worth of a block that was used once, and of a block that was used twice, 100 uses later, if this many of 2000
// conversations of 20 blocks return once. A new conversation begins after each.
std::pair<double, double> worth_where_some_return(std::uint64_t returning) {
    ReuseModel model;
    model.remember(100'000);
    const auto use = [&](std::uint64_t conversation) {
        for (std::uint64_t block = 0; block < 20; ++block) {
            model.use(conversation * 20 + block);
        }
    };
    for (std::uint64_t conversation = 0; conversation < 2000; ++conversation) {
        use(conversation);
        if (conversation >= 10 && conversation % 2 == 0 && (conversation - 10) / 2 < returning) {
            use(conversation - 10);
        }
    }
    return {model.worth(0, model.now() - 100), model.worth(1, model.now() - 100)};
}

TEST("blocks that were used more often are worth no less without significant evidence") {
    // At the rate of the others, 2 of 60 conversations would have returned again. That none did may be chance, although they
    // have many blocks.
    const auto [once, twice] = worth_where_some_return(60);
    CHECK(once > 0.0 && twice >= once);
    const auto [often_once, often_twice] = worth_where_some_return(1000);
    CHECK(often_once > 10.0 * once && often_twice < often_once / 10.0);
}

TEST("the nodes' policy remembers a sample of many objects, and counts its bytes") {
    MarkedReuse policy;
    for (Slot slot = 0; slot < 100'000; ++slot) {
        policy.insert(slot, {slot});
        policy.touch(slot / 2);
    }
    CHECK(policy.nbytes() > 100'000 * 36 && policy.nbytes() < 100'000 * 80 + (64u << 20));
    for (int count = 0; count < 1000; ++count) {
        policy.remove(policy.victim({1}), Leaving::evicted);
    }
    CHECK_EQUAL(policy.size(), 99'000u);
}

TEST("marks that several processes set count as one use, and slots with equal low bits share one") {
    std::vector<std::uint8_t> own(16);
    std::vector<std::uint8_t> first(8);
    std::vector<std::uint8_t> second(16);
    std::vector<Marks::Area> areas{{first.data(), 7}, {second.data(), 15}};
    Marks marks(own.data(), &areas);
    first[1] = second[9] = 1;
    CHECK(marks.get(1) != 0 && marks.get(9) != 0 && marks.get(2) == 0);
    CHECK(marks.take(9));
    CHECK(first[1] == 0 && second[9] == 0);
    CHECK(!marks.take(9) && !marks.take(1));
    marks.set(1);
    CHECK(own[1] == 1 && first[1] == 0);
    areas.pop_back();
    second[3] = 1;
    CHECK(!marks.take(3));
    first[3] = own[11] = 1;
    marks.clear(11);
    CHECK(first[3] == 1 && own[11] == 0);
}

TEST("a simulation counts misses and bytes, and does not insert an object larger than the cache") {
    Trace trace;
    for (const std::uint64_t id : {1, 2, 1, 3, 1, 2}) {
        trace.add(id, 10 * id, never);
    }
    trace.add(4, 0, never);
    CHECK_EQUAL(trace.left_out, 1u);
    CHECK_EQUAL(trace.objects(), 3u);
    CHECK_EQUAL(trace.footprint(), 60u);
    Simulation cache(make("lru", 25), 25);
    cache.run(trace, 0, 100);
    // 1 misses, 2 misses and evicts 1, 1 misses and evicts 2, 3 is too large, 1 hits, 2 misses.
    CHECK_EQUAL(cache.counts().misses, 5u);
    CHECK_EQUAL(cache.counts().bytes_missed, 90u);
    CHECK_EQUAL(cache.counts().requests, 6u);
}

TEST("next uses are found, and errors in a file name the line") {
    Trace trace = read_csv("time,size,object\n0,5,7\n1,6,8\r\n2,5,7\n");
    CHECK_EQUAL(trace.size(), 3u);
    CHECK_EQUAL(trace.next_uses[0], 2);
    CHECK_EQUAL(trace.next_uses[1], never);
    CHECK_EQUAL(trace.sizes[1], 6u);
    CHECK_EQUAL(read_csv("0,7,5\n1,8,6").size(), 2u);
    CHECK_THROWS(PortFailure, read_csv("0,7,5\n1,8\n"));
    CHECK_THROWS(PortFailure, read_csv("0,7,5\n1,8,-1\n"));
    CHECK_THROWS(PortFailure, read_csv("0,7,5\n\n"));
    CHECK_THROWS(PortFailure, read_csv("when,what\n"));
    CHECK_THROWS(PortFailure, read_oracle_general("short"));
}

int main() { return farpool::testing::run(); }
