// Claims of extents by tickets, orders, and restarts of the node.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <system_error>
#include <thread>
#include <vector>

#include "core/crc32c.hpp"
#include "node/refusals.hpp"
#include "node/server.hpp"
#include "tests/folder.hpp"
#include "tests/testing.hpp"

using farpool::Busy;
using farpool::Claiming;
using farpool::Clock;
using farpool::Extents;
using farpool::FrameHeader;
using farpool::Lapsed;
using farpool::Op;
using farpool::PoolLease;
using farpool::Server;
using farpool::Status;
using farpool::Stream;
using farpool::Tenure;
using farpool::Ticket;
using farpool::testing::Folder;
using Action = Claiming::Action;

namespace {

constexpr std::uint64_t mib = std::uint64_t{1} << 20;
constexpr PoolLease lease{0x0123456789abcdef, 0xfedcba9876543210};
constexpr std::uint64_t session = 7;
constexpr std::uint32_t tenant = 1;

Ticket ticket(std::uint64_t epoch, std::vector<std::pair<std::uint32_t, std::uint64_t>> extents = {{1, 65536}},
              double seconds = 60, std::uint32_t rights = 3) {
    return {lease, epoch, rights, seconds, std::move(extents)};
}

struct Node {
    explicit Node(const Folder& folder) : server({folder.path(), 16 * mib, false, 60, 60, 0, "", 0}) {
        server.expect_tenants({tenant, 2});
    }
    std::uint64_t claimed(std::uint64_t epoch) { return server.claim(session, tenant, ticket(epoch)).at(0).lease; }

    Server server;
};

// A data connection of a session that has no access key.
class Client {
public:
    explicit Client(Server& server, std::uint64_t number = session) : server_(server) {
        int ends[2];
        CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
        socket_ = Stream(ends[0]);
        server.adopt(Stream(ends[1]), number, tenant, 15, "");
    }

    void send(const std::string& bytes) {
        CHECK(::send(socket_.fd(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
    }
    // Receives at most 16 KiB; false once the node has closed the connection.
    bool receive() {
        std::byte some[16384];
        const ssize_t got = ::recv(socket_.fd(), some, sizeof some, MSG_DONTWAIT);
        CHECK(got >= 0 || errno == EAGAIN);
        answer.append(reinterpret_cast<const char*>(some), got > 0 ? static_cast<std::size_t>(got) : 0);
        return got != 0;
    }
    // The status of the next reply; its payload, if it has one, is kept.
    Status status() {
        FrameHeader header{};
        const auto whole = [&] {
            std::memcpy(static_cast<void*>(&header), answer.data(), std::min(sizeof header, answer.size()));
            return sizeof header + header.meta_nbytes + header.payload_nbytes;
        };
        for (int steps = 0; answer.size() < sizeof header || answer.size() < whole(); ++steps) {
            CHECK(steps < 100'000);
            server_.step(0);
            CHECK(receive());
        }
        payload = answer.substr(sizeof header + header.meta_nbytes, header.payload_nbytes);
        answer.erase(0, whole());
        return static_cast<Status>(header.status);
    }
    Status write(std::uint64_t number, const std::string& bytes) {
        send(write_head(number, bytes) + bytes);
        return status();
    }
    Status read(std::uint64_t number, std::uint64_t nbytes) {
        send_read(number, nbytes);
        return status();
    }
    void send_read(std::uint64_t number, std::uint64_t nbytes) {
        FrameHeader header = farpool::make_header(Op::read);
        header.lease = number;
        const std::uint64_t range[2] = {0, nbytes};
        seal(header, range, sizeof range);
        send(std::string(reinterpret_cast<const char*>(&header), sizeof header) +
             std::string(reinterpret_cast<const char*>(range), sizeof range));
    }
    static std::string write_head(std::uint64_t number, const std::string& bytes) {
        FrameHeader header = farpool::make_header(Op::write);
        header.lease = number;
        header.payload_nbytes = bytes.size();
        header.payload_crc = farpool::crc32c(bytes.data(), bytes.size());
        const std::uint64_t offset = 0;
        seal(header, &offset, sizeof offset);
        return std::string(reinterpret_cast<const char*>(&header), sizeof header) +
               std::string(reinterpret_cast<const char*>(&offset), sizeof offset);
    }

    std::string payload;
    std::string answer;  // bytes received after the last reply that status() has returned

private:
    Server& server_;
    Stream socket_;
};

std::size_t files(const Folder& folder, const std::string& prefix) {
    std::size_t count = 0;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
        count += entry.path().filename().string().starts_with(prefix) ? 1 : 0;
    }
    return count;
}

TEST("a lease's identity has the same bytes as text and as numbers") {
    CHECK_EQUAL(lease.hex(), "0123456789abcdeffedcba9876543210");
    CHECK(PoolLease::from(lease.bytes()) == lease);
    CHECK_THROWS(std::invalid_argument, PoolLease::from("short"));
}

TEST("a claim makes zeroed extents once, and the session reads and writes them") {
    const Folder folder;
    Node node(folder);
    const auto made = node.server.claim(session, tenant, ticket(1, {{1, 65536}, {5, 4096}}));
    CHECK(made.size() == 2 && made[0].made && made[1].made && made[1].number == 5);
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{65536 + 4096});
    const auto again = node.server.claim(session, tenant, ticket(1, {{1, 65536}, {5, 4096}}));
    CHECK(!again[0].made && again[0].lease == made[0].lease);
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{65536 + 4096});
    Client client(node.server);
    CHECK(client.read(made[0].lease, 4) == Status::done);
    CHECK_EQUAL(client.payload, std::string(4, '\0'));
    CHECK(client.write(made[0].lease, "data") == Status::done);
    CHECK(client.read(made[0].lease, 4) == Status::done);
    CHECK_EQUAL(client.payload, "data");
}

TEST("a claim that does not fit makes nothing") {
    const Folder folder;
    Node node(folder);
    CHECK_THROWS(std::exception, node.server.claim(session, tenant, ticket(1, {{1, 65536}, {2, 15 * mib}, {3, 15 * mib}})));
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{0});
    CHECK_EQUAL(files(folder, "extent-"), std::size_t{0});
    CHECK_THROWS(Lapsed, (node.claimed(1), node.server.claim(session, tenant, ticket(1, {{1, 4096}}))));
}

TEST("a claim may take more than the tenant's part of the node, because a manager has granted it") {
    const Folder folder;
    Node node(folder);
    node.server.set_memory({{tenant, {4 * mib, 4 * mib, 0}}, {2, {4 * mib, 4 * mib, 0}}}, true);
    node.server.claim(session, tenant, ticket(1, {{1, 10 * mib}}));
    CHECK_EQUAL(node.server.stats().lent, 10 * mib);
    // A lease that no manager has granted is held to the tenant's part.
    CHECK_THROWS(Busy, node.server.lend(session + 1, tenant, 4096));
    CHECK(node.server.lend(session + 2, 2, 2 * mib) != 0);
}

TEST("a node that drains makes no extents, and the extents that it has stay in use") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.claimed(1);
    for (const auto state : {farpool::NodeState::draining, farpool::NodeState::read_only}) {
        node.server.set_state(state);
        CHECK_THROWS(farpool::Full, node.server.claim(session, tenant, ticket(1, {{1, 65536}, {2, 4096}})));
        CHECK_EQUAL(node.server.stats().lent, std::uint64_t{65536});
        CHECK_EQUAL(node.claimed(1), number);
        Client client(node.server);
        CHECK(client.write(number, "data") == Status::done);
        CHECK(client.read(number, 4) == Status::done);
    }
    CHECK_EQUAL(files(folder, "extent-"), std::size_t{1});
    node.server.set_state(farpool::NodeState::active);
    CHECK(node.server.claim(session, tenant, ticket(1, {{1, 65536}, {2, 4096}})).at(1).made);
}

TEST("an extent is only for sessions that have shown a ticket, and only for its owner") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.claimed(1);
    Client other(node.server, 8);
    CHECK(other.read(number, 4) == Status::lapsed);
    CHECK(other.read(number + 2, 4) == Status::unknown);
    CHECK_THROWS(Lapsed, node.server.claim(9, 2, ticket(1)));
}

TEST("an expired claim refuses every request and frees nothing, and a later ticket renews it") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.claimed(1);
    Client client(node.server);
    CHECK(client.write(number, "data") == Status::done);
    node.server.claim(session, tenant, ticket(1, {{1, 65536}}, 0));
    CHECK(client.read(number, 4) == Status::lapsed);
    CHECK(client.write(number, "late") == Status::lapsed);
    CHECK_THROWS(Lapsed, node.server.lease_file(session, number));
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{65536});
    CHECK_EQUAL(node.claimed(1), number);
    CHECK(client.read(number, 4) == Status::done);
    CHECK_EQUAL(client.payload, "data");
}

TEST("a read-only ticket reads and does not write, also through the file") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.server.claim(session, tenant, ticket(1, {{1, 65536}}, 60, 1)).at(0).lease;
    Client client(node.server);
    CHECK(client.write(number, "data") == Status::denied);
    CHECK(client.read(number, 4) == Status::done);
    const farpool::File file(node.server.lease_file(session, number));
    CHECK(pwrite(file.fd(), "x", 1, 4096) == -1 && errno == EBADF);
}

TEST("a later epoch fences claims of earlier ones, in other sessions too") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.claimed(1);
    Client client(node.server);
    node.server.claim(8, tenant, ticket(2));
    CHECK(client.write(number, "late") == Status::lapsed);
    CHECK_THROWS(Lapsed, node.claimed(1));
    CHECK(node.server.order({lease, 3, Action::raise, {}}).empty());
    CHECK(Client(node.server, 8).read(number, 4) == Status::lapsed);
    CHECK_THROWS(Lapsed, node.server.order({lease, 2, Action::read_only, {}}));
    CHECK_EQUAL(node.claimed(3), number);
}

TEST("a write that is under way when the epoch rises changes no more bytes") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.claimed(1);
    Client client(node.server);
    client.send(Client::write_head(number, std::string(8, 'x')) + "xxxx");
    for (int steps = 0; steps < 10; ++steps) {
        node.server.step(0);
    }
    node.server.order({lease, 2, Action::raise, {}});
    client.send("xxxx");
    CHECK(client.status() == Status::lapsed);
    node.claimed(2);
    CHECK(client.read(number, 8) == Status::done);
    CHECK_EQUAL(client.payload, std::string("xxxx") + std::string(4, '\0'));
}

TEST("reads that wait for earlier replies are refused when the epoch rises") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.server.claim(session, tenant, ticket(1, {{1, 4 * mib}})).at(0).lease;
    Client client(node.server);
    for (int reads = 0; reads < 3; ++reads) {  // the first reply is more than the socket takes
        client.send_read(number, 4 * mib);
    }
    for (int steps = 0; steps < 20; ++steps) {
        node.server.step(0);
    }
    node.server.order({lease, 2, Action::raise, {}});
    CHECK(client.status() == Status::done);
    CHECK_EQUAL(client.payload.size(), std::size_t{4 * mib});
    CHECK(client.status() == Status::lapsed);
    CHECK(client.status() == Status::lapsed);
}

TEST("a client that reads slowly does not keep the memory of an ended extent for long") {
    const Folder folder;
    Server server({folder.path(), 16 * mib, false, 60, 1, 0, "", 0});
    server.expect_tenants({tenant});
    const std::uint64_t number = server.claim(session, tenant, ticket(1, {{1, 8 * mib}})).at(0).lease;
    Client client(server);
    client.send_read(number, 8 * mib);
    for (int steps = 0; steps < 20; ++steps) {
        server.step(0);
    }
    server.order({lease, 2, Action::end, {}});
    do {  // fast enough for a reply that does not keep anything
        std::this_thread::sleep_for(std::chrono::milliseconds(20));
        server.step(0);
    } while (client.receive());
    CHECK(client.answer.size() < 8 * mib);
}

TEST("only an order of a later epoch than the extent's ends it, and ends it once") {
    const Folder folder;
    Node node(folder);
    node.server.claim(session, tenant, ticket(2, {{1, 65536}, {2, 4096}}));
    CHECK_THROWS(Lapsed, node.server.order({lease, 2, Action::end, {1}}));
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{65536 + 4096});
    CHECK(node.server.order({lease, 3, Action::end, {1}}) == std::vector<std::uint32_t>{1});
    CHECK(node.server.order({lease, 3, Action::end, {1}}).empty());
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{4096});
    CHECK_EQUAL(files(folder, "extent-"), std::size_t{1});
    // The order for extent 2 comes after tickets of a later epoch, which do not name it.
    node.server.claim(session, tenant, ticket(5, {{3, 4096}}));
    CHECK(node.server.order({lease, 4, Action::end, {2}}) == std::vector<std::uint32_t>{2});
    CHECK(node.server.order({lease, 6, Action::end, {}}) == std::vector<std::uint32_t>{3});
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{0});
    CHECK_THROWS(Lapsed, node.claimed(5));
}

TEST("an ended extent is unknown to the session that had claimed it") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.claimed(1);
    Client client(node.server);
    node.server.order({lease, 2, Action::end, {}});
    CHECK(client.read(number, 4) == Status::unknown);
    CHECK(node.server.leases(session).empty());
}

TEST("an order frees the memory of an extent that a program has mapped, and the program reads zeros") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.claimed(1);
    CHECK(Client(node.server).write(number, std::string(32768, 'x')) == Status::done);
    const farpool::File file(node.server.lease_file(session, number));
    node.server.order({lease, 2, Action::end, {}});
    for (int steps = 0; file.taken() > 16384; ++steps) {
        CHECK(steps < 1000);
        node.server.step(10);
    }
    char byte = 'x';
    CHECK(pread(file.fd(), &byte, 1, farpool::segment_header_nbytes + 4096) == 1 && byte == 0);
}

TEST("an extent whose file a program cuts off ends, and its epoch stays") {
    const Folder folder;
    {
        Node node(folder);
        const std::uint64_t number = node.claimed(4);
        const farpool::File file(node.server.lease_file(session, number));
        CHECK(ftruncate(file.fd(), 100) == 0);
        for (int steps = 0; node.server.stats().lent > 0; ++steps) {
            CHECK(steps < 100);
            node.server.step(100);
        }
        CHECK(Client(node.server).read(number, 4) == Status::unknown);
    }
    Node node(folder);
    CHECK_THROWS(Lapsed, node.claimed(3));
    CHECK(node.server.claim(session, tenant, ticket(4)).at(0).made);
}

// The parts of a node that claims need, so that a test can do something between the steps of a claim.
struct Parts {
    explicit Parts(const Folder& folder)
        : tenants(folder.path(), false, budget, nullptr, events), lending(folder.path(), false, budget, quotas, events) {}

    farpool::Budget budget{16 * mib, {}, farpool::Budget::SystemLeft()};
    farpool::Deadlines deadlines{60, 60};
    farpool::Events events;
    farpool::Quotas quotas{budget};
    farpool::Tenants tenants;
    farpool::Lending lending;
    farpool::Sessions sessions{budget, quotas, tenants, lending, deadlines, events};
    Claiming claiming{lending, sessions, events};

    Claiming::Draft begun(std::uint64_t number, std::uint64_t epoch) {
        return claiming.begin(number, tenant, ticket(epoch), Clock::time_point{});
    }
    void make(Claiming::Draft& draft) {
        claiming.make(draft, [](std::uint64_t) { return false; });
    }
};

TEST("two sessions that claim a missing extent at the same time share one") {
    const Folder folder;
    Parts parts(folder);
    auto first = parts.begun(1, 1);
    auto second = parts.begun(2, 1);
    CHECK_EQUAL(parts.lending.lent(), std::uint64_t{2 * 65536});
    parts.make(first);
    parts.make(second);
    const auto made = parts.claiming.finish(first, Clock::time_point{});
    const auto found = parts.claiming.finish(second, Clock::time_point{});
    CHECK(made[0].made && !found[0].made && made[0].lease == found[0].lease);
    CHECK_EQUAL(parts.lending.lent(), std::uint64_t{65536});
    CHECK_EQUAL(files(folder, "extent-"), std::size_t{1});
}

TEST("an order that comes while a claim makes its memory fences the claim") {
    const Folder folder;
    Parts parts(folder);
    auto draft = parts.begun(1, 1);
    parts.make(draft);
    parts.claiming.carry_out({lease, 2, Action::raise, {}}, Clock::time_point{});
    CHECK_THROWS(Lapsed, parts.claiming.finish(draft, Clock::time_point{}));
    parts.claiming.drop(draft);
    CHECK_EQUAL(parts.lending.lent(), std::uint64_t{0});
    CHECK_EQUAL(files(folder, "extent-"), std::size_t{0});
    // A present extent that an order ends before the claim is entered is not made again as an empty one.
    auto whole = parts.begun(1, 2);
    parts.make(whole);
    parts.claiming.finish(whole, Clock::time_point{});
    auto late = parts.begun(1, 3);
    parts.claiming.carry_out({lease, 3, Action::end, {1}}, Clock::time_point{});
    CHECK_THROWS(Lapsed, parts.claiming.finish(late, Clock::time_point{}));
    parts.claiming.drop(late);
    CHECK_EQUAL(parts.lending.lent(), std::uint64_t{0});
    parts.lending.finish();
}

TEST("a read-only order stops writes until a later epoch, whatever order of its epoch follows") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.claimed(1);
    Client client(node.server);
    node.server.order({lease, 1, Action::read_only, {}});
    node.server.order({lease, 1, Action::raise, {}});
    CHECK(client.write(number, "data") == Status::lapsed);
    CHECK(client.read(number, 4) == Status::done);
    node.server.order({lease, 2, Action::raise, {}});
    node.claimed(2);
    CHECK(client.write(number, "data") == Status::done);
}

TEST("the end of a session, and giving a claim back, free no extent") {
    const Folder folder;
    Server server({folder.path(), 16 * mib, false, 0, 60, 0, "", 0});
    server.expect_tenants({tenant});
    const std::uint64_t number = server.claim(session, tenant, ticket(1)).at(0).lease;
    CHECK(server.release(session, number));
    CHECK(!server.release(session, number));
    server.claim(session, tenant, ticket(1));
    for (int steps = 0; server.stats().sessions > 0; ++steps) {
        CHECK(steps < 100);
        server.step(100);
    }
    CHECK_EQUAL(server.stats().lent, std::uint64_t{65536});
    CHECK(!server.claim(session, tenant, ticket(1)).at(0).made);
}

TEST("extents, epochs and restrictions survive the process") {
    const Folder folder;
    std::uint64_t number = 0;
    {
        Node node(folder);
        number = node.claimed(1);
        CHECK(Client(node.server).write(number, "data") == Status::done);
        node.server.claim(session, tenant, ticket(3));
        node.server.order({lease, 4, Action::read_only, {}});
    }
    Node node(folder);
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{65536});
    Client client(node.server);
    CHECK(client.read(number, 4) == Status::lapsed);
    CHECK_THROWS(Lapsed, node.claimed(3));
    CHECK_EQUAL(node.claimed(4), number);
    CHECK(client.write(number, "more") == Status::lapsed);
    CHECK(client.read(number, 4) == Status::done);
    CHECK_EQUAL(client.payload, "data");
}

TEST("an epoch survives the process after the last extent has ended") {
    const Folder folder;
    {
        Node node(folder);
        node.claimed(1);
        node.server.order({lease, 2, Action::end, {}});
        CHECK_EQUAL(files(folder, "fence-"), std::size_t{1});
    }
    Node node(folder);
    CHECK_THROWS(Lapsed, node.claimed(1));
    CHECK(node.server.claim(session, tenant, ticket(2)).at(0).made);
}

TEST("files of a claim that was not finished, and damaged ones, are removed") {
    const Folder folder;
    {
        Node(folder).claimed(1);
    }
    std::string path;
    for (const auto& entry : std::filesystem::directory_iterator(folder.path())) {
        path = entry.path().filename().string().starts_with("extent-") ? entry.path().string() : path;
    }
    std::filesystem::copy_file(path, path + ".new");
    std::filesystem::resize_file(path, 100);
    Node node(folder);
    CHECK_EQUAL(files(folder, "extent-"), std::size_t{0});
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{0});
}

TEST("a program that damages its extent does not take the epoch back") {
    const Folder folder;
    {
        Node node(folder);
        node.claimed(1);
        const std::uint64_t number = node.server.claim(session, tenant, ticket(5)).at(0).lease;
        const farpool::File file(node.server.lease_file(session, number));
        CHECK(pwrite(file.fd(), std::string(64, 'x').data(), 64, 0) == 64);
    }
    for (int starts = 0; starts < 3; ++starts) {
        Node node(folder);
        CHECK_EQUAL(files(folder, "extent-"), std::size_t{0});
        CHECK_EQUAL(files(folder, "fence-"), std::size_t{1});
        CHECK_THROWS(Lapsed, node.claimed(4));
    }
    Node node(folder);
    CHECK(node.server.claim(session, tenant, ticket(5)).at(0).made);
}

TEST("a session that lives for long gathers no claims of ended extents") {
    const Folder folder;
    Parts parts(folder);
    const auto claims = [&] {
        std::size_t count = 0;
        parts.sessions.each_claim([&](std::uint64_t, const farpool::Claim&) { ++count; });
        return count;
    };
    for (std::uint64_t epoch = 1; epoch < 100; epoch += 2) {
        auto draft = parts.begun(1, epoch);
        draft.ticket.lease.low = epoch;
        parts.make(draft);
        parts.claiming.finish(draft, Clock::time_point{});
        CHECK(claims() <= 1);
        parts.claiming.carry_out({draft.ticket.lease, epoch + 1, Action::end, {}}, Clock::time_point{});
    }
    CHECK_EQUAL(parts.lending.lent(), std::uint64_t{0});
    parts.lending.finish();
}

TEST("an epoch without extents is forgotten only when no ticket of an earlier one can be valid") {
    const Folder folder;
    Extents extents(folder.path(), false);
    const Clock::time_point begun{};
    extents.begin(lease, Tenure{2, false}, begun);
    extents.forget(begun + std::chrono::hours(47), {});
    CHECK_EQUAL(extents.tenure(lease).epoch, std::uint64_t{2});
    extents.forget(begun + std::chrono::hours(49), {});
    CHECK(extents.forgotten_until() < begun);
    CHECK_EQUAL(extents.tenures(), std::size_t{0});
    CHECK_EQUAL(files(folder, "fence-"), std::size_t{0});
}

TEST("of too many epochs the oldest are forgotten, with a note for the next start") {
    const Folder folder;
    const Clock::time_point begun{};
    const std::chrono::milliseconds wall{1'800'000'000'000};
    Extents extents(folder.path(), false, 3);
    for (std::uint64_t number = 0; number < 5; ++number) {
        extents.begin({1, number}, Tenure{2, false}, begun + std::chrono::seconds(number));
    }
    extents.forget(begun + std::chrono::minutes(4), wall);
    CHECK_EQUAL(extents.tenures(), std::size_t{5});  // no one may be forgotten yet
    extents.forget(begun + std::chrono::minutes(6), wall);
    CHECK_EQUAL(extents.tenures(), std::size_t{3});
    CHECK_EQUAL(files(folder, "fence-"), std::size_t{3});
    CHECK_EQUAL(extents.tenure({1, 1}).epoch, std::uint64_t{0});
    CHECK_EQUAL(extents.tenure({1, 2}).epoch, std::uint64_t{2});
    CHECK(extents.forgotten_until() == begun + std::chrono::seconds(61));  // 299 s before
    CHECK_EQUAL(files(folder, "forgotten-"), std::size_t{1});
    std::vector<std::string> notes;
    Extents later(folder.path(), false, 3);
    later.adopt(begun + std::chrono::hours(9), wall + std::chrono::hours(1), notes);
    CHECK(later.forgotten_until() == begun + std::chrono::hours(9) - std::chrono::seconds(3899));
    Extents behind(folder.path(), false, 3);
    behind.adopt(begun, wall - std::chrono::hours(2), notes);
    CHECK(behind.forgotten_until() == begun);
    CHECK(notes.empty());
}

TEST("a ticket that may be of an epoch that was forgotten is refused, and a new one is not") {
    const Folder folder;
    std::ofstream(folder.path() + "/forgotten-" + std::to_string(farpool::since_1970().count()));
    Node node(folder);
    Ticket old = ticket(1);
    old.age = 3600;
    CHECK_THROWS(Lapsed, node.server.claim(session, tenant, old));
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{0});
    const std::uint64_t number = node.claimed(1);
    CHECK_EQUAL(node.server.claim(session, tenant, old).at(0).lease, number);  // now the node knows the epoch
}

TEST("an administrator sees and ends leases and claims, and no extent") {
    const Folder folder;
    Node node(folder);
    const std::uint64_t number = node.claimed(1);
    const std::uint64_t own = node.server.lend(session, tenant, 4096);
    CHECK_EQUAL(node.server.holdings().size(), std::size_t{2});
    CHECK_EQUAL(node.server.end_holding(own, "test")->nbytes, std::uint64_t{4096});
    CHECK_EQUAL(node.server.end_holding(number, "test")->claims, std::size_t{1});
    CHECK(!node.server.end_holding(own, "test"));
    CHECK_EQUAL(node.server.stats().lent, std::uint64_t{65536});
    CHECK(Client(node.server).read(number, 4) == Status::lapsed);
    CHECK_EQUAL(node.server.holdings().at(0).session, std::uint64_t{0});
}

}  // namespace

int main() { return farpool::testing::run(); }
