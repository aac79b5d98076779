// Private memory: a segment of its own for each lease, which goes back to the system when the lease ends.
//
// Memory that is lent is zero: it is always a new file.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "node/files.hpp"

namespace farpool {

struct Lease {
    std::uint64_t id;
    std::uint64_t session;
    std::uint32_t tenant;
    std::uint64_t owner;  // says which access key lent it
    Segment segment;
    std::uint64_t nbytes() const noexcept { return segment.nbytes(); }
};

class Leases {
public:
    // `nameless` ones lie in no file: a killed node leaves nothing of them.
    Leases(std::string folder, bool nameless) : folder_(std::move(folder)), nameless_(nameless) {}

    // Takes over what an earlier start has lent. `notes` gets a line for each file that was removed instead.
    void adopt(std::vector<std::string>& notes);
    // A file for a lease, backed by memory; throws std::system_error. Takes long, touches no table: add() does.
    std::shared_ptr<Lease> make(std::uint64_t session, std::uint32_t tenant, std::uint64_t owner, std::uint64_t nbytes) const;
    void add(std::shared_ptr<Lease> lease);
    // Null where there is none of that session, tenant and key.
    std::shared_ptr<Lease> find(std::uint64_t session, std::uint32_t tenant, std::uint64_t owner, std::uint64_t id) const;
    std::vector<std::shared_ptr<Lease>> of(std::uint64_t session) const;
    std::vector<std::shared_ptr<Lease>> all() const;
    void remove(const Lease& lease);

private:
    std::string folder_;
    bool nameless_;
    std::map<std::uint64_t, std::shared_ptr<Lease>> leases_;
};

}  // namespace farpool
