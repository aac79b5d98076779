// A port over memory that one node has lent: mapped into this process, or reached over connections.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "core/port.hpp"
#include "wire/connection.hpp"

namespace farpool {

struct RemoteEnd {
    std::string node;
    std::uint64_t lease;
    std::uint64_t nbytes;
    std::byte* memory;             // the lease's file, header included; null: its bytes go over connections
    std::function<Stream()> dial;  // a new authenticated stream; may throw PortFailure
    Connection::Settings settings;
};

class RemotePort : public Port {
public:
    // `name`: of the tier, for errors. `timeout`: seconds that the node may take for a piece.
    RemotePort(std::string name, RemoteEnd end, double timeout);
    ~RemotePort() override;
    RemotePort(const RemotePort&) = delete;
    RemotePort& operator=(const RemotePort&) = delete;
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    std::unique_ptr<Transfer> begin(Direction direction) override;
    unsigned concurrency() const noexcept override { return copies() ? 1 : 4; }
    bool copies() const noexcept override { return end_.memory != nullptr; }

private:
    class Borrowed;
    class Exchange;

    void transfer(Direction direction, const Piece& piece);
    void transfer_once(Direction direction, const Piece& piece);
    void copy(Direction direction, const Piece& piece) const;
    void send(Direction direction, const Piece& piece, Connection& connection) const;
    void receive(Direction direction, const Piece& piece, Connection& connection) const;
    [[noreturn]] void refuse(const ReplyHead& head, const Piece& piece) const;
    void require_owner() const;
    void require_inside(const Piece& piece) const;
    double deadline() const noexcept;

    const std::string name_;
    const RemoteEnd end_;
    const double timeout_;
    const pid_t owner_;
    std::mutex fence_;  // held while `ending_` is waited for; taken before the other
    std::mutex mutex_;
    std::vector<std::unique_ptr<Connection>> idle_;
    std::vector<std::unique_ptr<Connection>> ending_;  // failed; bytes written over them may still reach the lease
};

}  // namespace farpool
