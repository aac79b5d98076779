// Private memory: a segment of its own for each lease, which goes back to the system when the lease ends.
//
// Memory that is lent is zero: it is always a new file. Its session may write all of that, header included, and may change its length
// where it has a name. So what the node decides by stands in the file's name, which only the node can give.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "node/files.hpp"

namespace farpool {

struct LeaseTerms {
    std::uint64_t id;
    std::uint64_t session;
    std::uint32_t tenant;
    std::uint64_t owner;  // says which access key lent it
    std::uint64_t nbytes;
    bool operator==(const LeaseTerms&) const = default;
};

struct Lease : LeaseTerms {
    Lease(const LeaseTerms& terms, Segment segment) : LeaseTerms(terms), segment(std::move(segment)) {}
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    // Whether its file is as long as it was lent, never was shorter when the node looked, and takes no more memory.
    bool is_as_lent() const;

    Segment segment;
    // The node took it back: with the last who uses it goes its memory, also if a program keeps the file.
    bool over = false;
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
    void remove(Lease& lease);

private:
    std::string folder_;
    bool nameless_;
    std::map<std::uint64_t, std::shared_ptr<Lease>> leases_;
};

}  // namespace farpool
