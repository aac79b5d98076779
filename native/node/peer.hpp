// One connection of a node: the state of its input and its output.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "node/leases.hpp"
#include "node/objects.hpp"
#include "wire/frame.hpp"

namespace farpool {

using Clock = std::chrono::steady_clock;

// A reply under way. What its payload points to is held until it has been sent.
struct Reply {
    FrameHeader header;
    std::string meta;
    const std::byte* payload = nullptr;
    std::uint64_t sent = 0;
    std::uint64_t held_object = 0;       // offset, 0 for none
    std::shared_ptr<Lease> held_lease;
    std::shared_ptr<Aside> aside;   // holds the payload if it comes from the file
    std::uint64_t ticket = 0;       // of a fetch from the file: the reply, and those behind it, wait for its end
    std::uint64_t fetched = 0;      // bytes that count as fetched until the reply has gone

    std::uint64_t nbytes() const noexcept { return sizeof header + meta.size() + header.payload_nbytes; }
};

// What a reply of a connection wants from the file.
struct Fetch {
    int fd;
    std::uint64_t serial;  // of the connection: descriptors are used again
    std::uint64_t ticket;  // of the reply
    std::string key;
    std::uint64_t offset;
    std::uint64_t nbytes;
    std::uint32_t block;
    bool promote;
};

struct Peer {
    enum class Stage { header, meta, payload, checksum };

    File socket;
    std::uint64_t serial = 0;
    std::uint64_t session = 0;
    std::uint32_t tenant = 0;
    std::uint32_t rights = 0;
    Objects* objects = nullptr;

    Stage stage = Stage::header;
    std::size_t have = 0;  // bytes of header, meta or the checksum behind the payload
    FrameHeader header{};
    std::vector<std::byte> meta;

    std::byte* into = nullptr;  // where the payload goes; null: it is dropped
    std::uint64_t left = 0;     // bytes of payload that are still to come
    std::uint32_t crc = 0;
    std::uint64_t prepared = 0;             // offset of the object being received, 0 for none
    std::shared_ptr<Lease> written_lease;   // of the write being received
    Status refusal = Status::done;          // what is answered when a payload that is dropped has come
    std::uint64_t refusal_generation = 0;
    std::string refusal_text;

    std::deque<Reply> replies;
    std::deque<Fetch> waiting;   // until there is room for what they bring
    std::uint64_t fetching = 0;  // bytes of replies from the file that have not gone yet
    std::uint32_t watched = 0;   // events that the kernel was asked for
    bool closing = false;        // once the replies have been sent
    bool dead = false;
    Clock::time_point progress;  // of a frame or a reply that has begun

    bool in_frame() const noexcept { return stage != Stage::header || have > 0; }
};

}  // namespace farpool
