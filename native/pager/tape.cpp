#include "pager/tape.hpp"

#include <algorithm>
#include <utility>

namespace farpool::pager {

namespace {

constexpr std::size_t first_index = std::size_t{1} << 12;
constexpr int name_shift = 25;
constexpr std::int64_t count_mask = 0xFFFFFF;
constexpr std::size_t growth = 8;  // tables by name grow by one part in this many

}  // namespace

Tape::Tape(std::int64_t length) : length_(length), index_(first_index, -1) {}

Tape::Token Tape::token(std::int64_t position) const {
    const std::int64_t token = at(position).token;
    if (token < 0) {
        return {-1, 0, false};
    }
    return {token >> name_shift, static_cast<std::int32_t>((token >> 1) & count_mask), (token & 1) != 0};
}

std::unordered_map<std::int64_t, std::int64_t> Tape::upcoming() const {
    std::unordered_map<std::int64_t, std::int64_t> known;
    for (std::int64_t position = now_; position > pointer_; --position) {
        const Token access = token(position);
        for (std::int64_t name = access.name; name < access.name + access.count; ++name) {
            known[name] = position;
        }
    }
    return known;
}

std::int64_t Tape::record(std::int32_t name, std::int32_t count, std::int64_t nbytes, bool created, double busy) {
    append((std::int64_t{name} << name_shift) | (std::int64_t{count} << 1) | (created ? 1 : 0), nbytes, busy);
    const auto slot = static_cast<std::size_t>(name);
    if (slot >= last_.size()) {
        last_.reserve(slot + 1 + slot / growth);  // exactly: doubling would hold memory that is never used
        last_.resize(last_.capacity(), -1);
    }
    const std::int64_t before = last_[slot];
    if (before >= 0 && before > now_ - length_) {
        at(before).next = now_;
    }
    last_[slot] = now_;
    if (followed() && at(pointer_).next > pointer_) {
        return at(pointer_).next;
    }
    return unknown_use(now_);
}

std::int64_t Tape::record_table(std::int32_t name, double busy) {
    const std::int64_t token = -1 - std::int64_t{name};
    if (now_ < 0 || at(now_).token != token) {
        append(token, 0, busy);
    } else {
        at(now_).clock += busy;
    }
    return unknown_use(now_);
}

void Tape::add_times(std::span<const Late> times) {
    // The clock of an access has the seconds of all accesses before it. So one pass over the accesses adds up the new seconds.
    std::int64_t first = now_ + 1;
    const auto next = [&](const Late& late) { return std::max(late.position, now_ - length_) + 1; };
    for (const Late& late : times) {
        first = std::min(first, next(late));
    }
    added_.assign(static_cast<std::size_t>(now_ + 1 - first), 0.0);
    for (const Late& late : times) {
        if (late.position == now_) {
            unclaimed_ += late.seconds;
        } else {
            added_[static_cast<std::size_t>(next(late) - first)] += late.seconds;
        }
    }
    double sum = 0.0;
    for (std::int64_t later = first; later <= now_; ++later) {
        sum += added_[static_cast<std::size_t>(later - first)];
        at(later).clock += sum;
    }
}

void Tape::append(std::int64_t token, std::int64_t nbytes, double busy) {
    bool follows = false;
    if (pointer_ >= 0) {
        if (pointer_ > now_ - length_ + skip && at(pointer_ + 1).token == token) {
            foretold_ = followed();
            ++pointer_;
            ++confirmed_;
            strays_ = 0;
            follows = true;
        } else {
            foretold_ = false;
            follows = skip_to(token);
        }
    }
    busy += std::exchange(unclaimed_, 0.0);
    Entry entry{token, nbytes, nbytes, busy, 0};
    if (now_ >= 0) {
        entry.volume = at(now_).volume + nbytes;
        entry.clock = at(now_).clock + busy;
    }
    ++now_;
    if (now_ < length_) {
        entries_.push_back(entry);
    } else {
        at(now_) = entry;
    }
    if (now_ >= context - 1) {
        const std::size_t slot = place(now_);
        if (!follows) {
            search(slot);
        }
        index_[slot] = now_;
        if (now_ < length_ && 2 * now_ > static_cast<std::int64_t>(index_.size())) {
            enlarge_index();
        }
    }
}

std::size_t Tape::place(std::int64_t position) const {
    std::uint64_t mixed = 0x9E3779B97F4A7C15;
    for (std::int64_t back = context - 1; back >= 0; --back) {
        mixed ^= static_cast<std::uint64_t>(at(position - back).token);
        mixed *= 0xFF51AFD7ED558CCD;
        mixed ^= mixed >> 32;
    }
    return static_cast<std::size_t>(mixed & (index_.size() - 1));
}

void Tape::enlarge_index() {
    index_.assign(4 * index_.size(), -1);
    for (std::int64_t position = context - 1; position <= now_; ++position) {
        index_[place(position)] = position;
    }
}

// Moves the pointer to this token if it is a few accesses ahead; false if the context has to be searched.
bool Tape::skip_to(std::int64_t token) {
    if (pointer_ <= now_ - length_ + skip) {
        lose();
        return false;
    }
    ++divergences_;
    for (std::int64_t ahead = pointer_ + 2; ahead < std::min(pointer_ + skip, now_) + 1; ++ahead) {
        if (at(ahead).token == token) {
            pointer_ = ahead;
            strays_ = 0;
            return true;
        }
    }
    return false;
}

void Tape::search(std::size_t place) {
    const std::int64_t found = index_[place];
    bool same = found > std::max(std::int64_t{0}, now_ - length_ + skip);
    for (std::int64_t back = 0; same && back < context; ++back) {
        same = at(found - back).token == at(now_ - back).token;
    }
    if (same) {
        if (found != pointer_) {
            ++jumps_;
            confirmed_ = 0;
        }
        pointer_ = found;
        strays_ = 0;
    } else if (pointer_ >= 0 && ++strays_ > stray) {
        lose();
    }
}

void Tape::lose() {
    pointer_ = -1;
    confirmed_ = strays_ = 0;
    ++jumps_;
}

}  // namespace farpool::pager
