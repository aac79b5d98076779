#include "pager/block_table.hpp"

#include <algorithm>
#include <string>

#include "core/error.hpp"

namespace farpool::pager {

namespace {

constexpr std::int64_t first_capacity = 1024;
constexpr std::int64_t growth = 8;  // a full table grows by one part in this many, because unused entries take memory too

}  // namespace

BlockTable::BlockTable() : numbers_(first_capacity, 1), names_(first_capacity, 1) {
    blocks_.resize(static_cast<std::size_t>(first_capacity));
}

BlockId BlockTable::create(std::span<const std::int64_t> sizes, int cls) {
    const auto count = static_cast<std::int64_t>(sizes.size());
    std::int64_t first = numbers_.alloc_lowest(count);
    if (first < 0) {
        const auto capacity = static_cast<std::int64_t>(blocks_.size());
        const std::int64_t enlarged = capacity + std::max(capacity / growth, count);
        blocks_.reserve(static_cast<std::size_t>(enlarged));  // exactly: doubling would hold memory that is never used
        blocks_.resize(static_cast<std::size_t>(enlarged));
        numbers_.grow(enlarged);
        first = numbers_.alloc_lowest(count);
    }
    std::int64_t name = names_.alloc_lowest(count);
    if (name < 0) {
        names_.grow(names_.capacity() + std::max(names_.capacity() / growth, count));
        name = names_.alloc_lowest(count);
    }
    if (name + count > static_cast<std::int64_t>(named_.size())) {
        named_.reserve(static_cast<std::size_t>(names_.capacity()));
        named_.resize(static_cast<std::size_t>(names_.capacity()), -1);
    }
    for (std::int64_t ordinal = 0; ordinal < count; ++ordinal) {
        Block& block = blocks_[static_cast<std::size_t>(first + ordinal)];
        block = Block{};
        block.size = sizes[static_cast<std::size_t>(ordinal)];
        block.cls = static_cast<std::int8_t>(cls);
        block.state = State::absent;
        block.name = static_cast<std::int32_t>(name + ordinal);
        named_[static_cast<std::size_t>(name + ordinal)] = static_cast<BlockId>(first + ordinal);
    }
    return static_cast<BlockId>(first);
}

void BlockTable::retire(BlockId first, std::int32_t count) {
    const std::int32_t name = (*this)[first].name;
    std::fill_n(named_.begin() + name, count, -1);
    names_.free(name);
}

void BlockTable::forget(BlockId first, std::int32_t count) {
    for (BlockId block = first; block < first + count; ++block) {
        (*this)[block].state = State::free;
    }
    numbers_.free(first);
}

BlockId BlockTable::named(std::int64_t name) const {
    return name >= 0 && name < static_cast<std::int64_t>(named_.size()) ? named_[static_cast<std::size_t>(name)] : -1;
}

void BlockTable::require_used(BlockId first, std::int32_t count) const {
    const auto end = static_cast<std::int64_t>(first) + count;
    bool used = first >= 0 && count > 0 && end <= static_cast<std::int64_t>(blocks_.size());
    for (BlockId block = first; used && block < end; ++block) {
        used = (*this)[block].state != State::free;
    }
    if (!used) {
        fail_value("Pager: blocks " + std::to_string(first) + " to " + std::to_string(end - 1) + " are not all in use");
    }
}

std::vector<BlockId> BlockTable::used() const {
    std::vector<BlockId> numbers;
    for (const auto& [offset, count] : numbers_.ranges()) {
        for (std::int64_t block = offset; block < offset + count; ++block) {
            numbers.push_back(static_cast<BlockId>(block));
        }
    }
    return numbers;
}

}  // namespace farpool::pager
