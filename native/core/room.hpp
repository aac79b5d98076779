// Room that is made before a change, so that the change itself cannot fail for lack of memory.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace farpool {

// Makes room for `size` elements in all. The memory at least doubles each time, so many calls cost no more than appending.
template <typename Element>
void make_room(std::vector<Element>& elements, std::size_t size) {
    if (size > elements.capacity()) {
        elements.reserve(std::max(size, 2 * elements.capacity()));
    }
}

}  // namespace farpool
