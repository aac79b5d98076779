// Random requests of a world's clients.
#include <fcntl.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/crc32c.hpp"
#include "fuzz/check.hpp"
#include "fuzz/world.hpp"

namespace farpool::fuzz {

void World::request(Client& client) {
    if (dice_.one_in(20)) {
        client.ask_area();
    }
    if (client.honest) {
        return request_on_key(client);
    }
    client.scribble(dice_);
    switch (dice_.below(4)) {
        case 0:
            return client.send_raw(dice_.bytes(dice_.below(300)));
        case 1:
        case 2:
            return spoil(client, random_frame());
        default:
            return request_on_key(client);
    }
}

// Makes a put, or a preparation, of a random payload; a put that is damaged on its way is not repaired.
void World::offer(std::size_t tenant, Client::Asked& asked, Frame& frame, bool& repair) {
    const std::string payload = random_payload();
    const std::uint32_t crc = crc32c(payload.data(), payload.size());
    asked.object = {payload.size(), crc};
    books_[tenant].offer(asked.key, asked.object);
    ObjectHead head{};
    dice_.flip(&head, sizeof head, dice_.below(9));
    head.ttl_ms = ttl();
    frame.meta = packed(head) + asked.key;
    if (asked.op == Op::prepare) {
        frame.meta = packed(payload.size()) + frame.meta;
        payloads_.emplace(asked.object, payload);
    } else {
        frame.payload = payload;
        frame.header.payload_crc = crc;
        if (dice_.one_in(20) && !payload.empty()) {
            dice_.flip(frame.payload.data(), payload.size(), 1);
            asked.damaged = true;
            repair = false;
        }
    }
}

// Commits or aborts the oldest preparation of a client.
void World::end_preparation(Client& client, Client::Asked& asked, Frame& frame) {
    const Client::Place place = client.prepared.front();
    client.prepared.pop_front();
    asked.key = place.key;
    asked.object = place.object;
    frame.header.serial = place.serial;
    frame.meta = packed(place.offset);
    if (asked.op == Op::commit && client.honest) {
        const std::string& payload = payloads_.at(place.object);
        payload.copy(memory_of(client.tenant).at<char>(place.offset), payload.size());
        frame.meta += packed(place.object.second, std::uint32_t{0});
    } else if (asked.op == Op::commit) {
        frame.meta += packed(dice_.word());
    }
}

void World::request_on_key(Client& client) {
    Book& book = books_[client.tenant];
    Client::Asked asked{};
    asked.key = key();
    static const std::vector<Op> ops{Op::get,   Op::get,     Op::get,    Op::stat,  Op::put,   Op::put,
                                     Op::put,   Op::drop,    Op::demote, Op::touch, Op::touch, Op::pin,
                                     Op::unpin, Op::prepare, Op::commit, Op::abort, Op::lookup};
    asked.op = dice_.of(ops);
    Frame frame{make_header(asked.op), asked.key, {}};
    bool repair = true;
    if (asked.op == Op::touch) {
        const std::uint64_t keep = client.honest && dice_.one_in(3) ? dice_.below(3) : 0;
        asked.changes = keep != 0;
        frame.meta = packed(ttl(), keep) + asked.key;
    } else if (asked.op == Op::pin) {
        asked.lasting = !dice_.one_in(4);
        frame.meta = packed(asked.lasting ? 0 : 1 + dice_.below(20)) + asked.key;
    } else if (asked.op == Op::put || asked.op == Op::prepare) {
        offer(client.tenant, asked, frame, repair);
    } else if (asked.op == Op::unpin) {
        if (client.pinned.empty()) {
            return;
        }
        const Client::Place place = client.pinned.front();
        client.pinned.pop_front();
        require(!client.honest || !place.lasting ||
                    crc32c(memory_of(client.tenant).data() + place.offset, place.object.first) == place.object.second,
                "pinned memory has changed");
        frame.meta = packed(place.offset, place.number);
        frame.header.serial = place.serial;
    } else if (asked.op == Op::commit || asked.op == Op::abort) {
        if (client.prepared.empty()) {
            return;
        }
        end_preparation(client, asked, frame);
    } else if (asked.op == Op::lookup) {
        asked.keys.resize(dice_.one_in(20) ? dice_.below(200) : dice_.below(20));
        frame.meta = packed(static_cast<std::uint32_t>(dice_.below(2)), static_cast<std::uint32_t>(asked.keys.size()));
        for (std::string& one : asked.keys) {
            one = key();
            frame.meta += packed(static_cast<std::uint16_t>(one.size())) + one;
        }
    }
    asked.known = book.known(asked.key);
    asked.buried = book.buried(asked.key);
    client.ask(std::move(frame), std::move(asked), repair);
}

// A frame of any operation, with lengths and numbers that may be right.
Frame World::random_frame() {
    const std::uint64_t op = dice_.one_in(8) ? dice_.below(256) : dice_.one_in(5) ? 32 + dice_.below(2) : 16 + dice_.below(16);
    // Keep no object, because no client could let it go once its key is unknown.
    Frame frame{make_header(static_cast<Op>(op) == Op::touch ? Op::pin : static_cast<Op>(op)), {}, {}};
    const std::uint64_t numbers = dice_.below(4);
    for (std::uint64_t number = 0; number < numbers; ++number) {
        frame.meta += packed(dice_.one_in(2) ? dice_.below(capacity_) / 64 * 64 : dice_.any());
    }
    frame.meta += dice_.one_in(4) ? dice_.bytes(dice_.below(dice_.one_in(10) ? largest_meta + 1 : 300)) : key();
    frame.meta.resize(std::min<std::size_t>(frame.meta.size(), largest_meta));
    frame.payload = dice_.one_in(3) ? dice_.bytes(dice_.below(2000)) : std::string();
    frame.header.serial = dice_.one_in(4) ? dice_.any() : dice_.below(3000);
    if (!lent_.empty() && dice_.one_in(2)) {
        frame.header.lease = std::next(lent_.begin(), static_cast<std::ptrdiff_t>(dice_.below(lent_.size())))->first;
    }
    return frame;
}

void World::spoil(Client& client, Frame frame) {
    frame.header.request = dice_.word();
    frame.header.payload_nbytes = frame.payload.size();
    frame.header.payload_crc = crc32c(frame.payload.data(), frame.payload.size());
    if (dice_.one_in(4)) {  // parts of a publish area, that may be there
        frame.header = make_header(Op::put);
        frame.header.flags = payload_in_area;
        frame.payload.clear();
        for (std::uint64_t parts = dice_.below(6); parts > 0; --parts) {
            const auto nbytes = static_cast<std::uint32_t>(dice_.one_in(40) ? dice_.any() : 1 + dice_.below(1000));
            frame.payload += packed(static_cast<std::uint32_t>(dice_.one_in(40) ? dice_.any() : dice_.below(3000)), nbytes);
            frame.header.payload_nbytes += nbytes;
        }
        frame.meta.insert(0, sizeof(ObjectHead), '\0');
        frame.meta.resize(std::min<std::size_t>(frame.meta.size(), sizeof(ObjectHead) + 200));
    }
    if (dice_.one_in(4)) {
        const std::vector<std::uint64_t*> fields{&frame.header.payload_nbytes, &frame.header.serial, &frame.header.lease};
        *dice_.of(fields) = dice_.any();
    }
    if (dice_.one_in(8)) {
        frame.header.epoch = static_cast<std::uint32_t>(dice_.any());
        frame.header.tenant = static_cast<std::uint32_t>(dice_.below(4));
    }
    seal(frame.header, frame.meta.data(), static_cast<std::uint32_t>(frame.meta.size()));
    std::string bytes(reinterpret_cast<const char*>(&frame.header), sizeof frame.header);
    if (dice_.one_in(8)) {
        dice_.flip(bytes.data(), bytes.size(), 1 + dice_.below(3));
    }
    bytes += frame.meta + frame.payload;
    if (dice_.one_in(8)) {
        bytes.resize(dice_.below(bytes.size()));
    }
    client.send_raw(bytes);
}

void World::lend(Client& client) {
    const std::uint64_t nbytes = dice_.one_in(10) ? dice_.any() : dice_.below(capacity_ / 3);
    try {
        client.lease = server_->lend(client.session, client.tenant, nbytes);
    } catch (const Server::Busy&) {
        return;
    }
    if (client.lease != 0) {
        lent_.emplace(client.lease, nbytes);
        client.shadow.assign(nbytes, '\0');
        const File file(server_->lease_file(client.session, client.lease));
        const Mapping memory(file.fd(), segment_header_nbytes + nbytes, true);
        require(std::all_of(memory.data() + segment_header_nbytes, memory.data() + memory.nbytes(),
                            [](std::byte byte) { return byte == std::byte{0}; }),
                "memory was lent that is not zero");
        if (!client.honest && dice_.one_in(2)) {
            dice_.flip(memory.data(), dice_.one_in(2) ? 128 : segment_header_nbytes, 20);
        }
    }
}

void World::release(Client& client) {
    if (!client.idle()) {
        return;  // requests under way would not find the lease
    }
    require(server_->release(client.session, client.lease), "a lease was not there");
    lent_.erase(client.lease);
    client.lease = 0;
}

void World::request_on_lease(Client& client) {
    if (client.lease == 0 || !client.honest || (client.rights & rights::write) == 0) {
        return;
    }
    const std::uint64_t offset = dice_.below(client.shadow.size() + 1);
    const std::uint64_t nbytes = dice_.below(client.shadow.size() - offset + 1);
    Client::Asked asked{};
    // The bytes of a read are taken when they are sent: a write behind it in the line would show in them.
    asked.op = !client.idle() || dice_.one_in(2) ? Op::read : Op::write;
    Frame frame{make_header(asked.op), packed(offset), {}};
    frame.header.lease = client.lease;
    if (asked.op == Op::read) {
        frame.meta += packed(nbytes);
        asked.expected = client.shadow.substr(offset, nbytes);
    } else {
        frame.payload = dice_.bytes(nbytes);
        client.shadow.replace(offset, nbytes, frame.payload);
    }
    client.ask(std::move(frame), std::move(asked));
}

}  // namespace farpool::fuzz
