// All policies, by name, as simulations want them.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "policy/policy.hpp"

namespace farpool::policy {

// In the order in which tables show them.
std::span<const std::string_view> names();
// `capacity`: of the cache, in the unit of the sizes. Throws where there is no such policy.
std::unique_ptr<Policy> make(std::string_view name, std::uint64_t capacity);

}  // namespace farpool::policy
