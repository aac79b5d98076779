#include "pager/arena_map.hpp"

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>

namespace farpool::pager {

bool ArenaMap::take(BlockId block, std::int64_t place, std::int64_t nbytes) {
    if (!ranges_.alloc_at(place, nbytes, block)) {
        return false;
    }
    ++version_;
    return true;
}

void ArenaMap::drop(std::int64_t place, std::int64_t nbytes, std::int64_t last_use) {
    ranges_.free(place);
    last_uses_.leave(place, place + rounded(nbytes), last_use);
    ++version_;
}

void ArenaMap::add_hazard(TransferId transfer, std::int64_t place, std::int64_t nbytes) {
    const Hazard hazard{transfer, place, place + rounded(nbytes)};
    const auto at = std::ranges::lower_bound(hazards_, transfer, {}, &Hazard::transfer);
    if (at != hazards_.end() && at->transfer == transfer) {
        *at = hazard;
    } else {
        hazards_.insert(at, hazard);
    }
}

void ArenaMap::remove_hazard(TransferId transfer) {
    const auto at = std::ranges::lower_bound(hazards_, transfer, {}, &Hazard::transfer);
    if (at != hazards_.end() && at->transfer == transfer) {
        hazards_.erase(at);
    }
    ++version_;
}

std::vector<TransferId> ArenaMap::hazards_of(std::int64_t place, std::int64_t nbytes) const {
    std::vector<TransferId> found;
    for (const Hazard& hazard : hazards_) {
        if (hazard.low < place + nbytes && place < hazard.high) {
            found.push_back(hazard.transfer);
        }
    }
    return found;
}

std::vector<BlockId> ArenaMap::owners() const {
    std::vector<BlockId> owners;
    each_owner([&](BlockId owner, std::int64_t, std::int64_t) {
        owners.push_back(owner);
        return true;
    });
    return owners;
}

std::vector<BlockId> ArenaMap::owners_beyond(std::int64_t capacity) const {
    std::vector<BlockId> owners;
    each_owner([&](BlockId owner, std::int64_t place, std::int64_t nbytes) {
        if (place + nbytes > capacity) {
            owners.push_back(owner);
        }
        return true;
    });
    return owners;
}

std::optional<Slides> ArenaMap::cheapest_gap(std::int64_t nbytes, std::int64_t most, const std::vector<Range>& movables,
                                             std::vector<std::pair<std::int64_t, std::int64_t>> obstacles) const {
    for (const Hazard& hazard : hazards_) {
        obstacles.emplace_back(hazard.low, hazard.high);
    }
    obstacles.emplace_back(capacity(), capacity());
    std::ranges::sort(obstacles);
    std::span<const Range> best;
    std::int64_t best_start = 0;
    std::int64_t low = 0;
    std::size_t index = 0;
    for (const auto& [start, stop] : obstacles) {
        const std::size_t begin = index;
        while (index < movables.size() && movables[index].place < start) {
            ++index;
        }
        if (start > low && index > begin) {
            const std::span<const Range> stretch(movables.data() + begin, index - begin);
            std::size_t left = 0;
            std::int64_t moved = 0;
            std::int64_t from = low;
            for (std::size_t right = 0; right < stretch.size(); ++right) {
                moved += stretch[right].nbytes;
                const std::int64_t end = right + 1 < stretch.size() ? stretch[right + 1].place : start;
                while (left <= right && end - from - moved >= nbytes) {
                    if (moved <= most) {
                        best = stretch.subspan(left, right + 1 - left);
                        best_start = from;
                        most = moved - 1;
                    }
                    from = stretch[left].place + stretch[left].nbytes;
                    moved -= stretch[left].nbytes;
                    ++left;
                }
            }
        }
        low = std::max(low, stop);
    }
    if (best.empty()) {
        return std::nullopt;
    }
    Slides slides;
    for (const Range& range : best) {
        if (range.place != best_start) {
            slides.emplace_back(range.owner, best_start);
        }
        best_start += range.nbytes;
    }
    return slides;
}

Move ArenaMap::slide(BlockId block, std::int64_t place, std::int64_t target, std::int64_t nbytes, std::int64_t last_use) {
    drop(place, nbytes, last_use);
    if (!take(block, target, nbytes)) {
        throw std::logic_error("Pager: arena range " + std::to_string(target) + "+" + std::to_string(nbytes) + " is taken");
    }
    return {place, target, nbytes, std::max(last_use, claim(target, nbytes))};
}

bool ArenaMap::resize(std::int64_t capacity) {
    if (capacity >= this->capacity()) {
        ranges_.grow(capacity);
        return true;
    }
    if (std::ranges::any_of(hazards_, [&](const Hazard& hazard) { return hazard.high > capacity; })) {
        return false;
    }
    return ranges_.shrink(capacity);
}

}  // namespace farpool::pager
