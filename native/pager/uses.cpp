#include "pager/uses.hpp"

#include <algorithm>
#include <numeric>

namespace farpool::pager {

namespace {

constexpr std::size_t few = 4;  // up to this many uses are compared pairwise, which is quicker than sorting

bool disjoint(const Run& left, const Run& right) { return left.first >= right.stop() || left.stop() <= right.first; }

bool same(const Run& left, const Run& right) {
    return left.first == right.first && left.count == right.count && left.mode == right.mode;
}

// Joins a few uses whose runs are either the same or disjoint; false if runs overlap in another way.
bool join_few(std::span<const Use> uses, Runs& joined) {
    for (const Use& use : uses) {
        if (use.empty()) {
            joined.places.push_back({-1, 0});
            continue;
        }
        const auto [run, offset] = cover(use);
        const auto met = std::ranges::find_if(joined.runs, [&](const Run& other) { return !disjoint(run, other); });
        if (met == joined.runs.end()) {
            joined.places.push_back({static_cast<std::int32_t>(joined.runs.size()), offset});
            joined.runs.push_back(run);
        } else if (same(run, *met)) {
            joined.places.push_back({static_cast<std::int32_t>(met - joined.runs.begin()), offset});
        } else {
            return false;
        }
    }
    return true;
}

Run united(const Run& left, const Run& right) {
    const bool alike = same(left, right) || (left.mode == Mode::read && right.mode == Mode::read);
    const BlockId stop = std::max(left.stop(), right.stop());
    return {left.first, stop - left.first, alike ? left.mode : Mode::write, left.table};
}

Runs join_many(std::span<const Use> uses, bool rows) {
    std::vector<Run> runs;        // each once, in the order of their first use
    std::vector<Placed> origins;  // of each use: its first block, and where it begins in it
    for (const Use& use : uses) {
        if (use.empty()) {
            origins.push_back({-1, 0});
            continue;
        }
        const auto [run, offset] = cover(use, rows ? use.storage->first : -1);
        origins.push_back({run.first, offset});
        runs.push_back(run);
    }
    std::vector<std::size_t> order(runs.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::ranges::stable_sort(order, {}, [&](std::size_t index) { return std::pair{runs[index].first, runs[index].count}; });
    std::vector<std::size_t> kept;  // the first of equal uses
    bool overlapping = false;
    for (std::size_t at = 0; at < order.size(); ++at) {
        const Run& run = runs[order[at]];
        bool seen = false;
        for (std::size_t back = kept.size(); !seen && back-- > 0 && !disjoint(runs[kept[back]], run);) {
            seen = same(runs[kept[back]], run);
            overlapping = overlapping || !seen;
        }
        if (!seen) {
            kept.push_back(order[at]);
        }
    }
    Runs joined;
    if (!overlapping) {
        std::ranges::sort(kept);  // in their original order
    }
    for (const std::size_t index : kept) {
        const Run& run = runs[index];
        if (overlapping && !joined.runs.empty() && joined.runs.back().stop() > run.first) {
            joined.runs.back() = united(joined.runs.back(), run);
        } else {
            joined.runs.push_back(run);
        }
    }
    std::vector<std::int32_t> by_block(joined.runs.size());
    std::iota(by_block.begin(), by_block.end(), 0);
    const auto first = [&](std::int32_t index) { return joined.runs[static_cast<std::size_t>(index)].first; };
    std::ranges::sort(by_block, {}, first);
    for (std::size_t at = 0; at < origins.size(); ++at) {
        if (origins[at].run < 0) {
            joined.places.push_back({-1, 0});
            continue;
        }
        const BlockId block = origins[at].run;
        const std::int32_t number = *(std::ranges::upper_bound(by_block, block, {}, first) - 1);
        joined.places.push_back({number, origins[at].offset + (block - first(number)) * uses[at].storage->block_bytes});
    }
    return joined;
}

}  // namespace

Span cover(const Use& use, BlockId table) {
    const Layout& layout = *use.storage;
    const std::int64_t step = layout.block_bytes;
    const std::int64_t low = use.start / step;
    const std::int64_t high = (use.stop - 1) / step;
    const bool whole = layout.offset == 0 && use.start == low * step && use.stop == std::min((high + 1) * step, layout.nbytes);
    Mode mode = use.mode;
    if (mode == Mode::overwrite && !(whole && (layout.count > 1 || !layout.shared))) {
        mode = Mode::write;  // other bytes of its blocks must be kept
    }
    return {{layout.first + static_cast<BlockId>(low), static_cast<std::int32_t>(high - low + 1), mode, table},
            layout.offset + use.start - low * step};
}

Runs runs_of(std::span<const Use> uses, bool rows) {
    Runs joined;
    if (!rows && uses.size() <= few && join_few(uses, joined)) {
        return joined;
    }
    return join_many(uses, rows);
}

}  // namespace farpool::pager
