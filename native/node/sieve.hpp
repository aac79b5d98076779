// SIEVE (Zhang et al., NSDI 2024): a queue in order of insertion and a hand that passes over what was visited since it came by.
// Visits are marks in shared memory, so that readers of mapped objects are seen without a message.
#pragma once

#include <atomic>
#include <cstdint>
#include <optional>
#include <vector>

namespace farpool {

class Sieve {
public:
    explicit Sieve(std::atomic<std::uint8_t>* visited) : visited_(visited) {}

    void insert(std::uint32_t slot);
    void remove(std::uint32_t slot);
    bool visited(std::uint32_t slot) const { return visited_[slot].load(std::memory_order_relaxed) != 0; }
    void visit(std::uint32_t slot) { visited_[slot].store(1, std::memory_order_relaxed); }
    // The next to go, which stays in the queue; passes over those that `held` says are in use. Empty where all are.
    template <typename Held>
    std::optional<std::uint32_t> victim(Held held);
    std::size_t size() const noexcept { return size_; }

private:
    static constexpr std::uint32_t none = 0xffffffffu;
    struct Link {
        std::uint32_t newer = none;
        std::uint32_t older = none;
    };

    std::atomic<std::uint8_t>* visited_;
    std::vector<Link> links_;
    std::uint32_t newest_ = none;
    std::uint32_t oldest_ = none;
    std::uint32_t hand_ = none;
    std::size_t size_ = 0;
};

template <typename Held>
std::optional<std::uint32_t> Sieve::victim(Held held) {
    // Two turns: the first may only clear marks. Readers may set new ones meanwhile, so a third turn takes what it finds.
    for (std::size_t step = 0; step < 3 * size_; ++step) {
        if (hand_ == none) {
            hand_ = oldest_;
        }
        const std::uint32_t slot = hand_;
        const bool visited = visited_[slot].exchange(0, std::memory_order_relaxed) != 0;
        if (!held(slot) && (!visited || step >= 2 * size_)) {
            return slot;
        }
        hand_ = links_[slot].newer;
    }
    return std::nullopt;
}

}  // namespace farpool
