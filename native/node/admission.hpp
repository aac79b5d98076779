// Whether a node takes new objects and leases, and lets programs change its objects.
//
// Two have a say: an administrator, whose order lasts until the process ends, and the record of the node in the registry of its
// pool, which says whether the member drains. The stricter one counts.
#pragma once

#include <algorithm>
#include <cstdint>

namespace farpool {

enum class NodeState : std::uint8_t { active = 0, draining = 1, read_only = 2 };

class Admission {
public:
    void order(NodeState state) noexcept { ordered_ = state; }
    void follow_record(bool draining) noexcept { recorded_ = draining ? NodeState::draining : NodeState::active; }

    NodeState ordered() const noexcept { return ordered_; }
    NodeState state() const noexcept { return std::max(ordered_, recorded_); }
    bool takes_new() const noexcept { return state() == NodeState::active; }
    bool allows_changes() const noexcept { return state() != NodeState::read_only; }
    // Why a new object or lease is refused. Programs go to another node, as for one that has no room.
    const char* refusal() const noexcept {
        return allows_changes() ? "the node is draining: it takes no new objects and leases"
                                : "the node is read-only: it takes no new objects and leases";
    }
    static constexpr const char* unchangeable = "the node is read-only: its objects cannot be changed or dropped";

private:
    NodeState ordered_ = NodeState::active;
    NodeState recorded_ = NodeState::active;
};

}  // namespace farpool
