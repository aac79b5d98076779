// The time by which a node judges its clients, which does not run while the node itself stands still.
#include "node/loop_time.hpp"

#include <sys/socket.h>

#include <cstring>
#include <string>
#include <thread>

#include "node/server.hpp"
#include "tests/folder.hpp"
#include "tests/testing.hpp"

using farpool::Clock;
using farpool::LoopTime;
using farpool::Server;
using farpool::Stream;
using namespace std::chrono_literals;

namespace {

constexpr Clock::time_point start{1h};

std::string ping() {
    farpool::FrameHeader header = farpool::make_header(farpool::Op::ping);
    seal(header, nullptr, 0);
    return {reinterpret_cast<const char*>(&header), sizeof header};
}

bool is_open(const Stream& socket) {
    char byte;
    const ssize_t got = ::recv(socket.fd(), &byte, 1, MSG_DONTWAIT | MSG_PEEK);
    return got > 0 || (got < 0 && errno == EAGAIN);
}

}  // namespace

TEST("a simulated time stands still and holds in its thread only") {
    Clock::simulate(start);
    std::this_thread::sleep_for(2ms);
    CHECK(Clock::now() == start);
    std::thread([] {
        const Clock::time_point before = Clock::System::now();
        CHECK(Clock::now() >= before);
    }).join();
    Clock::simulate({});
    const Clock::time_point before = Clock::System::now();
    CHECK(Clock::now() >= before);
}

TEST("rounds that begin in time are counted in full") {
    LoopTime time(start);
    for (int round = 1; round <= 10; ++round) {
        CHECK(!time.begin_round(start + round * 1s));
        CHECK(time.at(start + round * 1s + 300ms) == start + round * 1s + 300ms);
    }
}

TEST("however long the loop stands still, a round counts no longer than one may take") {
    LoopTime time(start);
    CHECK(time.at(start + 1h) == start + LoopTime::longest_round);
    CHECK(time.begin_round(start + 1h));
    CHECK(time.at(start + 1h) == start + LoopTime::longest_round);
    CHECK(!time.begin_round(start + 1h + 1s));
    CHECK(time.at(start + 1h + 1s) == start + LoopTime::longest_round + 1s);
}

TEST("a loop that is always late has a time that goes on") {
    LoopTime time(start);
    for (int round = 1; round <= 10; ++round) {
        CHECK(time.begin_round(start + round * 1min));
        CHECK(time.at(start + round * 1min) == start + round * LoopTime::longest_round);
    }
}

TEST("a node that stood still reads the bytes that came in that time before it ends a peer or a session") {
    const farpool::testing::Folder folder;
    constexpr double patience = 1.8;  // more than the longest round, less than the node stands still
    Server server(Server::Settings{folder.path(), 1 << 20, true, patience, patience, 0.0, {}, 0});
    int ends[2];
    CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
    const Stream client(ends[0]);
    server.adopt(Stream(ends[1]), 1, 0, 15, "");
    const std::uint64_t lease = server.lend(2, 0, 4096);  // a session without a connection
    CHECK(lease != 0);
    const std::string request = ping();
    CHECK(::send(client.fd(), request.data(), 10, 0) == 10);
    server.step(0);
    std::this_thread::sleep_for(2s);
    CHECK(::send(client.fd(), request.data() + 10, request.size() - 10, 0) > 0);
    server.step(0);
    CHECK_EQUAL(server.leases(2).size(), 1u);
    CHECK(server.events().empty());
    CHECK(is_open(client));
    std::string answer(request.size(), '\0');
    CHECK_EQUAL(::recv(client.fd(), answer.data(), answer.size(), MSG_DONTWAIT), static_cast<ssize_t>(answer.size()));

    CHECK(::send(client.fd(), request.data(), 10, 0) == 10);
    const Clock::time_point deadline = Clock::now() + 60s;
    while (is_open(client) || !server.leases(2).empty()) {
        CHECK(Clock::now() < deadline);
        server.step(20);
    }
}

TEST("a node that stands still again and again, with less than a tick between, ends sessions") {
    const farpool::testing::Folder folder;
    Server server(Server::Settings{folder.path(), 1 << 20, true, 0.1, 60.0, 0.0, {}, 0});
    CHECK(server.lend(2, 0, 4096) != 0);  // a session without a connection
    for (int pause = 0; pause < 3; ++pause) {
        std::this_thread::sleep_for(LoopTime::longest_round + 100ms);
        server.step(0);
        server.step(1);
    }
    CHECK(server.leases(2).empty());
}

int main() { return farpool::testing::run(); }
