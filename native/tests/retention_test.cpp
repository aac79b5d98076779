// Which objects are retained, and for which sessions, compared with a plain map of slots.
#include "node/catalogue/retention.hpp"

#include <map>
#include <random>
#include <set>

#include "tests/testing.hpp"

using farpool::Retained;
using farpool::Retention;
namespace policy = farpool::policy;

TEST("nothing is allocated before an object is retained") {
    Retention retention;
    for (std::uint32_t slot = 0; slot < 1000; ++slot) {
        retention.set(slot, {});
        CHECK_EQUAL(retention.priority(slot), 0);
    }
    CHECK_EQUAL(retention.end(7), 0u);
    CHECK_EQUAL(retention.next_ended(), policy::no_slot);
    CHECK_EQUAL(retention.nbytes(), 0u);
}

TEST("random changes, ends of sessions and releases leave what a map has") {
    std::mt19937 dice(20260101);
    const auto below = [&](std::uint32_t limit) { return static_cast<std::uint32_t>(dice() % limit); };
    Retention retention;
    struct Object {
        Retained retained;
        bool ended = false;
    };
    std::map<std::uint32_t, Object> model;
    for (int step = 0; step < 200'000; ++step) {
        const std::uint32_t slot = below(300);
        const std::uint32_t choice = below(100);
        if (choice < 60) {
            const Retained retained{static_cast<std::uint8_t>(below(8)), below(12)};
            retention.set(slot, retained);
            model.erase(slot);
            if (retained.priority > 0) {
                model[slot] = {retained};
            }
        } else if (choice < 62) {
            const std::uint64_t session = 1 + below(11);
            std::size_t count = 0;
            for (auto& [at, object] : model) {
                if (object.retained.session == session && !object.ended) {
                    object.ended = true;
                    ++count;
                }
            }
            CHECK_EQUAL(retention.end(session), count);
        } else if (choice < 90) {
            const policy::Slot ended = retention.next_ended();
            if (ended != policy::no_slot) {
                CHECK(model.at(ended).ended);
                retention.set(ended, {});
                model.erase(ended);
            } else {
                for (const auto& [at, object] : model) {
                    CHECK(!object.ended);
                }
            }
        } else {
            const auto found = model.find(slot);
            const Retained expected = found == model.end() ? Retained{} : found->second.retained;
            CHECK_EQUAL(retention.priority(slot), expected.priority);
            CHECK_EQUAL(retention.of(slot).session, expected.session);
            CHECK_EQUAL(retention.has_ended(slot), found != model.end() && found->second.ended);
        }
    }
    std::set<std::pair<std::uint64_t, bool>> sessions;
    for (const auto& [at, object] : model) {
        if (object.retained.session != 0 && !object.ended) {
            sessions.emplace(object.retained.session, object.ended);
        }
    }
    while (retention.next_ended() != policy::no_slot) {
        retention.set(retention.next_ended(), {});
    }
    CHECK_EQUAL(retention.sessions(), sessions.size());
}

int main() { return farpool::testing::run(); }
