// Bytes that containers have allocated, which may be more than the bytes in use.
#pragma once

#include <cstdint>
#include <deque>
#include <set>
#include <unordered_map>
#include <vector>

namespace farpool::pager {

// Bytes of the allocator and of pointers that each node of a set or map takes in addition to its value.
inline constexpr std::int64_t node_bytes = 48;

template <typename T>
std::int64_t allocated(const std::vector<T>& items) {
    return static_cast<std::int64_t>(items.capacity() * sizeof(T));
}

template <typename T>
std::int64_t allocated(const std::deque<T>& items) {
    return static_cast<std::int64_t>(items.size() * sizeof(T));
}

template <typename T>
std::int64_t allocated(const std::set<T>& items) {
    return static_cast<std::int64_t>(items.size()) * (static_cast<std::int64_t>(sizeof(T)) + node_bytes);
}

template <typename K, typename V>
std::int64_t allocated(const std::unordered_map<K, V>& items) {
    return static_cast<std::int64_t>(items.bucket_count() * sizeof(void*)) +
           static_cast<std::int64_t>(items.size()) * (static_cast<std::int64_t>(sizeof(K) + sizeof(V)) + node_bytes);
}

}  // namespace farpool::pager
