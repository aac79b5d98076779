// Rows of a paged table, copied to plain memory and back.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bindings/pinned.hpp"

// Copies rows of a table, whose elements are contiguous, to plain memory or (`write`) from there: the row at `indices[i]` and
// row i of `memory`. All rows of a block are acquired at once, and blocks of at most one of `groups` parts of the budget
// together. If rows are written, each index occurs once. False, and nothing is done, if Python has to do it.
bool copy_rows(const Pinning& pinning, nb::handle table, nb::object name, std::uintptr_t indices, std::size_t count,
               std::uintptr_t memory, std::int64_t groups, bool write);
