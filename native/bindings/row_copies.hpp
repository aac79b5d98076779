// Rows of a paged table, copied to plain memory and back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bindings/pinned.hpp"

// Copies rows of a table, whose elements lie side by side, to plain memory or (`write`) from there: the row at
// `indices[i]` and row i of `memory`. What is touched of a block is acquired at once, and blocks of at most one of
// `groups` parts of the budget together. Where rows are written each is named once. False, and nothing is done, where
// it takes Python.
bool copy_rows(const Pinning& pinning, nb::handle table, nb::object name, std::uintptr_t indices, std::size_t count,
               std::uintptr_t memory, std::int64_t groups, bool write);
