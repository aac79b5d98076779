// Fuzzes what reads from a node: `reader FOLDER TRIALS SEED`. Replies are damaged on their way, and files under the reader.
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <string>

#include "core/clock.hpp"
#include "core/crc32c.hpp"
#include "fuzz/check.hpp"
#include "fuzz/client.hpp"
#include "fuzz/dice.hpp"
#include "node/catalogue/catalogue.hpp"
#include "wire/connection.hpp"
#include "wire/object_reader.hpp"
#include "wire/payload_sum.hpp"

namespace farpool::fuzz {

namespace {

// Replies of a simulated node to 1 to 6 requests, some of them damaged or wrong.
struct Replies {
    std::string bytes;
    std::string whole;  // the payloads that were meant
    bool damaged = false;
};

Replies random_replies(Dice& dice, std::uint64_t count, const std::vector<Op>& ops) {
    Replies made;
    for (std::uint64_t request = 1; request <= count; ++request) {
        FrameHeader header = make_header(ops[request - 1]);
        header.request = request;
        header.status = static_cast<std::uint16_t>(dice.one_in(3) ? dice.any() : 0);
        made.damaged = made.damaged || header.status == static_cast<std::uint16_t>(Status::taken);  // no request used an area
        header.serial = dice.any();
        std::string meta = dice.bytes(dice.one_in(3) ? dice.below(400) : 0);
        std::string payload = dice.bytes(dice.one_in(2) ? dice.below(dice.one_in(6) ? 100000 : 300) : 0);
        header.payload_nbytes = payload.size();
        header.payload_crc = crc32c(payload.data(), payload.size());
        made.whole += payload;
        if (dice.one_in(10)) {
            made.damaged = true;
            switch (dice.below(4)) {
                case 0:
                    header.request = dice.any();
                    break;
                case 1:
                    header.payload_nbytes = dice.below(1 << 20);
                    break;
                case 2:
                    header.op = static_cast<std::uint8_t>(dice.word());
                    break;
                default:
                    meta = dice.bytes(dice.below(largest_meta + 1));
            }
        }
        seal(header, meta.data(), static_cast<std::uint32_t>(meta.size()));
        made.bytes.append(reinterpret_cast<const char*>(&header), sizeof header);
        made.bytes += meta + payload;
    }
    if (dice.one_in(3)) {
        made.damaged = true;
        dice.flip(made.bytes.data(), made.bytes.size(), 1 + dice.below(3));
    }
    if (dice.one_in(5)) {
        made.damaged = true;
        made.bytes.resize(dice.below(made.bytes.size()));
    }
    return made;
}

void try_connection(Dice& dice) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no socket pair");
    const int room = 4 << 20;
    setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof room);
    Connection connection(Stream(ends[0]), "node", {0, 0, 0, nullptr});
    const std::vector<Op> known{Op::get, Op::stat, Op::put, Op::pin, Op::ping};
    std::vector<Op> ops;
    const double deadline = monotonic_seconds() + 5;
    const std::uint64_t count = 1 + dice.below(6);
    for (std::uint64_t request = 0; request < count; ++request) {
        ops.push_back(dice.of(known));
        connection.send({ops.back(), "key"}, deadline);
    }
    const Replies replies = random_replies(dice, count, ops);
    const bool all_sent =
        send(ends[1], replies.bytes.data(), replies.bytes.size(), MSG_DONTWAIT) == static_cast<ssize_t>(replies.bytes.size());
    shutdown(ends[1], SHUT_WR);
    std::string taken;
    try {
        while (connection.unanswered() > 0) {
            const ReplyHead head = connection.receive_head(deadline);
            if (replies.damaged && (head.nbytes > (1 << 20) || dice.one_in(8))) {
                connection.drop_payload(deadline);
                continue;
            }
            std::string payload(head.nbytes, '\0');
            connection.receive_payload(payload.data(), deadline);
            taken += payload;
        }
        require(replies.damaged || taken == replies.whole, "other bytes than were sent");
    } catch (const PortFailure& failure) {
        require(replies.damaged || !all_sent, std::string("whole replies were refused: ") + failure.what());
        require(connection.broken() || failure.error().kind == ErrorKind::checksum, "a failure left the connection in use");
    }
    close(ends[1]);
}

// Tries a node that passes a file as publish area, which may not be one, and reports its progress, which may be wrong.
void try_area(Dice& dice) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no socket pair");
    Stream node(ends[1]);
    Connection connection(Stream(ends[0]), "node", {0, 0, 0, nullptr, true});
    const std::string payload = dice.bytes(100'000 + dice.below(300'000));
    const iovec whole{const_cast<char*>(payload.data()), payload.size()};
    const Request request{Op::put, "key", 0, 0, {&whole, 1}, payload.size()};
    SegmentHeader settings{};
    settings.kind = static_cast<std::uint32_t>(dice.one_in(8) ? SegmentKind::lease : SegmentKind::area);
    settings.capacity = 64 * (1 + dice.below(3000));
    const Segment area = make_nameless_segment("fuzzed-area", settings);
    if (dice.one_in(8)) {
        dice.flip(area.memory.data(), 128, 3);
    }
    std::uint64_t number = 0;
    const auto say = [&](Op op, Status status, std::uint64_t serial, int file) {
        FrameHeader header = make_header(op);
        header.request = dice.one_in(100) ? dice.any() : number;
        header.status = static_cast<std::uint16_t>(status);
        header.serial = serial;
        seal(header, nullptr, 0);
        iovec part{&header, sizeof header};
        static_cast<void>(file < 0 ? node.send(&part, 1) : node.send_with_file(&part, 1, file));
    };
    try {
        ReplyHead head;
        for (int puts = 0; puts < 4; ++puts) {
            const bool asks = puts == 0;
            PayloadSum sum(request.payload, request.nbytes);
            Outgoing outgoing = connection.begin(request, &sum);
            number += asks ? 2 : 1;
            bool sent = false;
            for (int step = 0; !sent && step < 200'000; ++step) {
                sent = connection.send_some(outgoing, payload.size());
                std::array<char, 65536> drained;
                while (node.receive(drained.data(), drained.size()) > 0) {
                }
                if (!sent && connection.awaits_room()) {
                    say(Op::put, Status::taken, dice.one_in(100) ? dice.any() : outgoing.copied - dice.below(2), -1);
                    require(!connection.receive_head_some(head), "an answer before there was one");
                }
            }
            require(sent, "a payload that does not go");
            if (asks) {
                number -= 1;
                say(Op::area, dice.one_in(8) ? Status::busy : Status::done, 0, dice.one_in(8) ? -1 : area.file.fd());
                number += 1;
            }
            say(Op::put, Status::done, 7, dice.one_in(20) ? area.file.fd() : -1);
            require(connection.receive_head_some(head) && head.serial == 7, "an answer that was not understood");
        }
    } catch (const PortFailure&) {
        require(connection.broken(), "a failure left the connection in use");
    }
}

void damage(Dice& dice, Catalogue& objects) {
    const ObjectPaths& paths = objects.paths();
    if (dice.one_in(16)) {
        const std::string marks = dice.bytes(64);
        const File visits(objects.visits().open(1));
        require(pwrite(visits.fd(), marks.data(), marks.size(), segment_header_nbytes) == 64, "no marks were made");
        return;
    }
    const std::string& path = dice.one_in(2) ? paths.data : paths.index;
    const File file(open(path.c_str(), O_RDWR | O_CLOEXEC));
    const std::uint64_t nbytes = std::filesystem::file_size(path);
    const Mapping memory(file.fd(), nbytes, true);
    if (path == paths.data) {
        dice.flip(memory.data() + segment_header_nbytes, std::min<std::uint64_t>(nbytes - segment_header_nbytes, 1 << 15), 40);
    } else {
        SegmentHeader& header = *memory.at<SegmentHeader>(0);
        switch (dice.below(4)) {
            case 0:
                header.level_and_split.store(dice.any());
                break;
            case 1:
                dice.flip(memory.data() + header.buckets_at, 4096, 200);
                break;
            case 2:
                memory.at<std::atomic<std::uint32_t>>(header.buckets_at)[dice.below(1024)] =
                    static_cast<std::uint32_t>(dice.any());
                break;
            default:
                dice.flip(memory.data() + header.slots_at, 60 * sizeof(IndexSlot), 200);
        }
    }
}

// Reads a segment while it is damaged more and more: each read must give the published bytes, nothing, or an error.
void try_segment(Dice& dice, const std::string& folder) {
    std::filesystem::remove_all(folder);
    std::filesystem::create_directories(folder);
    Budget budget{1 << 18};
    std::string note;
    Catalogue objects(folder, 1, budget, nullptr, false, note);
    std::map<std::string, std::string> published;
    for (int number = 0; number < 60; ++number) {
        const std::string key = "key-" + std::to_string(number);
        const std::string payload = dice.bytes(dice.below(2000));
        const Found place = objects.prepare(key, payload.size(), {});
        require(place.status == Status::done, "no room for a publish");
        payload.copy(reinterpret_cast<char*>(objects.at(place.payload)), payload.size());
        objects.commit(place.offset, place.serial, crc32c(payload.data(), payload.size()));
        published.insert_or_assign(key, payload);
    }
    const File index(open(objects.paths().index.c_str(), O_RDONLY | O_CLOEXEC));
    const File data(open(objects.paths().data.c_str(), O_RDONLY | O_CLOEXEC));
    const File visits(objects.visits().open(1));
    const ObjectReader reader(index.fd(), data.fd(), visits.fd(), "node");
    for (int round = 0; round < 30; ++round) {
        for (const auto& [key, payload] : published) {
            try {
                const auto found = reader.find(key);
                require(found || round > 0, "a published object was not found");
                if (found) {
                    std::string copy(found->nbytes, '\0');
                    const iovec into{copy.data(), copy.size()};
                    require(!reader.copy(*found, {&into, 1}) || copy == payload, "other bytes than were published");
                }
            } catch (const PortFailure& failure) {
                require(round > 0 && failure.error().kind == ErrorKind::checksum, failure.what());
            }
        }
        damage(dice, objects);
    }
}

}  // namespace

}  // namespace farpool::fuzz

int main(int argc, char** argv) {
    if (argc != 4) {
        std::fprintf(stderr, "usage: reader FOLDER TRIALS SEED\n");
        return 2;
    }
    const std::uint64_t trials = std::strtoull(argv[2], nullptr, 10);
    const std::uint64_t seed = std::strtoull(argv[3], nullptr, 10);
    unsigned long long trial = 0;
    do {
        std::fprintf(stderr, "\rreader: seed %llu trial %llu ", static_cast<unsigned long long>(seed), trial);
        farpool::fuzz::Dice dice(farpool::mix64(seed) ^ farpool::mix64(~trial));
        try {
            for (int connection = 0; connection < 200; ++connection) {
                farpool::fuzz::try_connection(dice);
            }
            for (int area = 0; area < 3; ++area) {
                farpool::fuzz::try_area(dice);
            }
            farpool::fuzz::try_segment(dice, argv[1]);
        } catch (const std::exception& error) {
            std::fprintf(stderr, "\nfailed: %s\n", error.what());
            return 1;
        }
        ++trial;
    } while (trial < trials);
    std::printf("reader: %llu trials of seed %llu without a finding\n", trial, static_cast<unsigned long long>(seed));
    return 0;
}
