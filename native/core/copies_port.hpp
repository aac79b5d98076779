// A port over several ports that hold the same bytes: a write goes to all of them, a read to one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/port.hpp"

namespace farpool {

// A copy whose transfer fails while another copy's succeeds is out of use: it may lack bytes, so nothing is read from it any
// more. It comes back by way of another CopiesPort, after somebody has written all bytes to it. One copy is always in use: a
// transfer that no copy in use has made fails, and changes nothing about the copies.
//
// The caller orders the transfers of one range of bytes.
class CopiesPort : public Port {
public:
    // `name`: of the tier, for errors.
    CopiesPort(std::string name, const std::vector<Port*>& ports);
    // Follows `before`: the copy at `fresh` begins in use, and the others are and stay in the same state in both.
    CopiesPort(std::string name, const std::vector<Port*>& ports, const CopiesPort& before, std::size_t fresh);
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    unsigned concurrency() const noexcept override;
    bool copies() const noexcept override;
    bool serves_faults() const noexcept override;

    // For each copy, why it is out of use; nothing for one in use.
    std::vector<std::optional<PortError>> faults() const;
    // Takes a copy out of use. False if it is the only one.
    bool take_out(std::size_t index, std::string why);

private:
    struct Copy {
        Port* port;
        std::optional<PortError> fault;  // guarded by *mutex_
    };
    using Failed = std::vector<std::pair<std::size_t, PortError>>;

    std::vector<std::size_t> in_use() const;
    bool settle(const std::vector<std::size_t>& served, const Failed& failed);

    const std::string name_;
    std::shared_ptr<std::mutex> mutex_;  // shared by ports that follow one another, like the copies
    std::vector<std::shared_ptr<Copy>> copies_;
};

}  // namespace farpool
