#include "node/catalogue/visits.hpp"

#include <algorithm>
#include <atomic>
#include <bit>

namespace farpool {

namespace {

constexpr std::uint64_t area_nbytes_min = 4096;
constexpr std::uint64_t area_nbytes_max = std::uint64_t{4} << 20;
constexpr std::uint64_t capacity_per_mark = 1024;  // several objects share a mark if they are smaller

}  // namespace

Visits::Visits(const SegmentHeader& index, std::uint64_t capacity)
    : area_nbytes_(std::clamp(std::bit_ceil(capacity / capacity_per_mark), area_nbytes_min, area_nbytes_max)) {
    std::memcpy(header_.id, index.id, sizeof header_.id);
    header_.tenant = index.tenant;
    header_.kind = static_cast<std::uint32_t>(SegmentKind::visited);
    header_.capacity = index.slot_limit;
    own_ = make_nameless_segment("farpool-visited", header_);
    header_.capacity = area_nbytes_;
}

bool Visits::back(std::uint64_t slot) {
    if (slot >= backed_) {
        const std::uint64_t slots = std::min(slot + backing_slots, own_.nbytes());
        if (!farpool::back(own_, segment_header_nbytes + backed_, slots - backed_)) {
            return false;
        }
        backed_ = slots;
    }
    return true;
}

int Visits::open(std::uint64_t session) {
    auto found = sessions_.find(session);
    if (found == sessions_.end()) {
        areas_.reserve(areas_.size() + 1);
        found = sessions_.emplace(session, make_nameless_segment("farpool-visited-by-session", header_)).first;
        areas_.push_back({found->second.memory.at<std::uint8_t>(segment_header_nbytes), area_nbytes_ - 1});
    }
    return found->second.file.duplicate();
}

void Visits::end(std::uint64_t session, std::uint64_t slots) {
    const auto found = sessions_.find(session);
    if (found == sessions_.end()) {
        return;
    }
    auto* const bytes = found->second.memory.at<std::uint8_t>(segment_header_nbytes);
    auto* const own = own_.memory.at<std::uint8_t>(segment_header_nbytes);
    for (std::uint64_t mark = 0; mark < std::min(area_nbytes_, slots); ++mark) {
        if (std::atomic_ref(bytes[mark]).load(std::memory_order_relaxed) != 0) {
            for (std::uint64_t slot = mark; slot < slots; slot += area_nbytes_) {
                own[slot] = 1;
            }
        }
    }
    std::erase_if(areas_, [&](const policy::Marks::Area& area) { return area.bytes == bytes; });
    sessions_.erase(found);
}

}  // namespace farpool
