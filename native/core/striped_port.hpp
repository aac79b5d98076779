// A port that spreads bytes over several ports in stripes, and lets all of them work at the same time.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/port.hpp"

namespace farpool {

// Stripe s of the space belongs to port s % n. There are two ways to find its bytes in that port. Without `placed` each port is
// one range of `share` bytes, which holds its stripes one after the other. With `placed` each extent is told by place(), with
// the offset of each of its pieces; so the ports may belong to any tiers, which only move whole extents.
class StripedPort : public Port {
public:
    StripedPort(std::string name, std::vector<Port*> ports, std::uint64_t stripe, std::uint64_t share, bool placed);
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    unsigned concurrency() const noexcept override;
    bool copies() const noexcept override;
    bool serves_faults() const noexcept override;

    // Sets where the pieces of the extent at `offset` are in their ports, in order.
    void place(std::uint64_t offset, std::vector<std::uint64_t> pieces);
    void forget(std::uint64_t offset);

private:
    struct Part {
        std::size_t port;
        Piece piece;
    };
    class Blocking;
    using Begun = std::vector<std::unique_ptr<Transfer>>;

    std::vector<Part> cut(std::uint64_t offset, std::byte* memory, std::size_t nbytes) const;
    void set_places(std::uint64_t offset, std::vector<Part>& parts) const;
    void transfer(Direction direction, std::uint64_t offset, std::byte* memory, std::size_t nbytes);
    void exchange(Direction direction, const std::vector<Part>& parts, const Begun& begun) const;
    void move_part(Direction direction, const Part& part) const;

    const std::string name_;
    const std::vector<Port*> ports_;
    const std::uint64_t stripe_;
    const std::uint64_t share_;
    const bool placed_;
    mutable std::mutex mutex_;
    std::unordered_map<std::uint64_t, std::vector<std::uint64_t>> places_;
};

}  // namespace farpool
