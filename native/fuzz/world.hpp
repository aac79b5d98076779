// A node and its clients in one process, under random requests, damage and restarts, with checks of its invariants.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "fuzz/book.hpp"
#include "fuzz/client.hpp"
#include "fuzz/dice.hpp"
#include "node/server.hpp"

namespace farpool::fuzz {

class World {
public:
    // A world whose files are in `folder`, which is emptied at the beginning and at the end.
    World(std::string folder, std::uint64_t seed);
    ~World();

    // Runs one trial; throws std::logic_error if a check fails.
    void run();

private:
    // The tenant whose clients break the protocol. Tenants 1 and 2 keep to it, and all their replies are checked.
    static constexpr std::uint32_t chaos = 3;

    void act();
    void request(Client& client);
    void offer(std::size_t tenant, Client::Asked& asked, Frame& frame, bool& repair);
    void end_preparation(Client& client, Client::Asked& asked, Frame& frame);
    void request_on_key(Client& client);
    void request_on_lease(Client& client);
    void spoil(Client& client, Frame frame);
    Frame random_frame();
    void connect();
    void lend(Client& client);
    void release(Client& client);
    void scribble();
    void look();
    void set_bandwidth();
    void restart();
    void damage_files();
    void open_server();
    void settle();
    void drop_all(std::uint32_t tenant);
    void finish();

    std::string key();
    std::string random_payload();
    std::uint64_t ttl();
    Mapping& memory_of(std::uint32_t tenant);

    const std::string folder_;
    Dice dice_;
    const std::uint64_t capacity_;
    const bool with_shelf_;
    const bool with_rates_;  // tenants have caps and guarantees, so that the clock takes part in what happens
    const bool ephemeral_;
    std::unique_ptr<Server> server_;
    std::vector<std::unique_ptr<Client>> clients_;
    std::array<Book, 4> books_;
    std::map<std::uint32_t, Mapping> memory_;  // the data segments, as publishers have them
    std::map<std::uint64_t, std::uint64_t> lent_;
    std::map<Book::Object, std::string> payloads_;  // payloads of prepared objects
};

}  // namespace farpool::fuzz
