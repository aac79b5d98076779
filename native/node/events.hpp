// What happened at a node, for the program that controls it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <string>
#include <utility>
#include <vector>

namespace farpool {

struct Event {
    std::string kind;
    std::uint64_t session;
    std::string text;
};

class Events {
public:
    static constexpr std::size_t count_max = 10'000;

    void note(std::string kind, std::uint64_t session, std::string text) {
        if (events_.size() < count_max) {
            events_.push_back({std::move(kind), session, std::move(text)});
        }
    }
    // Returns the events since the last call.
    std::vector<Event> take() { return std::exchange(events_, {}); }
    // Runs `work` and notes an exception: a failure, such as a lack of memory, must not end the node. False if it failed.
    template <typename Work>
    bool guard(std::uint64_t session, Work work) {
        try {
            work();
            return true;
        } catch (const std::exception& error) {
            note("error", session, error.what());
            return false;
        }
    }

private:
    std::vector<Event> events_;
};

}  // namespace farpool
