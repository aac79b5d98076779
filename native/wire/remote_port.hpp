// A tier's space on nodes: striped round robin, each node's stripes one after the other in its lease.
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
    // All ends lend the same number of bytes, a multiple of the stripe. `timeout`: seconds that a node may take for a
    // piece of at most a stripe.
    RemotePort(std::string name, std::vector<RemoteEnd> ends, std::uint64_t stripe, double timeout);
    ~RemotePort() override;
    RemotePort(const RemotePort&) = delete;
    RemotePort& operator=(const RemotePort&) = delete;
    void read(std::uint64_t offset, void* into, std::size_t nbytes) override;
    void write(std::uint64_t offset, const void* from, std::size_t nbytes) override;
    unsigned concurrency() const noexcept override;

private:
    struct Node;
    struct Piece;
    class Borrowed;

    std::size_t wired_nodes() const noexcept;
    std::vector<Piece> cut(std::uint64_t offset, std::byte* memory, std::size_t nbytes) const;
    void transfer(Op op, std::uint64_t offset, std::byte* memory, std::size_t nbytes);
    void attempt(Op op, const std::vector<Piece>& pieces, std::vector<Borrowed>& borrowed);
    void copy(Op op, const Piece& piece) const;
    void send(Op op, const Piece& piece, Connection& connection) const;
    void receive(Op op, const Piece& piece, Connection& connection) const;
    [[noreturn]] void refuse(const ReplyHead& head, const Piece& piece) const;
    double deadline() const noexcept;

    const std::string name_;
    const std::uint64_t stripe_;
    const double timeout_;
    const pid_t owner_;
    std::vector<std::unique_ptr<Node>> nodes_;
};

}  // namespace farpool
