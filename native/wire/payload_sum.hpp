// The checksum of a payload, computed by a second thread of the process while the caller sends it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/helped.hpp"
#include "wire/parts.hpp"

namespace farpool {

// The memory must not change or go away while one of these lives.
class PayloadSum {
public:
    // `parts` follow each other. Several pieces, and a payload that is not to be `helped`, are summed up by the caller alone.
    PayloadSum(Parts parts, std::size_t nbytes, bool helped = true) noexcept;
    ~PayloadSum() { part(); }
    PayloadSum(const PayloadSum&) = delete;
    PayloadSum& operator=(const PayloadSum&) = delete;

    // Sums up a little of a payload that no other thread has; false if there is nothing to do.
    bool go_on() noexcept;
    // Computes what the other thread has not got to.
    std::uint32_t finish() noexcept;

private:
    void work() noexcept;
    void part() noexcept;

    const Parts parts_;
    const std::byte* const data_;  // the payload if it is in one piece, else null
    const std::size_t nbytes_;
    std::size_t done_ = 0;  // like crc_, written by the other thread from when it takes the payload until it has left
    std::uint32_t crc_ = 0;
    std::atomic<bool> enough_ = false;
    bool is_offered_ = false;
    Helped help_{[](void* self) noexcept { static_cast<PayloadSum*>(self)->work(); }, this};
};

}  // namespace farpool
