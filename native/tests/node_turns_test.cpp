// A node under the floods of one tenant: how much it works for them before it answers another, and how it shares its bytes.
#include <sys/socket.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <functional>
#include <memory>
#include <string>
#include <thread>
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
    explicit World(double stall = 30.0) : stall_s(stall) { server.expect_tenants({1, 2}); }

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
    const double stall_s;
    Server server{Server::Settings{folder.path(), 256 * mib, true, 10.0, stall_s, 0.0, {}, 0}};
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

// Work that was done for a tenant between two looks at its counters.
farpool::Work since(const Server::TenantStats& before, const Server::TenantStats& now) {
    const farpool::Work& one = before.usage.work;
    const farpool::Work& other = now.usage.work;
    return {other.bytes_in - one.bytes_in, other.bytes_out - one.bytes_out, other.other - one.other};
}

bool differ_by_5_percent_at_most(std::uint64_t one, std::uint64_t other) {
    return 20 * (std::max(one, other) - std::min(one, other)) <= std::max(one, other);
}

// Clients that read their tenants' objects without end, each with two replies under way.
class Readers {
public:
    explicit Readers(std::uint64_t nbytes) : nbytes_(nbytes) {}

    Client& add(World& world, std::unique_ptr<Client> client) {
        world.answered(*client, put("object", nbytes_));
        clients_.push_back(std::move(client));
        return *clients_.back();
    }
    void read_on() {
        for (const auto& client : clients_) {
            for (; client->asked < client->received + 2 * nbytes_; client->asked += nbytes_) {
                client->ask(framed(Op::get, "object"));
            }
            client->move();
        }
    }
    // Bytes that all of them have received.
    std::uint64_t received() const {
        std::uint64_t sum = 0;
        for (const auto& client : clients_) {
            sum += client->received;
        }
        return sum;
    }

private:
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
            Readers readers(nbytes);
            for (std::size_t number = 0; number < connections; ++number) {
                readers.add(world, world.client(1));
            }
            readers.add(world, world.client(2));
            const auto before = world.server.tenants();
            for (int steps = 0; readers.received() < 96 * mib; ++steps) {
                CHECK(steps < 100'000);
                world.server.step(0);
                readers.read_on();
            }
            // Half of the bytes and of the work each, to 5%.
            const auto tenants = world.server.tenants();
            const farpool::Work first = since(before.at(1), tenants.at(1));
            const farpool::Work second = since(before.at(2), tenants.at(2));
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

TEST("tenants that read all the time have bytes in proportion to their shares") {
    World world;
    world.server.set_bandwidth({{1, {3.0, 0, 0}}});
    CHECK_EQUAL(world.server.bandwidth().at(1).share, 3.0);
    Readers readers(256 * 1024);
    readers.add(world, world.client(1));
    for (int number = 0; number < 8; ++number) {
        readers.add(world, world.client(2));
    }
    const auto before = world.server.tenants();
    for (int steps = 0; readers.received() < 96 * mib; ++steps) {
        CHECK(steps < 100'000);
        world.server.step(0);
        readers.read_on();
    }
    const auto tenants = world.server.tenants();
    CHECK(differ_by_5_percent_at_most(since(before.at(1), tenants.at(1)).bytes_out,
                                      3 * since(before.at(2), tenants.at(2)).bytes_out));
}

TEST("a capped tenant has its cap at most, and the loop sleeps until it has room") {
    World world;
    constexpr std::uint64_t nbytes = 64 * 1024;
    constexpr std::uint64_t cap = mib;  // far less than the loop sends under a sanitizer on a busy machine
    constexpr std::uint64_t count = 16;
    Readers readers(nbytes);
    readers.add(world, world.client(1));
    world.server.set_bandwidth({{1, {1.0, 0, cap}}});
    const auto before = world.server.tenants();
    const auto begun = farpool::Clock::now();
    std::uint64_t steps = 0;
    const std::uint64_t first = readers.received();
    while (readers.received() < first + count * nbytes) {
        readers.read_on();
        world.server.step(1000);
        ++steps;
    }
    const std::chrono::duration<double> took = farpool::Clock::now() - begun;
    // A turn sends at least a part of an object. A loop that does not sleep takes thousands of steps.
    CHECK(steps <= count * 8);
    const std::uint64_t sent = since(before.at(1), world.server.tenants().at(1)).metered();
    const auto burst = static_cast<std::uint64_t>(cap * 0.02) + 2 * nbytes;
    CHECK(static_cast<double>(sent) <= cap * took.count() + static_cast<double>(burst));
    CHECK(world.server.tenants().at(1).usage.throttled > farpool::Clock::duration::zero());
    CHECK(world.server.tenants().at(1).usage.throttled <= took);
}

TEST("a tenant that is not capped has turns while another one waits for its cap") {
    World world;
    Readers readers(64 * 1024);
    readers.add(world, world.client(1));
    world.server.set_bandwidth({{1, {1.0, 0, 64 * 1024}}});
    const auto other = world.client(2);
    for (int request = 0; request < 50; ++request) {
        readers.read_on();
        CHECK(world.answered(*other, put("small", 4096)) < 20);
    }
}

TEST("with a new bandwidth a tenant above its former cap has its turn") {
    World world;
    const auto client = world.client(1);
    world.answered(*client, put("object", 4096));
    world.server.set_bandwidth({{1, {1.0, 0, 64 * 1024}}});
    for (int number = 0; number < 100; ++number) {
        world.server.connect(100, 1, "key 1");  // handshakes of 50 MiB of work: the longest debt, of ten seconds
    }
    CHECK(world.server.seconds_above_cap(1) > 5);
    world.server.start();
    client->ask(framed(Op::get, "object"));
    const std::uint64_t before = client->received;
    const auto begun = farpool::Clock::now();
    while (world.server.tenants().at(1).usage.throttled == farpool::Clock::duration::zero()) {
        CHECK(farpool::Clock::now() < begun + std::chrono::seconds(50));
        client->move();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    CHECK_EQUAL(client->received, before);
    world.server.set_bandwidth({});
    CHECK(world.server.seconds_above_cap(1) <= 0);
    while (client->received == before) {
        CHECK(farpool::Clock::now() < begun + std::chrono::seconds(50));
        client->move();
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    world.server.stop();
}

TEST("a client that waits for its tenant's cap is not closed as one that stalls") {
    World world(0.3);
    world.server.set_bandwidth({{1, {1.0, 0, 64 * 1024}}});
    const auto client = world.client(1);
    const std::string request = put("object", 128 * 1024);
    client->ask(request);
    const auto begun = farpool::Clock::now();
    while (client->received == 0) {
        CHECK(farpool::Clock::now() < begun + std::chrono::seconds(60));
        client->move();
        world.server.step(1000);
        CHECK_EQUAL(world.server.stats().connections, 1u);
    }
    CHECK(farpool::Clock::now() > begun + std::chrono::milliseconds(1500));  // the node has judged its clients by then
}

TEST("lists and handshakes are charged to their tenant") {
    World world;
    const auto client = world.client(1);
    for (int number = 0; number < 100; ++number) {
        world.answered(*client, put("object " + std::to_string(number), 1));
    }
    const auto before = world.server.tenants();
    world.server.connect(100, 1, "key 1");
    const auto shaken = world.server.tenants();
    CHECK_EQUAL(since(before.at(1), shaken.at(1)).units(), farpool::work::handshake);
    std::uint64_t place = 0;
    CHECK_EQUAL(world.server.list_some(1, place, {}, {}, 1000).size(), 100u);
    CHECK_EQUAL(place, 0u);
    const farpool::Work listing = since(shaken.at(1), world.server.tenants().at(1));
    CHECK(listing.units() >= farpool::work::listed_slice + 100 * farpool::work::listed);
    CHECK_EQUAL(listing.bytes(), 0u);
}

// The most work of the node between a small request and its answer, next to busy connections of the same tenant and another.
std::uint64_t most_work_before_a_small_answer(bool latency) {
    World world;
    Readers readers(256 * 1024);
    readers.add(world, world.client(2));
    for (int number = 0; number < 16; ++number) {
        readers.add(world, world.client(1));
    }
    Client asking(world.server, 1, "other key", latency);
    std::uint64_t most = 0;
    for (int round = 0; round < 60; ++round) {
        for (int step = 0; step < 40 + round % 7; ++step) {
            readers.read_on();
            world.server.step(0);
        }
        const std::uint64_t before = world.work();
        world.answered(asking, framed(Op::get, "not there"));
        most = std::max(most, world.work() - before);
    }
    return most;
}

TEST("small requests of the latency class pass busy connections of their own tenant") {
    constexpr std::uint64_t turn = farpool::Turns::quantum;
    CHECK(most_work_before_a_small_answer(true) <= 2 * turn);
    CHECK(most_work_before_a_small_answer(false) > 2 * turn);
}

int main() { return farpool::testing::run(); }
