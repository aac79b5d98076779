// Numbers in the meta part of frames: as they are in memory, one after the other.
#pragma once

#include <cstddef>
#include <cstring>
#include <string>
#include <vector>

namespace farpool {

template <typename T>
T number_at(const std::vector<std::byte>& meta, std::size_t offset) {
    T value{};
    std::memcpy(&value, meta.data() + offset, sizeof value);
    return value;
}

template <typename... T>
std::string packed(T... values) {
    std::string meta;
    (meta.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
    return meta;
}

}  // namespace farpool
