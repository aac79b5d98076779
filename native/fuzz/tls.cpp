// Fuzzes TLS between both ends: `tls FOLDER TRIALS SEED`. Bytes on the wire are damaged on their way, cut off anywhere, or
// replaced, in the handshake as well as after it: only bytes that were sent may arrive, an end is noticed, and a node goes on
// serving everybody else.
#include <fcntl.h>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "fuzz/check.hpp"
#include "fuzz/dice.hpp"
#include "node/server.hpp"
#include "wire/frame.hpp"
#include "wire/stream.hpp"
#include "wire/tls.hpp"

namespace farpool::fuzz {

namespace {

constexpr const char* host = "node.test";

struct Certified {
    Certified() : key(EVP_EC_gen("P-256")), certificate(X509_new()) {}
    ~Certified() {
        X509_free(certificate);
        EVP_PKEY_free(key);
    }
    Certified(const Certified&) = delete;
    Certified& operator=(const Certified&) = delete;

    EVP_PKEY* key;
    X509* certificate;
};

template <typename Write>
std::string pem(Write write) {
    BIO* text = BIO_new(BIO_s_mem());
    require(write(text) == 1, "no PEM");
    char* data = nullptr;
    const long nbytes = BIO_get_mem_data(text, &data);
    std::string made(data, static_cast<std::size_t>(nbytes));
    BIO_free(text);
    return made;
}

std::string pem(X509* certificate) {
    return pem([&](BIO* text) { return PEM_write_bio_X509(text, certificate); });
}

std::string pem(EVP_PKEY* key) {
    return pem([&](BIO* text) { return PEM_write_bio_PrivateKey(text, key, nullptr, nullptr, 0, nullptr, nullptr); });
}

void extend(X509* certificate, int kind, const char* value) {
    X509V3_CTX context;
    X509V3_set_ctx(&context, certificate, certificate, nullptr, nullptr, 0);
    X509_EXTENSION* extension = X509V3_EXT_conf_nid(nullptr, &context, kind, value);
    require(extension != nullptr && X509_add_ext(certificate, extension, -1) == 1, "no extension");
    X509_EXTENSION_free(extension);
}

// Makes a certificate, signed by the authority, or by itself where there is none.
void certify(Certified& made, const char* name, const Certified* authority, const char* usage) {
    X509_set_version(made.certificate, X509_VERSION_3);
    ASN1_INTEGER_set(X509_get_serialNumber(made.certificate), authority == nullptr ? 1 : 2);
    X509_gmtime_adj(X509_getm_notBefore(made.certificate), -3600);
    X509_gmtime_adj(X509_getm_notAfter(made.certificate), 86400);
    X509_NAME_add_entry_by_txt(X509_get_subject_name(made.certificate), "CN", MBSTRING_ASC,
                               reinterpret_cast<const unsigned char*>(name), -1, -1, 0);
    X509_set_issuer_name(made.certificate, X509_get_subject_name((authority != nullptr ? *authority : made).certificate));
    X509_set_pubkey(made.certificate, made.key);
    extend(made.certificate, NID_basic_constraints, authority == nullptr ? "critical,CA:TRUE" : "critical,CA:FALSE");
    if (authority != nullptr) {
        extend(made.certificate, NID_subject_alt_name, (std::string("DNS:") + host).c_str());
        extend(made.certificate, NID_ext_key_usage, usage);
    }
    require(X509_sign(made.certificate, (authority != nullptr ? *authority : made).key, EVP_sha256()) > 0, "no signature");
}

struct Contexts {
    Contexts() {
        Certified authority;
        Certified serving;
        Certified asking;
        certify(authority, "authority", nullptr, "");
        certify(serving, host, &authority, "serverAuth");
        certify(asking, "asking", &authority, "clientAuth");
        node = std::make_unique<TlsContext>(pem(serving.certificate), pem(serving.key), pem(authority.certificate));
        client = std::make_unique<TlsContext>(pem(asking.certificate), pem(asking.key), pem(authority.certificate));
    }
    std::unique_ptr<TlsContext> node;
    std::unique_ptr<TlsContext> client;
};

// One side: a stream, the bytes that it has to send, and the bytes that it received.
struct Side {
    Stream stream;
    std::string to_send;
    std::size_t sent = 0;
    std::size_t least = 0;  // of the next send, as some of it may be encrypted already
    std::string come;
    bool met = false;
    bool over = false;

    void handshake() {
        if (met || over) {
            return;
        }
        if (stream.tls()->handshake() == 0) {
            met = true;
        } else {
            over = errno != EAGAIN;
        }
    }

    void send(Dice& dice) {
        const std::size_t left = to_send.size() - sent;
        if (!met || over || left == 0) {
            return;
        }
        const std::size_t nbytes =
            std::max<std::size_t>(std::min<std::size_t>(left, 1 + dice.below(60000)), std::min(least, left));
        std::array<iovec, 4> parts{};
        std::size_t at = 0;
        for (std::size_t part = 0; part < parts.size(); ++part) {
            const std::size_t step = part + 1 == parts.size() ? nbytes - at : dice.below(nbytes - at + 1);
            parts[part] = {to_send.data() + sent + at, step};
            at += step;
        }
        const ssize_t done = stream.send(parts.data(), parts.size());
        if (done < 0) {
            over = errno != EAGAIN;
            least = nbytes;
        } else {
            sent += static_cast<std::size_t>(done);
            least = nbytes - static_cast<std::size_t>(done);
        }
    }

    void receive(Dice& dice) {
        if (!met || over) {
            return;
        }
        std::string first(dice.below(20000), '\0');
        std::string second(1 + dice.below(20000), '\0');
        std::array<iovec, 2> parts{{{first.data(), first.size()}, {second.data(), second.size()}}};
        const ssize_t got = stream.receive(parts.data(), parts.size());
        if (got <= 0) {
            over = got == 0 || errno != EAGAIN;
            return;
        }
        come += (first + second).substr(0, static_cast<std::size_t>(got));
    }
};

// A socket pair: one end non-blocking, for a side, and the other one for the simulated network.
std::array<int, 2> wire() {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends) == 0, "no socket pair");
    return {ends[0], ends[1]};
}

// Carries bytes from one end of the network to the other, damaged now and then.
struct Way {
    int from;
    int to;
    std::string buffered;
    std::size_t limit = std::numeric_limits<std::size_t>::max();  // bytes that it still carries

    void carry(Dice& dice, std::uint64_t one_in, bool& damaged) {
        if (buffered.empty()) {
            buffered.resize(std::min<std::size_t>(1 + dice.below(40000), limit));
            const ssize_t got = recv(from, buffered.data(), buffered.size(), MSG_DONTWAIT);
            buffered.resize(static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
            limit -= buffered.size();
            if (!buffered.empty() && one_in != 0 && dice.one_in(one_in)) {
                damaged = true;
                damage(dice);
            }
        }
        const ssize_t sent = send(to, buffered.data(), buffered.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        buffered.erase(0, static_cast<std::size_t>(std::max<ssize_t>(sent, 0)));
    }

    void damage(Dice& dice) {
        switch (dice.below(5)) {
            case 0:
                buffered.resize(dice.below(buffered.size()));
                break;
            case 1:
                buffered.insert(dice.below(buffered.size() + 1), dice.bytes(1 + dice.below(100)));
                break;
            case 2:
                buffered += buffered;
                break;
            case 3:
                buffered.erase(0, 1 + dice.below(buffered.size()));
                break;
            default:
                dice.flip(buffered.data(), buffered.size(), 1 + dice.below(4));
        }
    }
};

void try_sessions(Dice& dice, const Contexts& contexts) {
    const std::array<int, 2> left = wire();
    const std::array<int, 2> right = wire();
    Side client{
        Stream(left[0], contexts.client->connect(left[0], host)), dice.bytes(dice.below(200000)), 0, 0, {}, false, false};
    Side node{Stream(right[0], contexts.node->accept(right[0])), dice.bytes(dice.below(200000)), 0, 0, {}, false, false};
    const std::uint64_t one_in = dice.one_in(3) ? 0 : 2 + dice.below(20);
    Way there{left[1], right[1], {}};
    Way back{right[1], left[1], {}};
    bool damaged = false;
    const auto whole = [&] { return client.come == node.to_send && node.come == client.to_send && client.met && node.met; };
    for (int round = 0; !whole(); ++round) {
        require(damaged || round < 100000, "undamaged bytes do not arrive");
        if (round > 3000 && damaged) {
            break;
        }
        Side& side = dice.one_in(2) ? client : node;
        switch (dice.below(4)) {
            case 0:
                side.handshake();
                break;
            case 1:
                side.send(dice);
                break;
            case 2:
                side.receive(dice);
                break;
            default:
                there.carry(dice, one_in, damaged);
                back.carry(dice, one_in, damaged);
        }
        require(node.to_send.starts_with(client.come) && client.to_send.starts_with(node.come), "other bytes than were sent");
        require(damaged || (!client.over && !node.over),
                "a session ended by itself: " + client.stream.trouble(errno) + ", " + node.stream.trouble(errno));
    }
    close(left[1]);
    close(right[1]);
    for (int again = 0; again < 3; ++again) {  // a side may be used again after a failure
        for (Side* side : {&client, &node}) {
            side->over = false;
            side->handshake();
            side->receive(dice);
        }
    }
    require(node.to_send.starts_with(client.come) && client.to_send.starts_with(node.come),
            "other bytes than were sent at the end");
}

std::string pings(std::uint64_t count) {
    std::string made;
    for (std::uint64_t request = 1; request <= count; ++request) {
        FrameHeader header = make_header(Op::ping);
        header.request = request;
        seal(header, nullptr, 0);
        made.append(reinterpret_cast<const char*>(&header), sizeof header);
    }
    return made;
}

// Bytes that do not belong where they come: noise, frames without TLS, records of any kind, the begin of another handshake.
std::string insult(Dice& dice, const Contexts& contexts) {
    std::string made;
    switch (dice.below(5)) {
        case 0:
            break;
        case 1:
            return dice.bytes(1 + dice.below(3000));
        case 2:
            return pings(1 + dice.below(40));
        case 3:
            for (std::uint64_t record = 1 + dice.below(4); record > 0; --record) {
                const std::uint64_t nbytes = dice.one_in(4) ? dice.below(1 << 16) : dice.below(600);
                made += {static_cast<char>(dice.one_in(8) ? dice.below(256) : 20 + dice.below(5)), 3,
                         static_cast<char>(dice.below(5)), static_cast<char>(nbytes >> 8), static_cast<char>(nbytes)};
                made += dice.bytes(dice.one_in(4) ? dice.below(nbytes + 1) : nbytes);
            }
            break;
        default: {
            const std::array<int, 2> ends = wire();
            Side other{Stream(ends[0], contexts.client->connect(ends[0], host)), {}, 0, 0, {}, false, false};
            other.handshake();
            made.resize(5000);
            made.resize(static_cast<std::size_t>(std::max<ssize_t>(recv(ends[1], made.data(), made.size(), MSG_DONTWAIT), 0)));
            close(ends[1]);
            made.resize(dice.one_in(2) ? made.size() : dice.below(made.size() + 1));
        }
    }
    return made;
}

// Sends misplaced bytes (see insult) on one way and then ends it.
void turn(Dice& dice, const Contexts& contexts, const Way& way) {
    const std::string said = insult(dice, contexts);
    send(way.to, said.data(), said.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(way.to, SHUT_WR);
}

// Cuts off the bytes to one side after some of them and goes on with other bytes; the way from it stays open.
void try_cuts(Dice& dice, const Contexts& contexts) {
    const std::array<int, 2> left = wire();
    const std::array<int, 2> right = wire();
    Side client{
        Stream(left[0], contexts.client->connect(left[0], host)), dice.bytes(dice.below(100000)), 0, 0, {}, false, false};
    Side node{Stream(right[0], contexts.node->accept(right[0])), dice.bytes(dice.below(100000)), 0, 0, {}, false, false};
    Way there{left[1], right[1], {}};
    Way back{right[1], left[1], {}};
    const bool heard_by_node = dice.one_in(2);
    Side& victim = heard_by_node ? node : client;
    Way& cut = heard_by_node ? there : back;
    const std::uint64_t limit = dice.one_in(5) ? 0 : dice.below(dice.one_in(2) ? 3000 : 100000);
    cut.limit = limit;
    bool damaged = false;
    const auto step = [&] {
        for (Side* side : {&client, &node}) {
            side->handshake();
            side->send(dice);
            side->receive(dice);
        }
        there.carry(dice, 0, damaged);
        back.carry(dice, 0, damaged);
        require(node.to_send.starts_with(client.come) && client.to_send.starts_with(node.come), "other bytes than were sent");
    };
    // Until it is cut, or both sides have sent everything.
    for (int round = 0; round < 1000 && (cut.limit > 0 || !cut.buffered.empty()); ++round) {
        step();
    }
    turn(dice, contexts, cut);
    for (int round = 0; !victim.over; ++round) {
        require(round < 1000, "a side does not notice the end of its input");
        step();
    }
    require(limit > 0 || !victim.met, "a side finished its handshake without a byte from the other one");
    close(left[1]);
    close(right[1]);
}

// The client's end of a connection with TLS that a node serves, and the network in between.
struct Served {
    Served(Dice& dice, const Contexts& contexts, Server& server)
        : left(wire()),
          right(wire()),
          client{Stream(left[0], contexts.client->connect(left[0], host)), {}, 0, 0, {}, false, false},
          there{left[1], right[1], {}},
          back{right[1], left[1], {}} {
        Stream node(right[0], contexts.node->accept(right[0]));
        bool damaged = false;
        for (bool met = false; !met || !client.met;) {
            met = met || node.tls()->handshake() == 0;
            client.handshake();
            there.carry(dice, 0, damaged);
            back.carry(dice, 0, damaged);
        }
        server.adopt(std::move(node), 1 + dice.below(3), 0, rights::read, "key");
    }
    ~Served() { hang_up(); }
    Served(const Served&) = delete;
    Served& operator=(const Served&) = delete;

    // Closes the client's end. Idempotent.
    void hang_up() {
        for (std::array<int, 2>* ends : {&left, &right}) {
            if (const int end = std::exchange((*ends)[1], -1); end >= 0) {
                close(end);
            }
        }
    }

    std::array<int, 2> left;
    std::array<int, 2> right;
    Side client;
    Way there;
    Way back;
};

void require_left(Server& server, const Way& back) {
    std::string dropped(65536, '\0');
    for (int round = 0; server.stats().connections > 0; ++round) {
        require(round < 1000, "a node keeps a connection that has ended");
        server.step(0);
        while (recv(back.from, dropped.data(), dropped.size(), MSG_DONTWAIT) > 0) {
        }
    }
}

// Tries a client of a node that changes its keys now and then, and ends anywhere, with or without other bytes after it.
void try_turns(Dice& dice, const Contexts& contexts, Server& server) {
    Served served(dice, contexts, server);
    Side& client = served.client;
    client.to_send = pings(1 + dice.below(400));
    bool damaged = false;
    for (std::uint64_t round = dice.below(200); round > 0; --round) {
        if (client.least == 0 && dice.one_in(4)) {
            const int kind = dice.one_in(2) ? SSL_KEY_UPDATE_REQUESTED : SSL_KEY_UPDATE_NOT_REQUESTED;
            require(SSL_key_update(client.stream.tls()->ssl(), kind) == 1, "no other keys");
        }
        client.send(dice);
        client.receive(dice);
        server.step(0);
        served.there.carry(dice, 0, damaged);
        served.back.carry(dice, 0, damaged);
        require(!client.over, "a node ended a connection: " + client.stream.trouble(errno));
    }
    turn(dice, contexts, served.there);
    require_left(server, served.back);
}

// Tries TLS with a node that has none.
void try_without(Dice& dice, const Contexts& contexts, Server& server) {
    const std::array<int, 2> left = wire();
    const std::array<int, 2> right = wire();
    Side client{Stream(left[0], contexts.client->connect(left[0], host)), dice.bytes(1000), 0, 0, {}, false, false};
    Way there{left[1], right[1], {}};
    Way back{right[1], left[1], {}};
    server.adopt(Stream(right[0]), 1 + dice.below(3), 0, rights::read, "key");
    bool damaged = false;
    for (int round = 0; server.stats().connections > 0; ++round) {
        require(round < 1000, "a node takes TLS for frames");
        client.handshake();
        there.carry(dice, 0, damaged);
        back.carry(dice, 0, damaged);
        server.step(0);
    }
    shutdown(left[1], SHUT_WR);
    client.handshake();
    require(client.over && !client.met, "a handshake with a node without TLS");
    close(left[1]);
    close(right[1]);
}

// Sends pings over a connection of their own; true if all were answered.
bool ping(Dice& dice, const Contexts& contexts, Server& server, std::uint64_t one_in) {
    Served served(dice, contexts, server);
    Side& client = served.client;
    bool damaged = false;
    const std::uint64_t count = 1 + dice.below(dice.one_in(3) ? 6000 : 300);  // also more than a node reads at once
    client.to_send = pings(count);
    for (int round = 0; client.come.size() < count * sizeof(FrameHeader) && !client.over; ++round) {
        require(damaged || round < 100000, "a node does not answer over TLS");
        if (damaged && round > 3000) {
            break;
        }
        switch (dice.below(4)) {
            case 0:
                client.send(dice);
                break;
            case 1:
                client.receive(dice);
                break;
            case 2:
                server.step(0);
                break;
            default:
                served.there.carry(dice, one_in, damaged);
                served.back.carry(dice, one_in, damaged);
        }
    }
    served.hang_up();
    for (int step = 0; step < 4; ++step) {
        server.step(0);
    }
    for (std::size_t at = 0; at + sizeof(FrameHeader) <= client.come.size(); at += sizeof(FrameHeader)) {
        FrameHeader header;
        std::memcpy(&header, client.come.data() + at, sizeof header);
        require(header_fault(header) == nullptr && is_whole(header, nullptr) && header.request == at / sizeof header + 1,
                "a reply that is none");
    }
    return client.come.size() == count * sizeof(FrameHeader);
}

}  // namespace

}  // namespace farpool::fuzz

int main(int count, char** words) {
    using namespace farpool;
    using namespace farpool::fuzz;
    if (count != 4) {
        std::fputs("tls FOLDER TRIALS SEED\n", stderr);
        return 2;
    }
    const std::uint64_t trials = std::strtoull(words[2], nullptr, 10);
    const std::uint64_t seed = std::strtoull(words[3], nullptr, 10);
    const Contexts contexts;
    std::filesystem::create_directories(words[1]);
    Server::Settings settings{};
    settings.folder = words[1];
    settings.capacity = 1 << 20;
    settings.ephemeral = true;
    settings.grace = 0.01;
    settings.stall = 30;
    Server server(settings);
    std::uint64_t answered = 0;
    for (std::uint64_t trial = 0; trial < trials; ++trial) {
        Dice dice(mix64(seed) ^ trial << 20);
        try {
            try_sessions(dice, contexts);
            try_cuts(dice, contexts);
            try_turns(dice, contexts, server);
            try_without(dice, contexts, server);
            answered += ping(dice, contexts, server, 2 + dice.below(8)) ? 1 : 0;
            require(ping(dice, contexts, server, 0), "a connection that was not damaged was not answered");
        } catch (const std::exception& error) {
            std::fprintf(stderr, "tls: trial %llu of seed %llu: %s\n", static_cast<unsigned long long>(trial),
                         static_cast<unsigned long long>(seed), error.what());
            return 1;
        }
    }
    require(server.stats().connections == 0, "connections were left");
    server.stop();
    std::printf("tls: %llu trials without a finding; %llu connections were not hit, or not where it mattered\n",
                static_cast<unsigned long long>(trials), static_cast<unsigned long long>(answered));
    return 0;
}
