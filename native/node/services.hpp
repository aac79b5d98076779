// The parts of a node that all of its connections use.
#pragma once

#include <cstdint>
#include <functional>

#include "node/admission.hpp"
#include "node/budget.hpp"
#include "node/deadlines.hpp"
#include "node/events.hpp"
#include "node/fetches.hpp"
#include "node/sessions.hpp"
#include "node/tallies.hpp"
#include "node/turn.hpp"
#include "node/unsent.hpp"

namespace farpool {

struct Services {
    const Budget& budget;
    const Admission& admission;
    const Deadlines& deadlines;
    Sessions& sessions;
    Fetches& fetches;
    UnsentByKey& unsent;
    Tallies& tallies;
    Events& events;
    Turn& turn;  // the one that is being served
    // Aborts the put into these objects that has been silent for longest and announced more bytes than arrived; false if there
    // is none.
    std::function<bool(const Catalogue&)> give_up_a_put;
};

}  // namespace farpool
