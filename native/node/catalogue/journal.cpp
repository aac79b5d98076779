#include "node/catalogue/journal.hpp"

#include <algorithm>
#include <bit>
#include <utility>

#include "node/files.hpp"

namespace farpool {

namespace {

constexpr std::uint64_t nbytes_min = std::uint64_t{16} << 10;
constexpr std::uint64_t nbytes_max = std::uint64_t{4} << 20;
constexpr std::uint64_t life_mask = (std::uint64_t{1} << 62) - 1;  // readers may have signed numbers

}  // namespace

std::uint64_t Journal::nbytes_for(std::uint64_t capacity) {
    return std::clamp(std::bit_floor(capacity / 256), nbytes_min, nbytes_max);
}

void Journal::begin(std::uint64_t nbytes) {
    const std::size_t count = std::max<std::size_t>(nbytes / (sizeof(Record) + key_nbytes), 4);
    std::vector<Record> records(count);
    keys_.resize(count * key_nbytes);
    records_ = std::move(records);
    life_ = (random_word() & life_mask) | 1;  // never 0, which a reader names that knows none
}

void Journal::add(Change change, std::uint64_t serial, std::string_view key, std::uint64_t nbytes, std::uint64_t expiry,
                  std::uint8_t copies) {
    if (!is_on()) {
        return;
    }
    if (end_ - first_ == records_.size()) {
        ++first_;
    }
    // The new key overwrites the keys of the oldest changes.
    while (first_ < end_ && keys_end_ + key.size() - record(first_).key_at > keys_.size()) {
        ++first_;
    }
    records_[end_ % records_.size()] = {serial, nbytes, expiry, keys_end_, static_cast<std::uint16_t>(key.size()),
                                        change, copies};
    const std::size_t at = keys_end_ % keys_.size();
    const std::size_t step = std::min(key.size(), keys_.size() - at);
    std::copy_n(key.data(), step, keys_.data() + at);
    std::copy_n(key.data() + step, key.size() - step, keys_.data());
    keys_end_ += key.size();
    ++end_;
}

Changed Journal::at(std::uint64_t number) const {
    const Record& found = record(number);
    std::string key(found.key_nbytes, '\0');
    const std::size_t at = found.key_at % keys_.size();
    const std::size_t step = std::min(key.size(), keys_.size() - at);
    std::copy_n(keys_.data() + at, step, key.data());
    std::copy_n(keys_.data(), key.size() - step, key.data() + step);
    return {found.change, found.serial, std::move(key), found.nbytes, found.expiry, found.copies};
}

}  // namespace farpool
