// Fuzzes requests to several nodes at once: `transfers FOLDER TRIALS SEED`. exchange() and RemotePort talk to nodes that
// answer well for a while, and then damage, cut off, invent or keep back their replies. A bad node does not
// spoil the replies of a good one, and nothing is written beyond the memory that a reply was given.
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/clock.hpp"
#include "core/crc32c.hpp"
#include "core/striped_port.hpp"
#include "fuzz/check.hpp"
#include "fuzz/dice.hpp"
#include "node/files.hpp"
#include "wire/exchange.hpp"
#include "wire/remote_port.hpp"
#include "wire/segment.hpp"

namespace farpool::fuzz {

namespace {

constexpr double answer_timeout_s = 20;      // of nodes that answer; no trial waits for it unless something is wrong
constexpr double doubtful_timeout_s = 0.01;  // of nodes that may keep a reply back

template <typename T>
T number_at(const std::string& text, std::size_t offset) {
    T value{};
    std::memcpy(&value, text.data() + offset, sizeof value);
    return value;
}

// The value of a key, computed alike by both sides.
std::string value_of(std::string_view key) {
    const std::uint64_t hash = hash64(key.data(), key.size(), 0);
    Dice dice(hash);
    return dice.bytes(dice.below(hash % 8 == 0 ? 300'000 : 3'000));
}

// A node's end of one connection, with a thread of its own.
class FakeNode {
public:
    struct Manners {
        bool hostile = false;
        bool keeps_back = false;  // of the hostile ones: may stop to answer
    };

    FakeNode(int& theirs, std::uint64_t seed, Manners manners, std::vector<char>* lease)
        : dice_(seed), manners_(manners), lease_(lease) {
        int ends[2];
        require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no socket pair");
        socket_ = File(ends[0]);
        theirs = ends[1];
        thread_ = std::thread([this] { serve(); });
    }
    ~FakeNode() { join(); }
    FakeNode(const FakeNode&) = delete;
    FakeNode& operator=(const FakeNode&) = delete;

    // Waits for the thread to end. The client's end must be closed, or about to be.
    void join() {
        if (thread_.joinable()) {
            shutdown(socket_.fd(), SHUT_RDWR);
            thread_.join();
        }
    }
    // True if it has done something that a node does not do. Call after join().
    bool misbehaved() const noexcept { return misbehaved_; }
    // Names the fault of a request; empty if all were right. Call after join().
    const std::string& complaint() const noexcept { return complaint_; }

private:
    bool take(std::string& into, std::size_t nbytes) {
        into.resize(nbytes);
        for (std::size_t have = 0; have < nbytes;) {
            const ssize_t got = recv(socket_.fd(), into.data() + have, nbytes - have, 0);
            if (got <= 0) {
                return false;
            }
            have += static_cast<std::size_t>(got);
        }
        return true;
    }

    bool give(const std::string& bytes) {
        for (std::size_t sent = 0; sent < bytes.size();) {
            const std::size_t step = dice_.one_in(4) ? 1 + dice_.below(200) : bytes.size();
            const ssize_t gone = ::send(socket_.fd(), bytes.data() + sent, std::min(step, bytes.size() - sent), MSG_NOSIGNAL);
            if (gone <= 0) {
                return false;
            }
            sent += static_cast<std::size_t>(gone);
        }
        return true;
    }

    void serve() {
        FrameHeader header;
        std::string raw;
        std::string meta;
        std::string payload;
        std::string behind;
        while (take(raw, sizeof header)) {
            std::memcpy(&header, raw.data(), sizeof header);
            if (header_fault(header) != nullptr || !take(meta, header.meta_nbytes) || !take(payload, header.payload_nbytes)) {
                break;
            }
            if ((header.flags & checksum_follows) != 0) {
                if (!take(behind, sizeof header.payload_crc)) {
                    break;
                }
                header.payload_crc = number_at<std::uint32_t>(behind, 0);
            }
            if (const char* fault = fault_of(header, meta, payload, raw)) {
                complaint_ = fault;
                break;
            }
            if (!answer(header, meta, payload)) {
                break;
            }
        }
        // Behaves as a node at its end: all requests that it was sent are done.
        shutdown(socket_.fd(), SHUT_RDWR);
    }

    const char* fault_of(const FrameHeader& header, const std::string& meta, const std::string& payload,
                         const std::string& raw) const {
        FrameHeader sent;
        std::memcpy(&sent, raw.data(), sizeof sent);
        if (!is_whole(sent, meta.data())) {
            return "a request's header has a wrong checksum";
        }
        if (crc32c(payload.data(), payload.size()) != header.payload_crc) {
            return "a request's payload has a wrong checksum";
        }
        const auto op = static_cast<Op>(header.op);
        if ((op == Op::read || op == Op::write) && lease_ != nullptr) {
            const auto offset = number_at<std::uint64_t>(meta, 0);
            const std::uint64_t nbytes = op == Op::read ? number_at<std::uint64_t>(meta, 8) : payload.size();
            if (offset > lease_->size() || nbytes > lease_->size() - offset) {
                return "a request beyond the lease";
            }
        }
        return nullptr;
    }

    // What a reply sends after its header, and whether the connection ends after it.
    struct Reply {
        FrameHeader header;
        std::string meta{};
        std::string payload{};
        bool ends = false;
    };

    Reply honest_reply(const FrameHeader& request, const std::string& meta, const std::string& payload) {
        Reply reply{make_header(static_cast<Op>(request.op))};
        reply.header.request = request.request;
        reply.header.serial = request.request;
        switch (static_cast<Op>(request.op)) {
            case Op::get:
                reply.payload = value_of(meta);
                break;
            case Op::stat:
                reply.meta = meta;
                break;
            case Op::read:
                reply.payload.assign(lease_->data() + number_at<std::uint64_t>(meta, 0), number_at<std::uint64_t>(meta, 8));
                break;
            case Op::write:
                std::copy(payload.begin(), payload.end(),
                          lease_->begin() + static_cast<std::ptrdiff_t>(number_at<std::uint64_t>(meta, 0)));
                break;
            default:
                break;
        }
        const bool unsummed = static_cast<Op>(request.op) == Op::read;
        reply.header.payload_crc = unsummed ? 0 : crc32c(reply.payload.data(), reply.payload.size());
        reply.header.payload_nbytes = reply.payload.size();
        return reply;
    }

    enum class Sends { reply, nothing, never };  // `never`: the connection ends

    Sends spoil(Reply& reply) {
        switch (dice_.below(9)) {
            case 0:
                reply.header.request = dice_.any();
                break;
            case 1:
                reply.header.op = static_cast<std::uint8_t>(dice_.word());
                break;
            case 2:
                reply.header.status = static_cast<std::uint16_t>(dice_.any());
                break;
            case 3:
                reply.header.payload_nbytes = dice_.one_in(2) ? dice_.any() : dice_.below(2 * reply.payload.size() + 64);
                reply.ends = !manners_.keeps_back;  // else the client would wait for the missing bytes
                break;
            case 4:
                reply.header.payload_crc = static_cast<std::uint32_t>(dice_.word());
                break;
            case 5:
                reply.meta = dice_.bytes(dice_.below(largest_meta + 1));
                break;
            case 6:
                reply.payload = dice_.bytes(dice_.below(70'000));
                reply.header.payload_nbytes = reply.payload.size();
                break;
            case 7:
                return Sends::never;
            default:
                if (manners_.keeps_back) {
                    return Sends::nothing;  // and the next reply is one to another request
                }
        }
        return Sends::reply;
    }

    bool answer(const FrameHeader& request, const std::string& meta, const std::string& payload) {
        Reply reply = honest_reply(request, meta, payload);
        const bool honest = !manners_.hostile || !dice_.one_in(6);
        if (!honest) {
            misbehaved_ = true;
            if (const Sends sends = spoil(reply); sends != Sends::reply) {
                return sends == Sends::nothing;
            }
        }
        seal(reply.header, reply.meta.data(), static_cast<std::uint32_t>(reply.meta.size()));
        std::string bytes(reinterpret_cast<const char*>(&reply.header), sizeof reply.header);
        bytes += reply.meta + reply.payload;
        if (!honest && dice_.one_in(3)) {
            dice_.flip(bytes.data(), std::min<std::size_t>(bytes.size(), 200), 1 + dice_.below(3));
            reply.ends = !manners_.keeps_back;  // the client detects a wrong length of meta only when so many bytes have come
        }
        if (!honest && dice_.one_in(4)) {
            bytes.resize(dice_.below(bytes.size()));
            give(bytes);
            return false;
        }
        if (!honest && dice_.one_in(4)) {
            bytes += bytes;  // a second answer to the same request
        }
        return give(bytes) && !reply.ends;
    }

    Dice dice_;
    const Manners manners_;
    std::vector<char>* const lease_;
    File socket_;
    bool misbehaved_ = false;
    std::string complaint_;
    std::thread thread_;
};

FakeNode::Manners random_manners(Dice& dice) {
    const bool hostile = dice.one_in(2);
    return {hostile, hostile && dice.one_in(20)};
}

// Memory for replies, exactly as large as it has to be.
using Memory = std::unique_ptr<std::byte[]>;

struct Wanted {
    Op op;
    std::string meta;
    std::string value;  // the value that a get has to return
    std::size_t node;
    Memory memory{};
    std::size_t nbytes = 0;
    bool refused = false;
    std::vector<iovec> parts{};
};

// Checks the outcome of a request to a node that behaved well.
void check_good(const Wanted& one, const Ask& ask) {
    require(one.refused || !ask.error, "a good node's reply was refused: " + (ask.error ? ask.error->message : ""));
    require(one.refused == ask.error.has_value(), "a reply without a place was taken");
    if (one.op == Op::get && !one.refused) {
        require(one.value == std::string_view(reinterpret_cast<const char*>(one.memory.get()), one.nbytes),
                "other bytes than were sent");
    }
    require(one.op != Op::stat || ask.head.meta == one.meta, "other meta than was sent");
}

void try_exchange(Dice& dice) {
    const std::size_t count = 1 + dice.below(3);
    std::vector<std::unique_ptr<FakeNode>> nodes;
    std::vector<std::unique_ptr<Connection>> connections;
    bool may_wait = false;
    for (std::size_t node = 0; node < count; ++node) {
        const FakeNode::Manners manners = random_manners(dice);
        may_wait = may_wait || manners.keeps_back;
        int theirs = -1;
        nodes.push_back(std::make_unique<FakeNode>(theirs, dice.word(), manners, nullptr));
        connections.push_back(
            std::make_unique<Connection>(Stream(theirs), "node " + std::to_string(node), Connection::Settings{}));
    }
    const std::string large = dice.bytes(dice.one_in(30) ? 600'000 : 9'000);
    const iovec shared{const_cast<char*>(large.data()), large.size()};
    std::vector<Wanted> wanted(1 + dice.below(dice.one_in(10) ? 200 : 12));
    std::vector<Ask> asks;
    for (Wanted& one : wanted) {
        one = {dice.of(std::vector<Op>{Op::get, Op::get, Op::stat, Op::put, Op::ping}), "key-" + std::to_string(dice.below(50)),
               "", dice.below(count)};
        one.value = one.op == Op::get ? value_of(one.meta) : "";
        Request request{one.op, one.meta};
        if (one.op == Op::put) {
            request.payload = {&shared, 1};
            request.nbytes = large.size();
        }
        asks.push_back({connections[one.node].get(), request});
    }
    const bool breaks = dice.one_in(30);  // no memory, as of a reply that says that it is endless
    exchange(
        asks,
        [&](std::size_t number, const ReplyHead& head) -> Parts {
            Wanted& one = wanted[number];
            if (head.nbytes > (std::size_t{1} << 20)) {
                if (breaks) {
                    fail_closed("no memory");
                }
                one.refused = true;
                fail_value("too large");
            }
            if (dice.one_in(12)) {
                one.refused = true;
                fail_value("no place");
            }
            one.nbytes = head.nbytes;
            one.memory = std::make_unique<std::byte[]>(head.nbytes);
            const std::size_t first = dice.below(head.nbytes + 1);
            one.parts = {{one.memory.get(), first}, {one.memory.get() + first, head.nbytes - first}};
            return one.parts;
        },
        monotonic_seconds() + (may_wait ? doubtful_timeout_s : answer_timeout_s));
    std::vector<bool> broken;
    for (const auto& connection : connections) {
        require(connection->broken() || connection->unanswered() == 0, "a request was forgotten");
        broken.push_back(connection->broken());
    }
    connections.clear();
    for (const auto& node : nodes) {
        node->join();
        require(node->complaint().empty() || node->misbehaved(), node->complaint());
    }
    for (std::size_t number = 0; number < wanted.size(); ++number) {
        const Wanted& one = wanted[number];
        const Ask& ask = asks[number];
        if (!nodes[one.node]->misbehaved() && !(may_wait && ask.error)) {
            check_good(one, ask);
            require(!broken[one.node] || may_wait, "a good connection was broken");
        }
    }
}

struct Excuses {
    bool hostile;  // a node may misbehave
    bool retired;  // a mapped lease was given back
};

// Reads or writes some bytes of a port whose memory has this content, if it is `known`.
void try_transfer(Dice& dice, Port& port, std::string& content, std::uint64_t offset, Excuses excuses, bool& known) {
    const std::uint64_t length = dice.below(content.size() - offset + 1);
    const bool beyond = dice.one_in(20);
    std::string bytes = dice.bytes(length);
    const std::unique_ptr<char[]> memory(new char[length]);  // exactly as much
    std::copy(bytes.begin(), bytes.end(), memory.get());
    try {
        if (dice.one_in(2)) {
            port.write(beyond ? content.size() + 1 + dice.any() % 1000 : offset, memory.get(), length);
            content.replace(offset, length, bytes);
        } else {
            port.read(beyond ? content.size() + 1 + dice.any() % 1000 : offset, memory.get(), length);
            require(!known || excuses.hostile || std::memcmp(memory.get(), content.data() + offset, length) == 0,
                    "other bytes than were written");
        }
        require(!beyond, "a transfer outside of the memory");
    } catch (const PortFailure& failure) {
        const ErrorKind kind = failure.error().kind;
        const bool expected =
            beyond ? kind == ErrorKind::value : excuses.hostile || (excuses.retired && kind == ErrorKind::lease_lost);
        require(expected, std::string("good nodes failed: ") + failure.what());
        known = known && beyond;  // some of it may have been written
    }
}

// Tries a StripedPort over the RemotePorts of some nodes, whose leases may be mapped.
void try_port(Dice& dice) {
    constexpr std::uint64_t stripe = 512;
    const std::size_t count = 1 + dice.below(3);
    const std::uint64_t nbytes = stripe * (1 + dice.below(24));
    std::vector<std::unique_ptr<FakeNode>> nodes;
    std::vector<std::vector<char>> leases(count, std::vector<char>(nbytes));
    std::vector<std::vector<std::uint64_t>> mapped(count);  // aligned as a header has to be
    std::vector<RemoteEnd> ends;
    bool hostile = false;
    bool may_wait = false;
    std::uint64_t refusals = 0;  // of nodes that did not let the program in
    for (std::size_t node = 0; node < count; ++node) {
        const FakeNode::Manners manners = random_manners(dice);
        std::byte* memory = nullptr;
        if (dice.one_in(3)) {
            mapped[node].resize((segment_header_nbytes + nbytes) / sizeof(std::uint64_t));
            memory = reinterpret_cast<std::byte*>(mapped[node].data());
        } else {
            hostile = hostile || manners.hostile;
            may_wait = may_wait || manners.keeps_back;
        }
        const auto dial = [&, node, manners] {
            if (manners.hostile && dice.one_in(20)) {
                ++refusals;
                fail_node(ErrorKind::node, "node", "it is not there");
            }
            int theirs = -1;
            nodes.push_back(std::make_unique<FakeNode>(theirs, dice.word(), manners, &leases[node]));
            return Stream(theirs);
        };
        ends.push_back({"node " + std::to_string(node), 1, nbytes, memory, dial, {}});
    }
    const double timeout = may_wait ? doubtful_timeout_s : answer_timeout_s;
    std::string content(nbytes * count, '\0');
    bool known = true;  // true while the nodes are known to have these bytes
    bool retired = false;
    {
        std::vector<std::unique_ptr<RemotePort>> remotes;
        std::vector<Port*> ports;
        for (const RemoteEnd& end : ends) {
            ports.push_back(remotes.emplace_back(std::make_unique<RemotePort>("tier", end, timeout)).get());
        }
        StripedPort port("tier", ports, stripe, nbytes, false);
        for (int transfer = 0; transfer < 8; ++transfer) {
            const std::uint64_t offset = dice.below(content.size() + 1);
            try_transfer(dice, port, content, offset, {hostile, retired}, known);
            if (dice.one_in(40)) {
                const std::size_t node = dice.below(count);
                if (!mapped[node].empty()) {
                    reinterpret_cast<SegmentHeader*>(mapped[node].data())->retired.store(1);
                    retired = true;
                }
            }
        }
    }
    for (const auto& node : nodes) {
        node->join();
        require(node->complaint().empty() || node->misbehaved(), node->complaint());
    }
}

}  // namespace

}  // namespace farpool::fuzz

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: transfers FOLDER TRIALS SEED\n");
        return 2;
    }
    const std::uint64_t trials = std::strtoull(argv[2], nullptr, 10);
    const std::uint64_t seed = std::strtoull(argv[3], nullptr, 10);
    unsigned long long trial = 0;
    do {
        std::fprintf(stderr, "\rtransfers: seed %llu trial %llu ", static_cast<unsigned long long>(seed), trial);
        farpool::fuzz::Dice dice(farpool::mix64(seed) ^ farpool::mix64(~trial));
        try {
            for (int turn = 0; turn < 100; ++turn) {
                farpool::fuzz::try_exchange(dice);
                farpool::fuzz::try_port(dice);
            }
        } catch (const std::exception& error) {
            std::fprintf(stderr, "\nfailed: %s\n", error.what());
            return 1;
        }
        ++trial;
    } while (trial < trials);
    std::printf("transfers: %llu trials of seed %llu without a finding\n", trial, static_cast<unsigned long long>(seed));
    return 0;
}
