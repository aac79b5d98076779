#include "policy/policies.hpp"

#include <algorithm>
#include <array>

#include "policy/arc.hpp"
#include "policy/belady.hpp"
#include "policy/clock.hpp"
#include "policy/gdsf.hpp"
#include "policy/lirs.hpp"
#include "policy/lru.hpp"
#include "policy/marked_reuse.hpp"
#include "policy/s3_fifo.hpp"
#include "policy/sieve.hpp"
#include "policy/w_tiny_lfu.hpp"

namespace farpool::policy {

namespace {

// Bytes of the frequency sketch for each object: many, because simulations judge the policy and not its approximation.
constexpr std::size_t offline_counters = 512;

using Make = std::unique_ptr<Policy> (*)(std::uint64_t);

constexpr std::array<std::string_view, 9> all_names = {"lru",  "clock", "sieve",      "s3-fifo", "arc",
                                                       "lirs", "gdsf",  "w-tiny-lfu", "belady"};
constexpr std::array<Make, 9> makers = {
    [](std::uint64_t) -> std::unique_ptr<Policy> { return std::make_unique<Lru>(); },
    [](std::uint64_t) -> std::unique_ptr<Policy> { return std::make_unique<Clock>(); },
    [](std::uint64_t) -> std::unique_ptr<Policy> { return std::make_unique<Sieve>(); },
    [](std::uint64_t capacity) -> std::unique_ptr<Policy> { return std::make_unique<S3Fifo>(capacity); },
    [](std::uint64_t capacity) -> std::unique_ptr<Policy> { return std::make_unique<Arc>(capacity); },
    [](std::uint64_t capacity) -> std::unique_ptr<Policy> { return std::make_unique<Lirs>(capacity); },
    [](std::uint64_t) -> std::unique_ptr<Policy> { return std::make_unique<Gdsf>(); },
    [](std::uint64_t capacity) -> std::unique_ptr<Policy> { return std::make_unique<WTinyLfu>(capacity, offline_counters); },
    [](std::uint64_t) -> std::unique_ptr<Policy> { return std::make_unique<Belady>(); },
};

}  // namespace

std::span<const std::string_view> names() { return all_names; }

std::unique_ptr<Policy> make(std::string_view name, std::uint64_t capacity) {
    if (name == of_nodes) {
        return std::make_unique<MarkedReuse>();
    }
    const auto found = std::ranges::find(all_names, name);
    if (found == all_names.end()) {
        fail_value("policy '" + std::string(name) + "' is not known");
    }
    return makers[static_cast<std::size_t>(found - all_names.begin())](capacity);
}

}  // namespace farpool::policy
