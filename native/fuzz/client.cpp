#include "fuzz/client.hpp"

#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "core/crc32c.hpp"
#include "fuzz/check.hpp"

namespace farpool::fuzz {

namespace {

std::string told(const Client::Asked& asked, const char* what) {
    return std::string(what) + ": operation " + std::to_string(static_cast<unsigned>(asked.op)) + ", request " +
           std::to_string(asked.request) + ", key of " + std::to_string(asked.key.size()) + " bytes";
}

bool finds(Op op) { return op == Op::get || op == Op::stat || op == Op::pin; }

template <typename T>
T number_at(const std::string& meta, std::size_t offset) {
    T value{};
    require(offset + sizeof value <= meta.size(), "a reply is too short");
    std::memcpy(&value, meta.data() + offset, sizeof value);
    return value;
}

}  // namespace

Client::Client(int& theirs, std::uint64_t session, std::uint32_t tenant, std::uint32_t rights, Book* book, bool honest)
    : session(session), tenant(tenant), rights(rights), honest(honest), book_(book) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0, "no socket pair");
    socket_ = Stream(ends[0]);
    theirs = ends[1];
}

void Client::ask(Frame frame, Asked asked, bool repair) {
    frame.header.request = asked.request = ++requests_;
    frame.header.payload_nbytes = frame.payload.size();
    if (repair) {
        frame.header.payload_crc = crc32c(frame.payload.data(), frame.payload.size());
    }
    std::string behind;
    if (repair && !frame.payload.empty() && frame.header.request % 2 == 0) {
        frame.header.flags = checksum_follows;
        behind.assign(reinterpret_cast<const char*>(&frame.header.payload_crc), sizeof frame.header.payload_crc);
        frame.header.payload_crc = 0;
    }
    const std::size_t nbytes = frame.payload.size();
    asked.by_area = honest && asked.op == Op::put && nbytes > 0 && !area_in_use_ && frame.header.request % 3 == 0 &&
                    segment_header_nbytes + nbytes <= area_.nbytes();
    if (asked.by_area) {
        area_in_use_ = true;
        frame.header.flags |= payload_in_area;
        std::memcpy(area_.data() + segment_header_nbytes, frame.payload.data(), nbytes);
        frame.payload.clear();
        const std::size_t step = 1 + frame.header.request * 37 % nbytes;
        for (std::size_t at = 0; at < nbytes; at += step) {
            frame.payload += packed(static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(std::min(step, nbytes - at)));
        }
    }
    seal(frame.header, frame.meta.data(), static_cast<std::uint32_t>(frame.meta.size()));
    outgoing_.append(reinterpret_cast<const char*>(&frame.header), sizeof frame.header);
    outgoing_ += frame.meta + frame.payload + behind;
    unanswered_.push_back(std::move(asked));
}

void Client::ask_area() {
    if (!asked_area_) {
        asked_area_ = true;
        Asked asked{};
        asked.op = Op::area;
        ask({make_header(Op::area), {}, {}}, std::move(asked));
    }
}

void Client::scribble(Dice& dice) {
    if (area_.data() != nullptr) {
        dice.flip(area_.data() + segment_header_nbytes, area_.nbytes() - segment_header_nbytes, 20);
    }
}

void Client::push(std::size_t nbytes) {
    if (closed_ || outgoing_.empty()) {
        return;
    }
    const ssize_t sent =
        ::send(socket_.fd(), outgoing_.data(), std::min(nbytes, outgoing_.size()), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) {
        outgoing_.erase(0, static_cast<std::size_t>(sent));
    } else if (errno != EAGAIN) {
        outgoing_.clear();  // the bytes that came before the end can still be read
    }
}

void Client::pull(std::size_t nbytes) {
    if (closed_) {
        return;
    }
    const std::size_t before = incoming_.size();
    incoming_.resize(before + nbytes);
    int passed = -1;
    const ssize_t got = socket_.receive_with_file(incoming_.data() + before, nbytes, passed);
    if (const File file(passed); passed >= 0) {
        struct stat status{};
        require(fstat(passed, &status) == 0 && ftruncate(passed, 0) != 0, "a publish area that can be cut off");
        area_ = Mapping(passed, static_cast<std::size_t>(status.st_size), true);
    }
    incoming_.resize(before + static_cast<std::size_t>(std::max<ssize_t>(got, 0)));
    if (got == 0 || (got < 0 && errno != EAGAIN)) {
        closed_ = true;
        require(may_close_ || !honest, "the node closed a connection that had sent nothing wrong");
    }
    std::size_t begin = 0;
    while (incoming_.size() - begin >= sizeof(FrameHeader)) {
        Frame reply;
        std::memcpy(&reply.header, incoming_.data() + begin, sizeof reply.header);
        require(header_fault(reply.header) == nullptr && reply.header.payload_nbytes < (std::uint64_t{1} << 30),
                "a reply is no frame");
        const std::size_t whole = sizeof reply.header + reply.header.meta_nbytes + reply.header.payload_nbytes;
        if (incoming_.size() - begin < whole) {
            break;
        }
        reply.meta = incoming_.substr(begin + sizeof reply.header, reply.header.meta_nbytes);
        reply.payload = incoming_.substr(begin + sizeof reply.header + reply.meta.size(), reply.header.payload_nbytes);
        begin += whole;
        require(is_whole(reply.header, reply.meta.data()), "the header of a reply has a wrong checksum");
        if (honest) {
            check(reply);
        }
    }
    incoming_.erase(0, begin);
}

void Client::check(const Frame& reply) {
    require(!unanswered_.empty(), "a reply without a request");
    const Asked asked = std::move(unanswered_.front());
    unanswered_.pop_front();
    require(reply.header.request == asked.request && reply.header.op == static_cast<std::uint8_t>(asked.op) &&
                reply.header.tenant == tenant,
            told(asked, "the reply belongs to another request"));
    area_in_use_ = area_in_use_ && !asked.by_area;
    const auto status = static_cast<Status>(reply.header.status);
    require(reply.header.status <= static_cast<std::uint16_t>(Status::busy), told(asked, "an unknown status"));
    require(status != Status::bad_request, told(asked, "a good request was refused"));
    require(status != Status::checksum || asked.damaged, told(asked, "good bytes were refused"));
    require(!asked.damaged || status != Status::done, told(asked, "damaged bytes were taken"));
    if (status == Status::denied) {
        return require(rights != 15, told(asked, "denied without a reason"));
    }
    if (status == Status::present) {
        require(asked.op == Op::put || asked.op == Op::prepare || asked.op == Op::commit, told(asked, "nothing was put"));
        return check_found(reply, asked);
    }
    if (status != Status::done) {
        return require(reply.payload.empty(), told(asked, "a failure with a payload"));
    }
    if (finds(asked.op)) {
        check_found(reply, asked);
    } else if (asked.op == Op::put || asked.op == Op::commit) {
        require(book_->agrees(asked.key, reply.header.serial, asked.object), told(asked, "a serial means two objects"));
        require(book_->place(reply.header.serial) > asked.buried, told(asked, "a serial was used again"));
    } else if (asked.op == Op::drop) {
        book_->bury(asked.key, asked.known);
    } else if (asked.op == Op::prepare) {
        prepared.push_back({asked.key, number_at<std::uint64_t>(reply.meta, 0), reply.header.serial, asked.object});
    } else if (asked.op == Op::lookup) {
        check_looked_up(reply, asked);
    } else if (asked.op == Op::touch) {
        require(!asked.changes || book_->is_new_mark(reply.header.serial), told(asked, "two changes have one mark"));
    } else if (asked.op == Op::read) {
        require(reply.payload == asked.expected, told(asked, "private memory has other bytes"));
    }
}

// Checks a reply about an object that exists.
void Client::check_found(const Frame& reply, const Asked& asked) {
    const std::uint64_t serial = reply.header.serial;
    Book::Object object;
    if (asked.op == Op::get) {
        object = {reply.payload.size(), reply.header.payload_crc};
        require(crc32c(reply.payload.data(), reply.payload.size()) == object.second, told(asked, "other bytes than published"));
    } else if (asked.op == Op::pin) {
        object = {number_at<std::uint64_t>(reply.meta, 8), number_at<std::uint32_t>(reply.meta, 16)};
        pinned.push_back({asked.key, number_at<std::uint64_t>(reply.meta, 0), serial, object, asked.lasting,
                          number_at<std::uint32_t>(reply.meta, 20)});
    } else {
        object = {number_at<std::uint64_t>(reply.meta, 0), number_at<std::uint32_t>(reply.meta, 8)};
    }
    require(book_->was_offered(asked.key, object), told(asked, "an object that was never published"));
    require(book_->agrees(asked.key, serial, object), told(asked, "a serial means two objects"));
    require(book_->place(serial) > asked.buried, told(asked, "an object that was dropped"));
}

void Client::check_looked_up(const Frame& reply, const Asked& asked) {
    const std::size_t count = asked.keys.size();
    const std::size_t sizes_at = 8 + (count + 63) / 64 * 8;
    require(number_at<std::uint32_t>(reply.meta, 0) == count && reply.meta.size() == sizes_at + 8 * count,
            told(asked, "a lookup of other keys"));
    std::size_t leading = 0;
    for (std::size_t key = 0; key < count; ++key) {
        const auto nbytes = number_at<std::uint64_t>(reply.meta, sizes_at + 8 * key);
        const bool there = (number_at<std::uint8_t>(reply.meta, 8 + key / 8) >> key % 8 & 1) != 0;
        require(there ? book_->has_size(asked.keys[key], nbytes) : nbytes == 0, told(asked, "a size that nothing has"));
        leading += there && leading == key ? 1 : 0;
    }
    require(number_at<std::uint32_t>(reply.meta, 4) == leading, told(asked, "another leading run"));
}

}  // namespace farpool::fuzz
