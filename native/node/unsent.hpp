// The objects that unsent replies hold, by access key.
//
// A client that sends gets and does not read the replies must not keep others from publishing. So the replies of each access
// key may hold a limited number of bytes, and further replies wait in the key's line.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <unordered_map>
#include <utility>

#include "node/quotas.hpp"

namespace farpool {

class Unsent {
public:
    // A connection that waits in the line: its descriptor and its number.
    using Waiting = std::pair<int, std::uint64_t>;

    std::uint64_t nbytes() const noexcept { return nbytes_; }
    bool has(std::uint64_t offset) const { return objects_.contains(offset); }
    // Counts one more reply that holds an object of `nbytes` in RAM; returns the bytes by which that increases the sum.
    std::uint64_t add(std::uint64_t offset, std::uint64_t nbytes) {
        const auto [object, is_new] = objects_.try_emplace(offset, Object{nbytes, 0});
        ++object->second.replies;
        nbytes_ += is_new ? nbytes : 0;
        return is_new ? nbytes : 0;
    }
    // Counts one reply less; returns the bytes by which that decreases the sum.
    std::uint64_t remove(std::uint64_t offset) {
        const auto object = objects_.find(offset);
        if (--object->second.replies > 0) {
            return 0;
        }
        const std::uint64_t nbytes = object->second.nbytes;
        nbytes_ -= nbytes;
        objects_.erase(object);
        return nbytes;
    }

    void wait(Waiting connection) { line_.push_back(connection); }
    bool has_waiting() const noexcept { return !line_.empty(); }
    Waiting first_waiting() const { return line_.front(); }
    void end_wait() { line_.pop_front(); }

private:
    struct Object {
        std::uint64_t nbytes;
        std::size_t replies;
    };
    std::uint64_t nbytes_ = 0;
    std::unordered_map<std::uint64_t, Object> objects_;  // by offset
    std::deque<Waiting> line_;
};

// The unsent replies of all access keys.
class UnsentByKey {
public:
    Unsent& of(const Quotas::Owner& owner) { return by_key_[owner]; }
    // Notes that a line may move on, because replies have been sent.
    void note_room() noexcept { has_room_ = true; }
    bool has_room() const noexcept { return has_room_; }
    // Calls `serve` for each connection that waits, in the order of its line, until `serve` returns false: then the connection
    // stays the first of its line. Does nothing unless there is room.
    template <typename Serve>
    void serve(Serve serve) {
        if (!std::exchange(has_room_, false)) {
            return;
        }
        for (auto& [owner, unsent] : by_key_) {
            while (unsent.has_waiting() && serve(unsent.first_waiting())) {
                unsent.end_wait();
            }
        }
    }

private:
    std::map<Quotas::Owner, Unsent> by_key_;
    bool has_room_ = false;
};

}  // namespace farpool
