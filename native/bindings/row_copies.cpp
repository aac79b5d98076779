#include "bindings/row_copies.hpp"

#include <algorithm>
#include <compare>
#include <cstring>
#include <memory>
#include <vector>

using farpool::pager::Mode;
using farpool::pager::Use;

namespace {

struct Row {
    std::int64_t index;
    std::size_t position;
    auto operator<=>(const Row&) const = default;
};

}  // namespace

bool copy_rows(const Pinning& pinning, nb::handle table, nb::object name, std::uintptr_t indices, std::size_t count,
               std::uintptr_t memory, std::int64_t groups, bool write) {
    const nb::object held = nb::borrow(table);
    Footprint& it = *nb::inst_ptr<Footprint>(table);
    const std::int64_t row_bytes = it.row_bytes();
    if (it.native == nullptr || row_bytes == 0) {
        return false;
    }
    const auto* given = reinterpret_cast<const std::int64_t*>(indices);
    const auto rows = nb::cast<std::int64_t>(it.size[0]);
    std::vector<Row> order(count);
    for (std::size_t at = 0; at < count; ++at) {
        if (given[at] < 0 || given[at] >= rows) {
            return false;
        }
        order[at] = {given[at], at};
    }
    if (!std::ranges::is_sorted(order)) {
        std::ranges::sort(order);
    }
    const std::int64_t itemsize = nb::cast<std::int64_t>(it.dtype.attr("itemsize"));
    const std::int64_t step = nb::cast<std::int64_t>(it.stride[0]) * itemsize;
    std::vector<Use> uses;
    std::vector<std::size_t> ends;  // of the rows that lie in each use
    for (std::size_t first = 0, last = 0; first < count; first = last) {
        uses.clear();
        ends.clear();
        std::int64_t total = 0;
        const std::int64_t limit = nb::cast<std::int64_t>(it.pool.attr("fast")) / groups;  // it may change
        for (; last < count; ++last) {
            const std::int64_t start = it.start + order[last].index * step;
            const std::int64_t block_bytes = it.layout->block_bytes;
            if (!uses.empty() && start / block_bytes == uses.back().start / block_bytes) {
                uses.back().stop = start + row_bytes;
                ends.back() = last + 1;
                continue;
            }
            const std::int64_t more = ((start + row_bytes - 1) / block_bytes - start / block_bytes + 1) * block_bytes;
            if (!uses.empty() && total + more > limit) {
                break;
            }
            total += more;
            uses.push_back({it.layout, start, start + row_bytes, write ? Mode::write : Mode::read});
            ends.push_back(last + 1);
        }
        const auto bound_uses = [&] {
            nb::list bound;
            for (const Use& use : uses) {
                bound.append(BoundUse{it.storage, use});
            }
            return bound;
        };
        std::unique_ptr<Pinned> pinned;
        try {
            pinned = pinning.pin(it, uses, bound_uses, name, true, false);
        } catch (nb::python_error& error) {
            if (write && first != 0) {
                error.value().attr("add_note")(
                    nb::str("{} had changed {} rows already; do not simply try it again").attr("format")(name, first));
            }
            throw;
        }
        std::vector<std::uintptr_t> places;
        places.reserve(uses.size());
        for (std::size_t use = 0; use < uses.size(); ++use) {
            places.push_back(it.arena_start + static_cast<std::uintptr_t>(pinned->offset(use) - uses[use].start));
        }
        without_lock_if(static_cast<std::int64_t>(last - first) * row_bytes >= worth_unlocking, [&] {
            std::size_t use = 0;
            for (std::size_t at = first; at < last; ++at) {
                use += at == ends[use] ? 1 : 0;
                auto* row =
                    reinterpret_cast<std::byte*>(places[use] + static_cast<std::uintptr_t>(it.start + order[at].index * step));
                auto* plain = reinterpret_cast<std::byte*>(memory) + static_cast<std::int64_t>(order[at].position) * row_bytes;
                std::memcpy(write ? row : plain, write ? plain : row, static_cast<std::size_t>(row_bytes));
            }
        });
        pinned->release();
    }
    return true;
}
