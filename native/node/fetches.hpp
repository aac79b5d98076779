// Reads of payloads from the lower medium, for replies that wait for them.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "node/catalogue/catalogue.hpp"
#include "node/catalogue/medium.hpp"
#include "node/events.hpp"

namespace farpool {

// A read that one reply waits for.
struct Fetch {
    int fd;
    std::uint64_t connection;  // its number
    std::uint64_t ticket;      // of the reply
    std::string key;
    std::uint64_t offset;
    std::uint64_t nbytes;
    std::uint32_t block;
    bool promote;          // the object returns to RAM
    std::uint64_t ttl_ms;  // of a pin
};

class Fetches {
public:
    // `deliver` receives each fetch with true if the payload was read; it must not throw. `path`: of the lower medium.
    Fetches(Events& events, std::string path, std::function<void(const Fetch&, bool)> deliver)
        : events_(events), path_(std::move(path)), deliver_(std::move(deliver)) {}

    // A number for a reply that has to wait. Never 0.
    std::uint64_t next_ticket() noexcept { return ++tickets_; }
    // Reads the payload of an object that the caller holds, and returns the buffer for it. Requests for an object that is being
    // read share the read.
    std::shared_ptr<AlignedBuffer> start(std::uint32_t tenant, Catalogue& objects, const Fetch& fetch);

private:
    using Place = std::pair<std::uint32_t, std::uint64_t>;  // tenant, offset
    struct Reading {
        std::shared_ptr<AlignedBuffer> into;
        std::vector<Fetch> waiting;
    };

    void finish(const Place& place, Catalogue& objects, bool ok);

    Events& events_;
    std::string path_;
    std::function<void(const Fetch&, bool)> deliver_;
    std::map<Place, Reading> readings_;  // the objects are retained
    std::uint64_t tickets_ = 0;
};

}  // namespace farpool
