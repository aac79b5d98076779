// A hash map from 64-bit keys to 32-bit numbers: open addressing with linear probing and without tombstones, so that it stays
// fast after any number of insertions and removals.
#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "core/hash.hpp"

namespace farpool::policy {

class IdMap {
public:
    static constexpr std::uint32_t none = 0xffffffffu;

    IdMap() : cells_(16) {}

    std::uint32_t find(std::uint64_t key) const {
        for (std::size_t at = home(key);; at = next(at)) {
            if (cells_[at].value == none || cells_[at].key == key) {
                return cells_[at].value;
            }
        }
    }
    // Adds a key, which must not be in the map.
    void insert(std::uint64_t key, std::uint32_t value) {
        if (2 * ++size_ > cells_.size()) {
            grow();
        }
        place(key, value);
    }
    // Removes a key; true if it was in the map.
    bool erase(std::uint64_t key) {
        std::size_t hole = home(key);
        while (cells_[hole].key != key || cells_[hole].value == none) {
            if (cells_[hole].value == none) {
                return false;
            }
            hole = next(hole);
        }
        // Later cells move up into the hole, unless that would put them before their home.
        for (std::size_t at = next(hole); cells_[at].value != none; at = next(at)) {
            const std::size_t mask = cells_.size() - 1;
            if (((at - home(cells_[at].key)) & mask) >= ((at - hole) & mask)) {
                cells_[hole] = cells_[at];
                hole = at;
            }
        }
        cells_[hole] = {};
        --size_;
        return true;
    }
    std::size_t size() const noexcept { return size_; }
    std::uint64_t nbytes() const noexcept { return cells_.size() * sizeof(Cell); }

private:
    struct Cell {
        std::uint64_t key = 0;
        std::uint32_t value = none;
    };

    std::size_t home(std::uint64_t key) const { return mix64(key) & (cells_.size() - 1); }
    std::size_t next(std::size_t at) const { return (at + 1) & (cells_.size() - 1); }
    void place(std::uint64_t key, std::uint32_t value) {
        std::size_t at = home(key);
        while (cells_[at].value != none) {
            at = next(at);
        }
        cells_[at] = {key, value};
    }
    void grow() {
        const std::vector<Cell> old = std::exchange(cells_, std::vector<Cell>(2 * cells_.size()));
        for (const Cell& cell : old) {
            if (cell.value != none) {
                place(cell.key, cell.value);
            }
        }
    }

    std::vector<Cell> cells_;
    std::size_t size_ = 0;
};

}  // namespace farpool::policy
