// Numbers in the names of files, which only the node can set.
#pragma once

#include <charconv>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <system_error>
#include <vector>

namespace farpool {

// The numbers in a file's name from `begin` on, between dashes and up to the suffix; empty if anything else is there.
inline std::vector<std::uint64_t> numbers_in(std::string_view name, std::size_t begin, std::string_view suffix) {
    if (!name.ends_with(suffix) || name.size() < begin + suffix.size()) {
        return {};
    }
    std::vector<std::uint64_t> found;
    const char* at = name.data() + begin;
    const char* const end = name.data() + name.size() - suffix.size();
    for (;;) {
        std::uint64_t number = 0;
        const auto [next, fault] = std::from_chars(at, end, number);
        if (fault != std::errc() || (next != end && *next != '-')) {
            return {};
        }
        found.push_back(number);
        if (next == end) {
            return found;
        }
        at = next + 1;
    }
}

}  // namespace farpool
