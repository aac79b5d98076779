// Pieces of memory that follow each other on the wire or in a segment.
#pragma once

#include <sys/uio.h>

#include <span>

namespace farpool {

using Parts = std::span<const iovec>;

}  // namespace farpool
