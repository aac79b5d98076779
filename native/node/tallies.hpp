// Tallies of a node: bytes and requests, times of each operation, and refusals to each tenant.
#pragma once

#include <array>
#include <bit>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>

#include "wire/frame.hpp"

namespace farpool {

// Times of one operation in buckets. Each bucket ends at twice the time of the bucket before it.
struct Latencies {
    static constexpr std::size_t buckets = 25;
    static constexpr std::uint64_t first_ns = 1024;  // end of the first bucket; the last one ends after 17 s

    std::array<std::uint64_t, buckets + 1> counts{};  // one for each bucket, and the last for longer times
    std::uint64_t sum_ns = 0;

    void add(std::uint64_t ns) noexcept {
        const auto bucket = static_cast<std::size_t>(std::bit_width((ns - (ns > 0 ? 1 : 0)) / first_ns));
        ++counts[bucket < buckets ? bucket : buckets];
        sum_ns += ns;
    }
    static constexpr double end_s(std::size_t bucket) noexcept { return static_cast<double>(first_ns << bucket) / 1e9; }
};

struct Counts {
    std::uint64_t puts = 0, drops = 0, bytes_in = 0, bytes_out = 0, checksum_errors = 0, bad_frames = 0;
};

class Tallies {
public:
    using Refusals = std::map<std::uint16_t, std::uint64_t>;  // by status

    // Counts a reply that has been sent.
    void add(const FrameHeader& reply, std::chrono::steady_clock::duration took) {
        const auto status = static_cast<Status>(reply.status);
        if (status == Status::taken) {  // progress of a request, and not its reply
            return;
        }
        latencies_[reply.op].add(static_cast<std::uint64_t>(std::chrono::nanoseconds(took).count()));
        if (status != Status::done && status != Status::missing && status != Status::present) {
            ++refusals_[reply.tenant][reply.status];
        }
    }
    void add_in(std::uint64_t nbytes) noexcept { counts_.bytes_in += nbytes; }
    void add_out(std::uint64_t nbytes) noexcept { counts_.bytes_out += nbytes; }
    void add_put() noexcept { ++counts_.puts; }
    void add_drop() noexcept { ++counts_.drops; }
    void add_checksum_error() noexcept { ++counts_.checksum_errors; }
    void add_bad_frame() noexcept { ++counts_.bad_frames; }

    const Counts& counts() const noexcept { return counts_; }
    // By operation, if it had a reply. A request of an unknown operation has an entry under its number.
    std::map<std::uint8_t, Latencies> latencies() const {
        std::map<std::uint8_t, Latencies> found;
        for (std::size_t op = 0; op < latencies_.size(); ++op) {
            if (latencies_[op].counts != Latencies{}.counts) {
                found.emplace(static_cast<std::uint8_t>(op), latencies_[op]);
            }
        }
        return found;
    }
    const std::map<std::uint32_t, Refusals>& refusals() const noexcept { return refusals_; }

private:
    Counts counts_;
    std::array<Latencies, 256> latencies_{};
    std::map<std::uint32_t, Refusals> refusals_;  // by tenant
};

}  // namespace farpool
