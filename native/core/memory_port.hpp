// A port over memory of this process.
#pragma once

#include "core/memory.hpp"
#include "core/port.hpp"

namespace farpool {

class MemoryPort : public Port {
public:
    explicit MemoryPort(Memory& memory) : memory_(memory) {}
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    bool copies() const noexcept override { return true; }
    std::byte* address(std::uint64_t offset, std::size_t nbytes) const override;

private:
    Memory& memory_;
};

}  // namespace farpool
