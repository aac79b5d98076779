#include "wire/payload_sum.hpp"

#include <algorithm>

#include "core/crc32c.hpp"

namespace farpool {

namespace {

// After each step the other thread checks if it must stop, so a caller waits for one step at most.
constexpr std::size_t step_nbytes = std::size_t{64} << 10;

}  // namespace

PayloadSum::PayloadSum(Parts parts, std::size_t nbytes, bool helped) noexcept
    : parts_(parts), data_(parts.size() == 1 ? static_cast<const std::byte*>(parts[0].iov_base) : nullptr), nbytes_(nbytes) {
    is_offered_ = helped && nbytes >= Helped::worth_it && data_ != nullptr && help_.offer();
}

std::uint32_t PayloadSum::finish() noexcept {
    part();
    if (data_ != nullptr) {
        crc_ = crc32c(data_ + done_, nbytes_ - done_, crc_);
    } else if (done_ < nbytes_) {
        for (const iovec& part : parts_) {
            crc_ = crc32c(part.iov_base, part.iov_len, crc_);
        }
    }
    done_ = nbytes_;
    return crc_;
}

bool PayloadSum::go_on() noexcept {
    if (is_offered_ || data_ == nullptr || done_ == nbytes_) {
        return false;
    }
    const std::size_t step = std::min(step_nbytes, nbytes_ - done_);
    crc_ = crc32c(data_ + done_, step, crc_);
    done_ += step;
    return true;
}

// Waits until the other thread no longer reads the payload.
void PayloadSum::part() noexcept {
    enough_.store(true, std::memory_order_relaxed);
    help_.end();
    is_offered_ = false;
}

void PayloadSum::work() noexcept {
    while (done_ < nbytes_ && !enough_.load(std::memory_order_relaxed)) {
        const std::size_t step = std::min(step_nbytes, nbytes_ - done_);
        crc_ = crc32c(data_ + done_, step, crc_);
        done_ += step;
    }
}

}  // namespace farpool
