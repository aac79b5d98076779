#include "node/catalogue/media.hpp"

namespace farpool {

bool Media::adopt(const Index::Entry& entry) {
    if (!ram_.adopt(entry.offset, entry.units)) {
        return false;
    }
    if (entry.blocks != 0 && !lower_->adopt(entry.block, entry.blocks)) {
        ram_.release(entry.offset, entry.units);
        return false;
    }
    room_.take(entry.units);
    return true;
}

void Media::release_units(std::uint64_t offset, std::uint32_t units) {
    ram_.release(offset, units);
    if (moves_.erase(offset) > 0) {
        room_.end_move(units);
    } else {
        room_.release(units);
    }
}

}  // namespace farpool
