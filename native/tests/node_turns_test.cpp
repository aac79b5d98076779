// A node under the floods of one tenant: how much it works for them before it answers another, and how it shares its bytes.
#include <sys/socket.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/crc32c.hpp"
#include "node/server.hpp"
#include "tests/folder.hpp"
#include "tests/testing.hpp"

using farpool::FrameHeader;
using farpool::ObjectHead;
using farpool::Op;
using farpool::Server;
using farpool::Stream;
using farpool::testing::Folder;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;

std::string framed(Op op, const std::string& meta, const std::string& payload = {}) {
    FrameHeader header = farpool::make_header(op);
    header.payload_nbytes = payload.size();
    header.payload_crc = farpool::crc32c(payload.data(), payload.size());
    seal(header, meta.data(), static_cast<std::uint32_t>(meta.size()));
    return std::string(reinterpret_cast<const char*>(&header), sizeof header) + meta + payload;
}

std::string put(const std::string& key, std::uint64_t nbytes) {
    const ObjectHead head{};
    return framed(Op::put, std::string(reinterpret_cast<const char*>(&head), sizeof head) + key, std::string(nbytes, 'x'));
}

std::string lookup(const std::string& prefix, std::uint32_t count) {
    std::string meta(4, '\0');
    meta.append(reinterpret_cast<const char*>(&count), sizeof count);
    for (std::uint32_t number = 0; number < count; ++number) {
        const std::string key = prefix + std::to_string(number);
        const auto length = static_cast<std::uint16_t>(key.size());
        meta.append(reinterpret_cast<const char*>(&length), sizeof length);
        meta += key;
    }
    return framed(Op::lookup, meta);
}

// A connection that sends as much as the node takes, and reads all that the node sends.
class Client {
public:
    Client(Server& server, std::uint32_t tenant, const std::string& key = {}, bool latency = false) {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
        socket_ = Stream(ends[0]);
        const std::string name = key.empty() ? "key " + std::to_string(tenant) : key;
        server.adopt(Stream(ends[1]), key.empty() ? tenant : 10 + tenant, tenant, 15, name, latency);
    }

    void ask(const std::string& request) { outgoing_ += request; }
    // Keeps requests waiting to be sent.
    void flood(const std::function<std::string()>& request) {
        if (outgoing_.size() - sent_ < mib) {
            outgoing_.erase(0, sent_);
            sent_ = 0;
            outgoing_ += request();
        }
        move();
    }
    void move() {
        if (sent_ < outgoing_.size()) {
            const ssize_t sent =
                ::send(socket_.fd(), outgoing_.data() + sent_, outgoing_.size() - sent_, MSG_DONTWAIT | MSG_NOSIGNAL);
            CHECK(sent > 0 || errno == EAGAIN);
            sent_ += sent > 0 ? static_cast<std::size_t>(sent) : 0;
        }
        static std::vector<std::byte> buffer(mib);
        for (ssize_t got = 1; got > 0;) {
            got = socket_.receive(buffer.data(), buffer.size());
            CHECK(got > 0 || (got < 0 && errno == EAGAIN));
            received += got > 0 ? static_cast<std::uint64_t>(got) : 0;
        }
    }

    // The next reply, which has no payload.
    std::string answer(Server& server) {
        std::string answer;
        FrameHeader header{};
        for (int steps = 0; answer.size() < sizeof header + header.meta_nbytes || answer.size() < sizeof header; ++steps) {
            CHECK(steps < 100'000);
            server.step(0);
            std::byte some[4096];
            const ssize_t got = socket_.receive(some, sizeof some);
            CHECK(got > 0 || (got < 0 && errno == EAGAIN));
            answer.append(reinterpret_cast<const char*>(some), got > 0 ? static_cast<std::size_t>(got) : 0);
            std::memcpy(&header, answer.data(), std::min(sizeof header, answer.size()));
        }
        return answer;
    }

    std::uint64_t received = 0, asked = 0;  // bytes

private:
    Stream socket_;
    std::string outgoing_;
    std::size_t sent_ = 0;
};

struct World {
    World() { server.expect_tenants({1, 2}); }

    std::unique_ptr<Client> client(std::uint32_t tenant) { return std::make_unique<Client>(server, tenant); }
    // Sends one request and waits for its reply to begin; returns the steps that it took.
    int answered(Client& client, const std::string& request) {
        client.ask(request);
        const std::uint64_t before = client.received;
        for (int steps = 0;; ++steps) {
            CHECK(steps < 100'000);
            client.move();
            if (client.received > before) {
                return steps;
            }
            server.step(0);
        }
    }
    // Bytes that the node has moved, and 400 for each key that it has searched for the flooding tenant.
    std::uint64_t work() {
        const Server::Stats stats = server.stats();
        return stats.bytes_in + stats.bytes_out + 400 * server.tenants().at(1).counts.searches;
    }

    const Folder folder;
    Server server{Server::Settings{folder.path(), 256 * mib, true, 10.0, 30.0, 0.0, {}, 0}};
};

// The most work of the node between a request of an idle tenant and its answer, while another tenant floods the node.
std::uint64_t most_work_before_an_answer(std::size_t connections, const std::function<std::string()>& request) {
    World world;
    const auto victim = world.client(2);
    world.answered(*victim, put("small", 4096));
    std::vector<std::unique_ptr<Client>> flooding;
    for (std::size_t number = 0; number < connections; ++number) {
        flooding.push_back(world.client(1));
    }
    for (std::uint64_t number = 0; number < 4000; ++number) {
        world.answered(*flooding[0], put("found " + std::to_string(number), 1));
    }
    world.answered(*flooding[0], put("middle", 64 << 10));
    world.answered(*flooding[0], put("large", 8 * mib));
    std::uint64_t most = 0;
    for (int round = 0; round < 60; ++round) {
        for (int step = 0; step < 40 + round % 7; ++step) {
            for (const auto& client : flooding) {
                client->flood(request);
            }
            world.server.step(0);
        }
        const std::uint64_t before = world.work();
        world.answered(*victim, framed(Op::get, "small"));
        most = std::max(most, world.work() - before);
    }
    CHECK(world.work() > 60 * mib / 8);  // the flood kept the node busy
    return most;
}

constexpr std::uint64_t most_work = 4 * farpool::Turns::quantum;

bool differ_by_5_percent_at_most(std::uint64_t one, std::uint64_t other) {
    return 20 * (std::max(one, other) - std::min(one, other)) <= std::max(one, other);
}

// Lets clients read an object without end, each with two replies under way, for so many steps.
class Readers {
public:
    Readers(World& world, std::uint64_t nbytes) : world_(world), nbytes_(nbytes) {}

    void add(std::unique_ptr<Client> client) { clients_.push_back(std::move(client)); }
    void read_on() {
        for (const auto& client : clients_) {
            for (; client->asked < client->received + 2 * nbytes_; client->asked += nbytes_) {
                client->ask(framed(Op::get, "object"));
            }
            client->move();
        }
    }
    Client& operator[](std::size_t number) { return *clients_[number]; }

private:
    World& world_;
    std::uint64_t nbytes_;
    std::vector<std::unique_ptr<Client>> clients_;
};

}  // namespace

TEST("another tenant's lookups delay a get a little") {
    for (const std::size_t connections : {1, 64}) {
        const std::string found = lookup("found ", 4000);
        const std::string missing = lookup("none ", 4000);
        CHECK(most_work_before_an_answer(connections, [&] { return found; }) < most_work);
        CHECK(most_work_before_an_answer(connections, [&] { return missing; }) < most_work);
    }
}

TEST("another tenant's gets delay a get a little") {
    for (const std::size_t connections : {1, 64}) {
        CHECK(most_work_before_an_answer(connections, [] { return framed(Op::get, "middle"); }) < most_work);
        CHECK(most_work_before_an_answer(connections, [] { return framed(Op::get, "large"); }) < most_work);
    }
}

TEST("another tenant's puts delay a get a little") {
    for (const std::size_t connections : {1, 64}) {
        int number = 0;
        CHECK(most_work_before_an_answer(connections, [&] { return put("new " + std::to_string(++number), 4096); }) <
              most_work);
        CHECK(most_work_before_an_answer(connections, [&] { return put("large " + std::to_string(++number), 16 * mib); }) <
              most_work);
    }
}

TEST("two tenants that read all the time have equal parts of the bytes, with 1, 16 and 64 connections against one") {
    for (const std::size_t connections : {1, 16, 64}) {
        for (const std::uint64_t nbytes : {64 * 1024, 1 << 20, 8 << 20}) {
            World world;
            std::vector<std::unique_ptr<Client>> many;
            for (std::size_t number = 0; number < connections; ++number) {
                many.push_back(world.client(1));
            }
            const auto one = world.client(2);
            world.answered(*many[0], put("object", nbytes));
            world.answered(*one, put("object", nbytes));
            const auto read_on = [&](Client& client) {  // two replies are under way at any time
                for (; client.asked < client.received + 2 * nbytes; client.asked += nbytes) {
                    client.ask(framed(Op::get, "object"));
                }
                client.move();
            };
            std::uint64_t of_many = 0;
            for (int steps = 0; of_many + one->received < 96 * mib; ++steps) {
                CHECK(steps < 100'000);
                world.server.step(0);
                read_on(*one);
                of_many = 0;
                for (const auto& client : many) {
                    read_on(*client);
                    of_many += client->received;
                }
            }
            // Half of the bytes and of the work each, to 5%.
            const auto tenants = world.server.tenants();
            const farpool::Work& first = tenants.at(1).usage.work;
            const farpool::Work& second = tenants.at(2).usage.work;
            CHECK(first.bytes_out > 40 * mib && second.bytes_out > 40 * mib);
            CHECK(differ_by_5_percent_at_most(first.bytes_out, second.bytes_out));
            CHECK(differ_by_5_percent_at_most(first.units(), second.units()));
        }
    }
}

// The answer to the ping cannot be sent, so the node closes the connection in the turn in which it took memory for the put.
TEST("a tenant that connects again for each request, and is gone before its answer, has no more than its part") {
    World world;
    const auto victim = world.client(2);
    constexpr std::uint64_t nbytes = 64 << 10;
    world.answered(*victim, put("object", nbytes));
    const std::string request = framed(Op::ping, "") + put("announced", mib).substr(0, sizeof(FrameHeader) + 100);
    std::uint64_t requests = 0;
    for (int steps = 0; victim->received < 64 * mib; ++steps) {
        CHECK(steps < 100'000);
        if (world.server.stats().connections == 1) {
            const auto greedy = world.client(1);
            greedy->ask(request);
            greedy->move();
            ++requests;
        }
        for (; victim->asked < victim->received + 4 * nbytes; victim->asked += nbytes) {
            victim->ask(framed(Op::get, "object"));
        }
        victim->move();
        world.server.step(0);
    }
    CHECK(requests > 5);
    // A get of 64 KiB costs a third more than its bytes, a request the zeroing of a MiB.
    CHECK(requests * farpool::work::backed_byte * mib <= victim->received * 3 / 2);
}

TEST("a lookup that takes several turns begins again when its tenant is rotated, and says nothing of the epoch before") {
    World world;
    const auto asking = world.client(1);
    const auto other = world.client(2);
    const auto rotating = world.client(1);
    for (std::uint64_t number = 0; number < 4000; ++number) {
        world.answered(*asking, put("found " + std::to_string(number), 1));
    }
    asking->ask(lookup("found ", 4000));
    asking->move();
    const std::uint64_t searches = world.server.tenants().at(1).counts.searches;
    for (int steps = 0; world.server.tenants().at(1).counts.searches == searches; ++steps) {
        CHECK(steps < 1000);
        world.server.step(0);
    }
    CHECK(world.server.tenants().at(1).counts.searches < searches + 4000);
    const std::uint32_t epoch = 1;
    world.answered(*rotating, framed(Op::rotate, std::string(reinterpret_cast<const char*>(&epoch), sizeof epoch)));
    CHECK(world.server.tenants().at(1).counts.searches < searches + 4000);
    const std::string answer = asking->answer(world.server);
    FrameHeader header;
    std::memcpy(&header, answer.data(), sizeof header);
    CHECK_EQUAL(header.epoch, epoch);
    const std::string meta = answer.substr(sizeof header);
    CHECK_EQUAL(meta.size(), farpool::LookedUp::nbytes(4000));
    CHECK(meta.substr(8).find_first_not_of('\0') == std::string::npos);
}

int main() { return farpool::testing::run(); }
