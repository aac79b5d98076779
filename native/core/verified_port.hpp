// A port that keeps the CRC32C of each extent from its write and verifies it at its read.
#pragma once

#include <mutex>
#include <string>
#include <unordered_map>

#include "core/port.hpp"

namespace farpool {

class VerifiedPort : public Port {
public:
    VerifiedPort(Port& inner, std::string name) : inner_(inner), name_(std::move(name)) {}
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    unsigned concurrency() const noexcept override { return inner_.concurrency(); }
    bool serves_faults() const noexcept override { return false; }  // a part of an extent cannot be verified
    void forget(std::uint64_t offset);
    std::size_t tracked() const;

private:
    struct Sum {
        std::size_t nbytes;
        std::uint32_t crc;
    };

    Port& inner_;
    std::string name_;
    mutable std::mutex mutex_;
    std::unordered_map<std::uint64_t, Sum> sums_;
};

}  // namespace farpool
