// One connection to a node: the state of its input and its output.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "node/catalogue/catalogue.hpp"
#include "node/leases.hpp"
#include "node/loop_time.hpp"
#include "node/turns.hpp"
#include "wire/frame.hpp"
#include "wire/looked_up.hpp"
#include "wire/stream.hpp"

namespace farpool {

// The deadline by which a peer has to make progress. Bytes that move extend it, so that a peer slower than `slowest` runs out
// of time, however regularly its bytes come.
class Patience {
public:
    static constexpr double slowest = 64 * 1024;  // bytes a second

    void begin(Clock::time_point now, Clock::duration most) { end_ = now + most; }
    void moved(std::size_t nbytes, Clock::time_point now, Clock::duration most) {
        const std::chrono::duration<double> bought(static_cast<double>(nbytes) / slowest);
        end_ = std::min(now + most, end_ + std::chrono::duration_cast<Clock::duration>(bought));
    }
    bool is_over(Clock::time_point now) const noexcept { return now > end_; }
    Clock::time_point end() const noexcept { return end_; }

private:
    Clock::time_point end_{};
};

// Objects that are held for unsent replies to the connections of one access key.
struct Unsent {
    struct Object {
        std::uint64_t nbytes;
        std::size_t replies;
    };
    std::uint64_t nbytes = 0;
    std::unordered_map<std::uint64_t, Object> objects{};  // by offset
    std::deque<std::pair<int, std::uint64_t>>
        waiting{};  // connections (descriptor, number) whose next reply has to wait for room
};

// A reply under way. The memory of its payload is held until it has been sent.
struct Reply {
    FrameHeader header;
    std::string meta;
    const std::byte* payload = nullptr;
    std::uint64_t sent = 0;
    std::uint64_t held_object = 0;  // offset, 0 for none
    std::shared_ptr<Lease> held_lease;
    std::shared_ptr<AlignedBuffer> aside;  // holds the payload if it comes from the file
    std::uint64_t ticket = 0;              // of a fetch from the file: the reply, and those behind it, wait for its end
    std::uint64_t fetched = 0;             // bytes that count as fetched until the reply has gone
    std::uint64_t unsent = 0;              // bytes that count as unsent until then
    Clock::time_point begun{};             // when the header of its request had arrived
    File file;                             // goes with its first byte

    std::uint64_t nbytes() const noexcept { return sizeof header + meta.size() + header.payload_nbytes; }
};

// A read from the NVMe file that a reply of a connection waits for.
struct Fetch {
    int fd;
    std::uint64_t peer;    // the connection's number: descriptors are used again
    std::uint64_t ticket;  // of the reply
    std::string key;
    std::uint64_t offset;
    std::uint64_t nbytes;
    std::uint32_t block;
    bool promote;
    std::uint64_t ttl_ms;  // of a pin
};

// A lookup under way; each turn looks up some of its keys.
struct Lookup {
    std::uint32_t count;
    bool visits;          // the objects count as used
    std::uint32_t epoch;  // of the tenant when the first keys were looked up
    LookedUp answer;
    std::uint32_t number = 0;  // of the next key
    std::size_t at = 0;        // in the request's meta
};

struct Peer {
    enum class Stage { header, meta, payload, checksum };

    Stream socket;
    std::uint64_t number = 0;
    std::uint64_t session = 0;
    std::uint32_t tenant = 0;
    std::uint32_t rights = 0;
    std::string key;  // name of the access key
    Catalogue* objects = nullptr;
    Turns::Seat seat{nullptr, {nullptr}};

    Stage stage = Stage::header;
    std::size_t have = 0;  // bytes of header, meta or the checksum behind the payload
    FrameHeader header{};
    std::vector<std::byte> meta;
    Clock::time_point received{};  // when the last bytes came; one look at the clock serves all frames in them
    Clock::time_point begun{};     // when both had come

    std::byte* into = nullptr;  // where the payload goes; null: it is dropped
    std::uint64_t room = 0;     // bytes that have memory there
    std::uint64_t left = 0;     // bytes of payload that are still to come
    std::uint32_t crc = 0;
    std::uint64_t prepared = 0;  // offset of the object being received, 0 for none
    std::uint64_t prepared_serial = 0;
    std::shared_ptr<Lease> written_lease;  // of the write being received
    Segment area;                          // where its payloads may lie; not mapped for none
    AreaPart part{};                       // the part of the area that is being received
    AreaPart copying{};                    // the rest of a part that was received, still to be copied
    std::uint64_t copied = 0;              // bytes from there, in this turn
    std::uint64_t told = 0;                // bytes of the payload that it knows to have been copied
    Status refusal = Status::done;         // the answer once a payload that is dropped has come
    std::uint64_t refusal_serial = 0;
    std::string refusal_meta;

    std::deque<Reply> replies;
    std::deque<Fetch> waiting;                                    // until there is room for what they bring
    Unsent* unsent = nullptr;                                     // of its access key
    std::uint64_t holding = 0;                                    // bytes of objects that its replies hold
    std::deque<std::pair<std::uint64_t, std::string>> held_back;  // gets that wait to hold theirs: ticket of the reply, key
    bool in_line = false;                                         // in the line of its access key
    std::uint64_t fetching = 0;                                   // bytes of replies from the file that have not gone yet
    std::uint32_t watched = 0;                                    // events that the kernel was asked for
    bool readable = false;                                        // there may be input that was not read
    bool writable = true;                                         // the socket may have room for output
    bool hung_up = false;                                         // the other side sends no more
    bool listening = true;                                        // it is read from when it has input
    bool closing = false;                                         // once the replies have been sent
    bool dead = false;
    Patience sending;    // the frame that has begun
    Patience receiving;  // replies that are ready
    // The commit whose payload is being checked: offset of its extent (0 for none), and bytes checked so far.
    std::uint64_t committing = 0;
    std::uint64_t looked_at = 0;
    std::optional<Lookup> lookup;  // under way
    std::vector<std::byte> rest;   // received bytes that wait for a later turn
    std::size_t rest_from = 0;     // index in `rest` of the first byte that still waits

    bool has_area() const noexcept { return area.memory.data() != nullptr; }
    bool by_area() const noexcept { return (header.flags & payload_in_area) != 0; }
    // True during a request that takes several turns; bytes received behind it wait.
    bool works() const noexcept { return committing != 0 || lookup.has_value() || copying.nbytes > 0; }
    bool in_frame() const noexcept { return stage != Stage::header || have > 0; }
};

}  // namespace farpool
