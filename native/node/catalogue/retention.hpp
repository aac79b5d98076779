// Which of a tenant's objects are evicted after others, and for which sessions.
//
// A program that expects to need an object again retains it: it gives the object a priority above 0, and may name a session,
// such as a conversation, for which that holds. Objects of a lower priority are evicted first (queues.hpp). A retained object
// is no kept object: if only retained ones are present, they are evicted. When a session ends, its objects lose their priority.
// That is done in steps, because a session may have many objects.
//
// Sessions here are numbers that programs choose. They are no sessions of connections (sessions.hpp). Priorities are not stored
// in segments: like visits, they are forgotten when the node restarts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "core/clock.hpp"
#include "policy/slot_list.hpp"

namespace farpool {

struct Retained {
    std::uint8_t priority = 0;  // 0: the object is not retained, and has no session
    std::uint64_t session = 0;  // 0: none
    std::uint64_t until = 0;    // when the priority ends, in ms since 1970; 0 for no end
};

// Takes no memory until the first object is retained.
class Retention {
public:
    static constexpr std::uint8_t priority_max = 7;

    Retention() = default;
    Retention(const Retention&) = delete;
    Retention& operator=(const Retention&) = delete;

    std::uint8_t priority(std::uint32_t slot) const { return slot < objects_.size() ? objects_[slot].priority : 0; }
    Retained of(std::uint32_t slot) const;
    // True if the time of the object's priority is over, or its session has ended. The priority counts for nothing then, but
    // the object stays in its queue until a sweep takes the priority.
    bool has_ended(std::uint32_t slot) const;
    // Replaces what is known of the object in a slot.
    void set(std::uint32_t slot, const Retained& retained);

    // Ends a session: next_ended() returns its objects, until set() has changed them. Objects that get the same session from
    // now on do not belong to the ended one. Returns the number of objects.
    std::size_t end(std::uint64_t session);
    // An object of a session that has ended; policy::no_slot if there is none.
    policy::Slot next_ended() const { return ended_.empty() ? policy::no_slot : sessions_.at(ended_.back()).objects.oldest(); }

    // Number of sessions that have objects.
    std::size_t sessions() const noexcept { return sessions_.size(); }
    std::uint64_t nbytes() const noexcept;

private:
    struct Object {
        std::uint32_t number = 0;  // of its session here; 0 for none
        std::uint8_t priority = 0;
        std::uint64_t until = 0;
    };
    struct Session {
        std::uint64_t session;
        policy::SlotList objects;
    };

    std::uint32_t number_of(std::uint64_t session);
    void leave(std::uint32_t slot, std::uint32_t number);

    std::vector<Object> objects_;                               // by slot
    policy::Links links_;                                       // of the objects of sessions
    std::unordered_map<std::uint64_t, std::uint32_t> numbers_;  // of sessions that have not ended
    std::unordered_map<std::uint32_t, Session> sessions_;       // by number
    std::vector<std::uint32_t> ended_;                          // numbers
    std::uint32_t last_ = 0;                                    // number given
};

}  // namespace farpool
