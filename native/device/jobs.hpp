// The transfers of a device's queue, and the chunks into which they are cut.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "core/transfer_queue.hpp"
#include "device/page_locks.hpp"

namespace farpool::device {

constexpr std::int64_t part_alignment = 64;  // of parts in staging memory

// The bytes that a part takes in staging memory.
constexpr std::size_t rounded(std::size_t nbytes) {
    constexpr auto alignment = static_cast<std::size_t>(part_alignment);
    return (nbytes + alignment - 1) / alignment * alignment;
}

struct Part {
    std::uint64_t offset;  // in the port
    std::uintptr_t place;  // address in the arena
    std::uintptr_t host;   // address in host memory
    std::size_t nbytes;
};

enum class Leg : std::uint8_t { none, tier, between, device, ended };

struct Job;

struct Chunk {
    Job* job;
    std::vector<Part> parts;
    std::size_t nbytes = 0;     // that it takes in staging memory
    std::int64_t staging = -1;  // offset of its staging memory
    Leg leg = Leg::none;
};

struct Job {
    std::int64_t id;
    Port* port;
    Direction direction;
    std::int64_t priority;
    std::uint64_t number;  // of submission
    std::int64_t last_use;
    Keepalive keepalive;
    std::vector<Piece> pieces;
    std::vector<std::int64_t> after;
    std::vector<std::int64_t> dependents;
    std::size_t waiting_for = 0;
    std::vector<Chunk> chunks;  // empty until the first leg can start, as the page locks at that time decide
    bool staged = false;
    std::array<bool, 2> followed{};  // by urgency: that stream of copies has waited for the program's work
    std::size_t begun = 0;           // chunks of which a leg was started
    std::size_t ended = 0;
    double start = std::numeric_limits<double>::infinity();
    double end = 0;
    std::optional<PortError> error;
    bool dropped = false;  // cancelled while legs were under way

    void note_times(double started, double ended_at) {
        start = std::min(start, started);
        end = std::max(end, ended_at);
    }
    void fail(PortError why) {
        if (!error) {
            error = std::move(why);
        }
    }
    bool barrier() const { return pieces.empty(); }
    bool urgent() const { return priority >= urgent_priority; }
    bool fetch() const { return direction == Direction::read; }
    std::size_t under_way() const { return begun - ended; }
    bool given_up() const { return dropped || error.has_value(); }
    // True if a leg is left for the launcher to start, now or when something has ended.
    bool to_launch() const {
        return !barrier() && (chunks.empty() || begun < chunks.size() ||
                              std::ranges::find(chunks, Leg::between, &Chunk::leg) != chunks.end());
    }
    bool all_begun() const { return barrier() ? waiting_for == 0 : !chunks.empty() && begun == chunks.size(); }
};

// More urgent jobs first; among equals fetches first, in order of submission.
struct Rank {
    bool operator()(const Job* left, const Job* right) const;
};

// Cuts a job into chunks of at most so many bytes, and where page-locked memory is cut. If some of its tier's memory is not
// page-locked, the job is staged, and its parts get their addresses in host memory later.
void cut(Job& job, PageLocks* locks, std::size_t most);

}  // namespace farpool::device
