// Marks of visits: which of a tenant's objects were used since eviction last came by.
//
// The node's own stand for what came over connections. A session that maps the objects marks its reads in memory of its own,
// without a name and of fixed length, which nobody else can write; so it can lie about its own visits, and about no others. The
// eviction policy looks at all of them where an object's turn has come (policy/marks.hpp).
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
    // Each costs a look for each object that eviction considers.
    static constexpr std::size_t most_sessions = 256;
    // The node's own get memory for so many slots at a time.
    static constexpr std::uint64_t backing_slots = 65536;

    // For the objects of an index, on a node that lends `capacity` bytes.
    Visits(const SegmentHeader& index, std::uint64_t capacity);

    // All of them together. Refers to this object.
    policy::Marks marks() { return {own_.memory.at<std::uint8_t>(segment_header_nbytes), &areas_}; }
    // Sees to it that the node's own have memory for this slot; false where the system has none.
    bool back(std::uint64_t slot);
    std::uint64_t backed() const noexcept { return backed_; }
    // Bytes that the node's own take, by what the system says; those of sessions are charged as lent.
    std::uint64_t taken() const noexcept { return own_.file.taken(); }

    std::size_t sessions() const noexcept { return sessions_.size(); }
    bool has(std::uint64_t session) const { return sessions_.contains(session); }
    // Bytes that a session's marks take.
    std::uint64_t session_nbytes() const noexcept { return segment_header_nbytes + area_nbytes_; }
    // A descriptor of a session's marks, the caller's; they are made at the first call. Throws std::system_error.
    int open(std::uint64_t session);
    // What a session has marked of the first `slots` counts as the node's own from now on, and its marks go.
    void end(std::uint64_t session, std::uint64_t slots);

private:
    SegmentHeader header_{};  // of new ones
    std::uint64_t area_nbytes_;
    Segment own_;
    std::uint64_t backed_ = 0;  // slots
    std::unordered_map<std::uint64_t, Segment> sessions_;
    std::vector<policy::Marks::Area> areas_;  // theirs
};

}  // namespace farpool
