#include "node/catalogue/expiry.hpp"

#include <algorithm>

#include "core/clock.hpp"
#include "core/hash.hpp"
#include "node/files.hpp"
#include "wire/segment.hpp"

namespace farpool {

namespace {

// The word with another end. Each word without an end has a random number, so no two of them are equal.
std::uint64_t with_end(std::uint64_t word, std::uint64_t end) {
    const std::uint64_t rest = word & ~(numbered_flag | end_mask);
    return rest | (end == 0 ? numbered_flag | (random_word() & end_mask) : end);
}

}  // namespace

std::uint64_t end_of(std::uint64_t ttl_ms) {
    const std::uint64_t now = now_milliseconds();
    return ttl_ms == 0 ? 0 : now + std::min(ttl_ms, end_mask - now);
}

std::uint64_t left_until(std::uint64_t word) {
    const std::uint64_t end = end_in(word);
    const std::uint64_t now = end == 0 ? 0 : now_milliseconds();
    return end == 0 ? 0 : end > now ? end - now : 1;
}

std::uint64_t later(std::uint64_t one, std::uint64_t other) { return one == 0 || other == 0 ? 0 : std::max(one, other); }

std::uint64_t extended(std::uint64_t word, std::uint64_t end) {
    const std::uint64_t last = later(end_in(word), end);
    return last == end_in(word) ? word : with_end(word, last);
}

std::uint64_t changed(std::uint64_t word, std::uint64_t end) {
    const std::uint64_t count = (word + change_unit) & change_mask;
    return with_end(count == 0 ? change_unit : count, end);
}

std::uint64_t mark_of(std::uint64_t serial, std::uint64_t word) {
    const std::uint64_t mark = mix64(mix64(serial) + word);
    return mark == 0 || mark == mark_of_none ? 1 : mark;
}

}  // namespace farpool
