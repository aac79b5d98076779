#include "bindings/row_copies.hpp"

#include <algorithm>
#include <compare>
#include <cstring>
#include <memory>
#include <optional>
#include <vector>

using farpool::pager::Mode;
using farpool::pager::Use;

namespace {

struct Row {
    std::int64_t index;
    std::size_t position;
    auto operator<=>(const Row&) const = default;
};

// The rows of a table in ascending order; empty if an index is outside the table.
std::optional<std::vector<Row>> in_order(const std::int64_t* indices, std::size_t count, std::int64_t rows) {
    std::vector<Row> order(count);
    for (std::size_t at = 0; at < count; ++at) {
        if (indices[at] < 0 || indices[at] >= rows) {
            return std::nullopt;
        }
        order[at] = {indices[at], at};
    }
    if (!std::ranges::is_sorted(order)) {
        std::ranges::sort(order);
    }
    return order;
}

// Rows that are pinned and copied together.
struct Batch {
    std::vector<Use> uses;
    std::vector<std::size_t> ends;  // for each use: end of its rows in the order
    std::size_t last = 0;           // end of the batch in the order
};

// The rows from `first` on whose blocks together have at most `limit` bytes; at least the rows of one block.
Batch next_batch(const Footprint& it, const std::vector<Row>& order, std::size_t first, std::int64_t step, std::int64_t limit,
                 Mode mode) {
    Batch batch{{}, {}, first};
    const std::int64_t row_bytes = it.row_bytes();
    const std::int64_t block_bytes = it.layout->block_bytes;
    std::int64_t total = 0;
    for (; batch.last < order.size(); ++batch.last) {
        const std::int64_t start = it.start + order[batch.last].index * step;
        if (!batch.uses.empty() && start / block_bytes == batch.uses.back().start / block_bytes) {
            batch.uses.back().stop = start + row_bytes;
            batch.ends.back() = batch.last + 1;
            continue;
        }
        const std::int64_t more = ((start + row_bytes - 1) / block_bytes - start / block_bytes + 1) * block_bytes;
        if (!batch.uses.empty() && total + more > limit) {
            break;
        }
        total += more;
        batch.uses.push_back({it.layout, start, start + row_bytes, mode});
        batch.ends.push_back(batch.last + 1);
    }
    return batch;
}

}  // namespace

bool copy_rows(const Pinning& pinning, nb::handle table, nb::object name, std::uintptr_t indices, std::size_t count,
               std::uintptr_t memory, std::int64_t groups, bool write) {
    const nb::object owner = nb::borrow(table);
    Footprint& it = *nb::inst_ptr<Footprint>(table);
    const std::int64_t row_bytes = it.row_bytes();
    if (it.native == nullptr || row_bytes == 0) {
        return false;
    }
    const std::optional<std::vector<Row>> order =
        in_order(reinterpret_cast<const std::int64_t*>(indices), count, nb::cast<std::int64_t>(it.size[0]));
    if (!order) {
        return false;
    }
    const std::int64_t itemsize = nb::cast<std::int64_t>(it.dtype.attr("itemsize"));
    const std::int64_t step = nb::cast<std::int64_t>(it.stride[0]) * itemsize;
    Batch batch;
    for (std::size_t first = 0; first < count; first = batch.last) {
        const std::int64_t limit = nb::cast<std::int64_t>(it.pool.attr("fast")) / groups;  // it may change
        batch = next_batch(it, *order, first, step, limit, write ? Mode::write : Mode::read);
        const std::vector<Use>& uses = batch.uses;
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
        without_lock_if(static_cast<std::int64_t>(batch.last - first) * row_bytes >= worth_unlocking, [&] {
            std::size_t use = 0;
            for (std::size_t at = first; at < batch.last; ++at) {
                use += at == batch.ends[use] ? 1 : 0;
                auto* row = reinterpret_cast<std::byte*>(places[use] +
                                                         static_cast<std::uintptr_t>(it.start + (*order)[at].index * step));
                auto* plain =
                    reinterpret_cast<std::byte*>(memory) + static_cast<std::int64_t>((*order)[at].position) * row_bytes;
                std::memcpy(write ? row : plain, write ? plain : row, static_cast<std::size_t>(row_bytes));
            }
        });
        pinned->release();
    }
    return true;
}
