#include "pager/retention.hpp"

#include <algorithm>
#include <cmath>

namespace farpool::pager {

namespace {

constexpr double sharpness = 4.0;

}  // namespace

bool Retention::keeps(std::int64_t nbytes, std::int64_t distance, std::int64_t turn) {
    const auto size = static_cast<double>(nbytes);
    const auto far = static_cast<double>(distance);
    const double weight = turn != 0 ? std::min(1.0, size / static_cast<double>(turn)) : 1.0;
    const bool near = distance <= room_;
    covered_.note(near ? far : 0.0, weight);
    long_.note(near ? 0.0 : 1.0, weight);
    if (near) {
        return true;
    }
    const double among_long = std::min(1.0, weight / long_.value);
    distance_.note(far, among_long);
    const double nearness = std::pow(distance_.value / far, sharpness);
    scale_.note(nearness, among_long);
    const double room = std::max(0.0, static_cast<double>(room_) - covered_.value) / long_.value;
    const double share = std::min(1.0, room * nearness / (scale_.value * far));
    largest_ = std::max(largest_, size);
    owed_ = std::min(owed_ + share * size, 2 * largest_);
    if (owed_ < size / 2) {
        return false;
    }
    owed_ -= size;
    return true;
}

}  // namespace farpool::pager
