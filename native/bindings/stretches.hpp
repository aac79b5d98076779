// Lists of tensors, cut so that each part fits into the budget.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bindings/torch_face.hpp"

// Cuts lists of `count` items into stretches. The tensors of one take at most one of `share` parts of the budget, and the
// blocks in which they lie at most one of `pinned` parts; or it has one item of each list.
nb::list stretches(const Torch& torch, const nb::list& lists, std::size_t count, std::int64_t share, std::int64_t pinned);
