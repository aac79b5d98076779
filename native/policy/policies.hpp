// All policies, by name, for simulations.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "policy/policy.hpp"

namespace farpool::policy {

// Names of all policies, in the order in which tables show them.
std::span<const std::string_view> names();
// Makes a policy. `capacity`: of the cache, in the unit of the sizes. Throws where there is no such policy.
std::unique_ptr<Policy> make(std::string_view name, std::uint64_t capacity);

}  // namespace farpool::policy
