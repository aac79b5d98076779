// Marks of visits: which of a tenant's objects were used since the eviction policy last checked them.
//
// The node sets its own marks for requests over connections. A session that maps the objects marks its reads in anonymous
// memory of its own, of fixed length, which no other session can write; so a session can forge only its own visits. The
// eviction policy reads all marks of an object when it checks the object (policy/marks.hpp).
#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

#include "node/files.hpp"
#include "policy/marks.hpp"

namespace farpool {

class Visits {
public:
    // Limit on sessions with marks: each adds one read for each object that eviction considers.
    static constexpr std::size_t sessions_max = 256;
    // Number of slots for which the node's own marks get memory at a time.
    static constexpr std::uint64_t backing_slots = 65536;

    // Marks for the objects of an index, on a node that lends `capacity` bytes.
    Visits(const SegmentHeader& index, std::uint64_t capacity);

    // All marks as the eviction policy uses them. Refers to this object.
    policy::Marks marks() { return {own_.memory.at<std::uint8_t>(segment_header_nbytes), &areas_}; }
    // Makes sure that the node's own marks have memory for this slot; false if the system has none.
    bool back(std::uint64_t slot);
    std::uint64_t backed() const noexcept { return backed_; }
    // Bytes that the node's own marks take according to the system. The marks of sessions are charged as lent.
    std::uint64_t taken() const noexcept { return own_.file.taken(); }

    std::size_t sessions() const noexcept { return sessions_.size(); }
    bool has(std::uint64_t session) const { return sessions_.contains(session); }
    // Bytes that a session's marks take.
    std::uint64_t session_nbytes() const noexcept { return segment_header_nbytes + area_nbytes_; }
    // A descriptor of a session's marks, owned by the caller. The first call makes the marks. Throws std::system_error.
    int open(std::uint64_t session);
    // Merges a session's marks of the first `slots` slots into the node's own, and frees them.
    void end(std::uint64_t session, std::uint64_t slots);

private:
    SegmentHeader header_{};  // of the marks of a new session
    std::uint64_t area_nbytes_;
    Segment own_;
    std::uint64_t backed_ = 0;  // slots
    std::unordered_map<std::uint64_t, Segment> sessions_;
    std::vector<policy::Marks::Area> areas_;  // of `sessions_`
};

}  // namespace farpool
