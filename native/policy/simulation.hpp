// A simulated cache of a given size under a policy, which counts the misses of a trace of requests.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "policy/id_map.hpp"
#include "policy/policy.hpp"
#include "policy/trace.hpp"

namespace farpool::policy {

struct Counts {
    std::uint64_t requests = 0;
    std::uint64_t misses = 0;
    std::uint64_t bytes = 0;
    std::uint64_t bytes_missed = 0;
};

class Simulation {
public:
    Simulation(std::unique_ptr<Policy> policy, std::uint64_t capacity) : policy_(std::move(policy)), capacity_(capacity) {}

    // Runs the requests [first, last) of the trace. An object keeps the size of its first request; an object larger than the
    // cache is a miss and is not inserted.
    void run(const Trace& trace, std::size_t first, std::size_t last);
    const Counts& counts() const noexcept { return counts_; }

private:
    struct Object {
        std::uint64_t key;
        std::uint64_t size;
    };

    void bring_in(const Item& item);

    std::unique_ptr<Policy> policy_;
    std::uint64_t capacity_;
    std::uint64_t used_ = 0;
    IdMap slots_;
    std::vector<Object> objects_;  // by slot
    std::vector<Slot> free_;
    Counts counts_;
};

}  // namespace farpool::policy
