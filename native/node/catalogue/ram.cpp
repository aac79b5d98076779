#include "node/catalogue/ram.hpp"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>

namespace farpool {

namespace {

constexpr std::uint64_t page_nbytes = 4096;
// The step in which we back the segment with memory, while the node has enough.
constexpr std::uint64_t chunk_nbytes = std::uint64_t{2} << 20;
// Bytes of holes to search in a round, for memory to return: about a millisecond of work.
constexpr std::uint64_t searched_nbytes_max = std::uint64_t{4} << 30;
// A hole counts as this many bytes more, because its system call takes as long as searching them.
constexpr std::uint64_t hole_cost_nbytes = std::uint64_t{1} << 20;

constexpr std::uint64_t down(std::uint64_t value, std::uint64_t step) { return value / step * step; }
constexpr std::uint64_t up(std::uint64_t value, std::uint64_t step) { return down(value + step - 1, step); }

}  // namespace

Ram::Ram(Room& room, Segment segment)
    : room_(room), segment_(std::move(segment)), space_(static_cast<std::int64_t>(segment_.nbytes() / unit_nbytes)) {}

std::uint64_t Ram::used() const noexcept { return capacity() - static_cast<std::uint64_t>(space_.free_units()) * unit_nbytes; }

std::optional<std::uint64_t> Ram::alloc(std::uint32_t units) {
    const std::int64_t first = space_.alloc_lowest(units);
    return first < 0 ? std::nullopt : std::optional(offset_of(first));
}

bool Ram::has_place(std::uint64_t offset, std::uint32_t units) const noexcept {
    return offset % unit_nbytes == 0 && offset >= segment_header_nbytes && offset < end() && units > 0 &&
           units <= (end() - offset) / unit_nbytes;
}

bool Ram::adopt(std::uint64_t offset, std::uint32_t units) { return space_.take(unit_of(offset), units); }

void Ram::release(std::uint64_t offset, std::uint32_t units) { space_.free(unit_of(offset), units); }

void Ram::put(std::uint64_t offset, const Source& source, Then then) {
    std::memcpy(at(offset), source.data, source.nbytes);
    then(true);
}

Ram::Gap Ram::gap_before(std::uint64_t offset) const {
    const Hole hole = space_.hole_at(unit_of(offset) - 1);
    return {static_cast<std::uint64_t>(hole.nbytes), offset_of(hole.offset + hole.nbytes)};
}

Segment Ram::replace(Segment segment) {
    std::swap(segment_, segment);
    assume_backed(false);
    return segment;
}

bool Ram::back(std::uint64_t offset, std::uint32_t units, std::optional<std::uint32_t> ahead) {
    const std::uint64_t begin = down(offset, page_nbytes);
    const std::uint64_t end = up(offset + std::uint64_t{units} * unit_nbytes, page_nbytes);
    const auto first = backed_.begin() + static_cast<std::ptrdiff_t>(begin / page_nbytes);
    const auto last = backed_.begin() + static_cast<std::ptrdiff_t>(end / page_nbytes);
    if (std::find(first, last, false) == last) {
        return true;
    }
    const std::uint64_t chunks_begin = std::max<std::uint64_t>(down(begin, chunk_nbytes), segment_header_nbytes);
    const std::uint64_t chunks_end = std::min<std::uint64_t>(up(end, chunk_nbytes), backed_.size() * page_nbytes);
    if (room_.may_back(chunks_end - chunks_begin) && back_pages(chunks_begin, chunks_end)) {
        return true;
    }
    const auto missing = static_cast<std::uint64_t>(std::count(first, last, false)) * page_nbytes;
    if (ahead && !room_.make_backing_room(missing)) {
        return false;
    }
    if (back_pages(begin, end)) {
        return true;
    }
    room_.trim_all();
    while (!back_pages(begin, end)) {
        if (!ahead || !is_lack_of_memory(errno) || !room_.return_backing(missing, std::uint64_t{*ahead} * unit_nbytes)) {
            return false;
        }
    }
    return true;
}

bool Ram::back_pages(std::uint64_t begin, std::uint64_t end) {
    end = std::min<std::uint64_t>(end, segment_.memory.nbytes());
    if (!farpool::back(segment_, begin, end - begin)) {
        return false;
    }
    mark_pages(begin, end, true);
    return true;
}

std::uint64_t Ram::mark_pages(std::uint64_t begin, std::uint64_t end, bool backed) {
    std::uint64_t changed = 0;
    for (std::uint64_t page = begin / page_nbytes; page < up(end, page_nbytes) / page_nbytes; ++page) {
        changed += backed_[page] != backed ? page_nbytes : 0;
        backed_[page] = backed;
    }
    backed_end_ = backed ? std::max(backed_end_, end) : backed_end_;
    backed_nbytes_ += backed ? changed : 0 - changed;
    room_.count_backed(backed ? changed : 0 - changed);
    return changed;
}

void Ram::assume_backed(bool backed) {
    const std::uint64_t pages = up(segment_.memory.nbytes(), page_nbytes) / page_nbytes;
    room_.count_backed(0 - backed_nbytes_);
    backed_.assign(pages, backed);
    backed_.front() = true;  // the header, which is not lent
    backed_nbytes_ = backed ? (pages - 1) * page_nbytes : 0;
    backed_end_ = backed ? pages * page_nbytes : 0;
    room_.count_backed(backed_nbytes_);
}

std::uint64_t Ram::return_pages(std::uint64_t begin, std::uint64_t end) {
    if (begin >= backed_end_) {
        return 0;
    }
    const bool is_last = end == segment_.memory.nbytes();  // nothing else is in its last page, which may be incomplete
    begin = up(begin, page_nbytes);
    end = std::min(is_last ? up(end, page_nbytes) : down(end, page_nbytes), backed_end_);
    if (begin >= end) {
        return 0;
    }
    const std::uint64_t returned = mark_pages(begin, end, false);
    if (returned > 0) {
        discard(segment_, begin, end - begin);
    }
    backed_end_ = end == backed_end_ ? begin : backed_end_;
    return returned;
}

void Ram::trim() {
    for (const auto& [units, first] : space_.holes()) {
        return_pages(offset_of(first), offset_of(first + units));
    }
}

std::uint64_t Ram::hole_nbytes() const noexcept { return backed_nbytes_ - std::min(backed_nbytes_, used()); }

// The node soon needs holes again that it needed a moment ago, and taking memory from the system costs more than keeping it.
// So we return only as many bytes as were free in each of the last rounds, from the largest holes, which cost the fewest calls.
bool Ram::return_idle(std::uint64_t nbytes_max) {
    if (idle_.nbytes == 0) {
        idle_.least_nbytes = idle_.rounds == 0 ? hole_nbytes() : std::min(idle_.least_nbytes, hole_nbytes());
        if (++idle_.rounds < idle_rounds) {
            return false;
        }
        idle_.rounds = 0;
        idle_.nbytes = idle_.least_nbytes;
        idle_.next = {std::numeric_limits<std::int64_t>::max(), 0};
    }
    nbytes_max = std::min(nbytes_max, idle_.nbytes);
    std::uint64_t searched = 0;
    std::uint64_t returned = 0;
    auto hole = space_.holes().upper_bound(idle_.next);
    while (returned < nbytes_max && searched < searched_nbytes_max) {
        const bool is_last = hole == space_.holes().begin();
        const std::uint64_t nbytes = is_last ? 0 : static_cast<std::uint64_t>((--hole)->first) * unit_nbytes;
        if (nbytes < page_nbytes) {  // the pages of smaller holes contain objects, too
            idle_.nbytes = 0;
            return true;
        }
        const std::uint64_t begin = offset_of(hole->second);
        std::uint64_t end = *hole == idle_.next ? idle_.next_end : begin + nbytes;
        end = std::min(end, std::max(begin, backed_end_));
        while (begin < end && returned < nbytes_max && searched < searched_nbytes_max) {
            const std::uint64_t step = std::min(end - begin, std::max(nbytes_max - returned, page_nbytes));
            const std::uint64_t from = std::max(begin, down(end - step, page_nbytes));
            returned += return_pages(from, end);
            searched += end - from;
            end = from;
        }
        searched += hole_cost_nbytes;
        idle_.next = *hole;
        idle_.next_end = end;
    }
    idle_.nbytes -= std::min(idle_.nbytes, returned);
    return nbytes_max > 0;
}

}  // namespace farpool
