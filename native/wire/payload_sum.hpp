// The checksum of a payload, computed by a second thread of the process while the caller sends it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "core/helped.hpp"
#include "wire/parts.hpp"

namespace farpool {

// The memory must stay valid and unchanged until the object is destroyed.
class PayloadSum {
public:
    // `parts` follow each other. The second thread helps only with a payload in one piece, and only if `helped`.
    PayloadSum(Parts parts, std::size_t nbytes, bool helped = true) noexcept;
    ~PayloadSum() { part(); }
    PayloadSum(const PayloadSum&) = delete;
    PayloadSum& operator=(const PayloadSum&) = delete;

    // Computes a little of the checksum, if no other thread works on it; false if nothing is left to do.
    bool go_on() noexcept;
    // Computes the rest of the checksum that the other thread has not reached.
    std::uint32_t finish() noexcept;

private:
    void work() noexcept;
    void part() noexcept;

    const Parts parts_;
    const std::byte* const data_;  // the payload if it is in one piece, else null
    const std::size_t nbytes_;
    std::size_t done_ = 0;  // like crc_, written by the other thread while it works on the payload
    std::uint32_t crc_ = 0;
    std::atomic<bool> enough_ = false;
    bool is_offered_ = false;
    Helped help_{[](void* self) noexcept { static_cast<PayloadSum*>(self)->work(); }, this};
};

}  // namespace farpool
