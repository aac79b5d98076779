#include "pager/strides.hpp"

namespace farpool::pager {

void Strides::Stretch::add(std::int64_t step) {
    if (steps_.size() < length_) {
        steps_.push_back(step);
    } else {
        steps_[oldest_] = step;
        oldest_ = (oldest_ + 1) % length_;
    }
    // Only the step just added can have become the majority.
    if (2 * count(step) > length_) {
        majority_ = step;
    } else if (2 * count(majority_) <= length_) {
        majority_ = 0;
    }
}

void Strides::record(std::int64_t name, std::int32_t count) {
    const std::int64_t step = name - last_;
    last_ = name + count - 1;
    foretold_ = step != 0 && step == stride_;
    stride_ = 0;
    for (Stretch& stretch : stretches_) {
        stretch.add(step);
        if (stride_ == 0) {
            stride_ = stretch.majority();
        }
    }
}

std::vector<std::int64_t> Strides::coming(int count) const {
    std::vector<std::int64_t> names;
    for (int ahead = 1; stride_ != 0 && ahead <= count; ++ahead) {
        names.push_back(last_ + stride_ * ahead);
    }
    return names;
}

}  // namespace farpool::pager
