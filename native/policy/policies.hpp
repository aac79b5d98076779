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
// Name of the policy by which nodes evict. It is not in `names`, because it is made for marks and no other library has it.
constexpr std::string_view of_nodes = "node";
// Makes a policy of `names` or the policy of nodes. `capacity`: of the cache, in the unit of the sizes. Throws if there is no
// such policy.
std::unique_ptr<Policy> make(std::string_view name, std::uint64_t capacity);

}  // namespace farpool::policy
