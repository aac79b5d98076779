#include "core/memory_port.hpp"

#include <cstring>
#include <string>

namespace farpool {

std::byte* MemoryPort::address(std::uint64_t offset, std::size_t nbytes) const {
    if (memory_.data() == nullptr) {
        fail_closed("the memory behind this port was released");
    }
    if (offset > memory_.nbytes() || nbytes > memory_.nbytes() - offset) {
        fail_value("offset " + std::to_string(offset) + " and " + std::to_string(nbytes) +
                   " bytes lie outside of the memory of " + std::to_string(memory_.nbytes()) + " bytes");
    }
    return memory_.data() + offset;
}

void MemoryPort::read(std::uint64_t offset, void* into, std::size_t nbytes) {
    std::memcpy(into, address(offset, nbytes), nbytes);
}

void MemoryPort::write(std::uint64_t offset, const void* from, std::size_t nbytes) {
    std::memcpy(address(offset, nbytes), from, nbytes);
}

}  // namespace farpool
