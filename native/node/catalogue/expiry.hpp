// The expiry word of an object (wire/segment.hpp): when it expires, whether it is kept, and how often that was changed.
#pragma once

#include <cstdint>

namespace farpool {

// The mark of a key without an object. A touch that names it keeps only an object that is kept already.
constexpr std::uint64_t mark_of_none = ~std::uint64_t{0};

// Time at which a time to live ends, in ms since 1970; 0 for no end.
std::uint64_t end_of(std::uint64_t ttl_ms);
// Milliseconds that an object has left; 0 for no end.
std::uint64_t left_until(std::uint64_t word);
// The later one of two ends.
std::uint64_t later(std::uint64_t one, std::uint64_t other);
// The word with a later end, if that is later than the end in it. Otherwise the word stays as it is.
std::uint64_t extended(std::uint64_t word, std::uint64_t end);
// The word of an object that is kept or no longer kept from now on. The word counts the change, so it differs from all earlier
// words even if they end at the same time, for example within a tick of the clock. So a touch that names an earlier word is
// refused, also after a restart. The count begins again after 4,095 changes, which take much longer than a tick.
std::uint64_t changed(std::uint64_t word, std::uint64_t end);
// The mark of an object with this word. Because of the serial, the marks of two objects that had the same key differ. The wire
// uses 0 for any mark and `mark_of_none` for no object, so neither is the mark of an object.
std::uint64_t mark_of(std::uint64_t serial, std::uint64_t word);

}  // namespace farpool
