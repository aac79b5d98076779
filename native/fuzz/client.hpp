// A client of the node under test: sends given requests in pieces and checks every reply.
#pragma once

#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "fuzz/book.hpp"
#include "fuzz/dice.hpp"
#include "node/files.hpp"
#include "wire/frame.hpp"
#include "wire/segment.hpp"
#include "wire/stream.hpp"

namespace farpool::fuzz {

struct Frame {
    FrameHeader header;
    std::string meta;
    std::string payload;
};

class Client {
public:
    // A request that has not been answered yet, with what its reply is checked against.
    struct Asked {
        Op op;
        std::uint64_t request;
        std::string key;
        std::uint64_t known;            // objects of the key, when the question was asked
        std::uint64_t buried;           // known objects of the key that were dropped by then
        Book::Object object{};          // the object that is offered
        std::string expected;           // the payload that a read has to return
        std::vector<std::string> keys;  // keys that are looked up
        bool lasting = false;           // a pin without a time to live
        bool changes = false;           // a touch that keeps or lets go
        bool damaged = false;
        bool by_area = false;
    };
    struct Place {
        std::string key;
        std::uint64_t offset;
        std::uint64_t serial;
        Book::Object object;
        bool lasting = false;
        std::uint64_t number = 0;  // of the pin: without it, an unpin ends any of the session's there
    };

    // `theirs` receives the node's end of the socket. Replies to a client that is not `honest` are read but not checked.
    Client(int& theirs, std::uint64_t session, std::uint32_t tenant, std::uint32_t rights, Book* book, bool honest);

    void ask(Frame frame, Asked asked, bool repair = true);
    // Asks for a publish area, once; payloads of good requests go through it now and then.
    void ask_area();
    // Damages random bytes of the publish area, if there is one.
    void scribble(Dice& dice);
    void send_raw(const std::string& bytes) { outgoing_ += bytes; }
    // Sends at most `nbytes` of the bytes that wait.
    void push(std::size_t nbytes);
    // Reads at most `nbytes`, and checks the replies that are complete.
    void pull(std::size_t nbytes);
    bool closed() const noexcept { return closed_; }
    bool idle() const noexcept { return closed_ || (outgoing_.empty() && unanswered_.empty()); }
    void expect_close() noexcept { may_close_ = true; }
    const std::uint64_t session;
    const std::uint32_t tenant;
    const std::uint32_t rights;
    const bool honest;
    std::deque<Place> prepared;  // places prepared and not committed yet
    std::deque<Place> pinned;
    std::uint64_t lease = 0;
    std::string shadow;  // expected content of the lease

private:
    void check(const Frame& reply);
    void check_found(const Frame& reply, const Asked& asked);
    void check_looked_up(const Frame& reply, const Asked& asked);

    Book* book_;
    Stream socket_;
    Mapping area_;
    bool asked_area_ = false;
    bool area_in_use_ = false;
    std::string outgoing_;
    std::string incoming_;
    std::deque<Asked> unanswered_;
    std::uint64_t requests_ = 0;
    bool closed_ = false;
    bool may_close_ = false;
};

template <typename... T>
std::string packed(T... values) {
    std::string made;
    (made.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
    return made;
}

}  // namespace farpool::fuzz
