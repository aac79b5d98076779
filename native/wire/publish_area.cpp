#include "wire/publish_area.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "core/crc32c.hpp"

namespace farpool {

namespace {

// Bytes filled at once: the node copies one step while the next is being filled.
constexpr std::uint64_t step_nbytes = std::uint64_t{128} << 10;

}  // namespace

bool PublishArea::open(int file) noexcept {
    struct stat status{};
    if (file < 0) {
        return false;
    }
    if (fstat(file, &status) == 0 && static_cast<std::uint64_t>(status.st_size) > segment_header_nbytes) {
        const auto nbytes = static_cast<std::uint64_t>(status.st_size);
        try {
            Mapping mapped(file, nbytes, true);
            if (segment_fault(*mapped.at<SegmentHeader>(0), nbytes, SegmentKind::area) == nullptr) {
                memory_ = std::move(mapped);
            }
        } catch (const std::system_error&) {  // payloads go over the socket instead
        }
    }
    ::close(file);
    return is_open();
}

AreaPart PublishArea::fill(Parts payload, std::size_t done, std::size_t nbytes, std::uint32_t& crc) noexcept {
    const std::uint64_t in_use = filled_ - taken_;
    const std::uint64_t at = filled_ % this->nbytes();
    const std::uint64_t room = in_use < this->nbytes() ? std::min(this->nbytes() - in_use, this->nbytes() - at) : 0;
    AreaPart part{static_cast<std::uint32_t>(at), static_cast<std::uint32_t>(std::min({room, nbytes - done, step_nbytes}))};
    std::byte* to = memory_.data() + segment_header_nbytes + at;
    std::size_t left = part.nbytes;
    std::size_t skip = done;
    for (auto piece = payload.begin(); left > 0; skip -= std::min(skip, piece->iov_len), ++piece) {
        const std::size_t step = piece->iov_len > skip ? std::min(piece->iov_len - skip, left) : 0;
        crc = copy_crc32c(to, static_cast<const std::byte*>(piece->iov_base) + std::min(skip, piece->iov_len), step, crc);
        to += step;
        left -= step;
    }
    filled_ += done + part.nbytes == nbytes ? taken_by(nbytes) - done : part.nbytes;
    return part;
}

void PublishArea::taken(std::uint64_t position) noexcept { taken_ = std::max(taken_, std::min(position, filled_)); }

}  // namespace farpool
