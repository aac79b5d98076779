// Leases of private memory: one segment each, which is returned to the system when the lease ends.
//
// Lent memory is zero, because it is always a new file. The session may write all of the file, header included, and may change
// its length if the file has a name. So the terms of a lease are in the file's name, which only the node can set.
#pragma once

#include <cstdint>
#include <functional>
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
    std::uint64_t owner;  // stands for the access key that has the lease
    std::uint64_t nbytes;
    bool operator==(const LeaseTerms&) const = default;
};

struct Lease : LeaseTerms {
    Lease(const LeaseTerms& terms, Segment segment) : LeaseTerms(terms), segment(std::move(segment)) {}
    ~Lease();
    Lease(const Lease&) = delete;
    Lease& operator=(const Lease&) = delete;

    // True if its file still has the length and takes no more memory than was lent, and was never seen truncated.
    bool is_as_lent() const;

    Segment segment;
    // True once the node has ended the lease: its memory is freed with the last user, even if a program keeps the file.
    bool over = false;
};

// Makes a segment with `make` and backs all of it with memory, which takes long; throws std::system_error. If the system has no
// more memory, it calls `return_memory` with the bytes to return to the system; that returns false if it cannot.
Segment backed_segment(const std::string& path, const SegmentHeader& header,
                       const std::function<Segment(const std::string&, const SegmentHeader&)>& make,
                       const std::function<bool(std::uint64_t)>& return_memory);

class Leases {
public:
    // `nameless`: leases are in anonymous memory, which ends with a killed node.
    Leases(std::string folder, bool nameless) : folder_(std::move(folder)), nameless_(nameless) {}

    // Adopts the leases of an earlier start. Adds a line to `notes` for each file that it removes instead.
    void adopt(std::vector<std::string>& notes);
    // Makes a lease with a file backed by memory; throws std::system_error. It is slow, and changes no table: add() enters the
    // lease. `return_memory`: as in backed_segment().
    std::shared_ptr<Lease> make(std::uint64_t session, std::uint32_t tenant, std::uint64_t owner, std::uint64_t nbytes,
                                const std::function<bool(std::uint64_t)>& return_memory) const;
    void add(std::shared_ptr<Lease> lease);
    // The lease of this session, tenant and access key; null if there is none.
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
