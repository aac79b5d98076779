#include "node/catalogue/records.hpp"

namespace farpool {

void Records::add(std::uint32_t slot, const ObjectHeader& header) {
    if (slot >= shapes_.size()) {
        shapes_.resize(slot + 1);
        free_units_.resize(media_.has_lower() ? slot + 1 : 0);
    }
    Shape& shape = shapes_[slot];
    const std::uint64_t padding = media_.payload_room(index_.at(slot), header.key_nbytes) - header.nbytes;
    shape.last_of_key = static_cast<std::uint8_t>(header.key_nbytes - 1);
    shape.padding = padding % unit_nbytes;
    if (media_.has_lower()) {
        free_units_[slot] = static_cast<std::uint8_t>(padding / unit_nbytes);
    }
    overhead_nbytes_ += overhead_of(slot);
}

std::uint64_t Records::overhead_of(std::uint32_t slot) const {
    const Index::Entry entry = index_.at(slot);
    return std::uint64_t{entry.units} * unit_nbytes - key_nbytes(slot) - (entry.blocks == 0 ? payload_nbytes(slot) : 0);
}

std::uint64_t Records::payload_nbytes(std::uint32_t slot) const {
    const std::uint64_t units = media_.has_lower() ? free_units_[slot] : 0;
    return media_.payload_room(index_.at(slot), key_nbytes(slot)) - units * unit_nbytes - shapes_[slot].padding;
}

std::string_view Records::key(std::uint32_t slot) const {
    return {reinterpret_cast<const char*>(&header(slot) + 1), key_nbytes(slot)};
}

bool Records::is_intact(std::uint32_t slot) const {
    const Index::Entry entry = index_.at(slot);
    const std::uint64_t nbytes = std::uint64_t{entry.units} * unit_nbytes;
    const Head head = copy_head(media_.ram().at(entry.offset), nbytes);
    return head.header.key_nbytes == key_nbytes(slot) && head.header.serial == entry.serial &&
           is_whole(head.header, nbytes, false) && index_.hash(key_of(head.header)) == entry.hash;
}

std::uint32_t Records::find(std::string_view key, std::uint64_t hash) const {
    return index_.find(hash, [&](std::uint32_t slot) { return this->key(slot) == key; });
}

std::uint32_t Records::find_damaged(std::uint64_t hash) const {
    return index_.find(hash, [this](std::uint32_t slot) { return !is_intact(slot); });
}

}  // namespace farpool
