#include "device/staging.hpp"

#include <utility>

namespace farpool::device {

Staging::Staging(std::shared_ptr<Device> device, std::size_t nbytes, std::size_t chunk)
    : memory_(std::move(device), nbytes),
      extents_(static_cast<std::int64_t>(nbytes), part_alignment),
      kept_(nbytes / 2 < chunk ? -1 : extents_.alloc(static_cast<std::int64_t>(rounded(chunk)))),
      kept_at_(kept_) {}

bool Staging::take(Chunk& chunk) {
    extents_.make_room();  // so that the memory can be given back without memory
    chunk.staging = extents_.alloc(static_cast<std::int64_t>(chunk.nbytes));
    if (chunk.staging < 0 && chunk.job->urgent()) {
        chunk.staging = std::exchange(kept_, -1);
    }
    if (chunk.staging < 0) {
        return false;
    }
    std::uintptr_t host = memory_.address() + static_cast<std::uintptr_t>(chunk.staging);
    for (Part& part : chunk.parts) {
        part.host = host;
        host += rounded(part.nbytes);
    }
    return true;
}

void Staging::give_back(Chunk& chunk) noexcept {
    const std::int64_t offset = std::exchange(chunk.staging, -1);
    if (offset >= 0 && offset == kept_at_) {
        kept_ = offset;
    } else if (offset >= 0) {
        extents_.free(offset);
    }
}

}  // namespace farpool::device
