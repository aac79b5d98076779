#include "device/staging.hpp"

#include <utility>

namespace farpool::device {

Staging::Staging(std::shared_ptr<Device> device, std::size_t nbytes)
    : memory_(std::move(device), nbytes), extents_(static_cast<std::int64_t>(nbytes), part_alignment) {}

bool Staging::take(Chunk& chunk) {
    chunk.staging = extents_.alloc(static_cast<std::int64_t>(chunk.nbytes));
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

void Staging::give_back(Chunk& chunk) {
    if (chunk.staging >= 0) {
        extents_.free(std::exchange(chunk.staging, -1));
    }
}

}  // namespace farpool::device
