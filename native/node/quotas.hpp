// Quotas of access keys and tenants: what each holds of a node, how much it may hold, and why the node refuses one more.
//
// A tenant's limits leave enough to other tenants. If a tenant has several keys, each may hold half of the tenant's limit,
// however many sessions it opens: no key can keep the others out, and the other half is left for keys that connect later. The
// only key of a tenant may hold all of it. The keys file can give a key another number of bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <utility>

#include "node/budget.hpp"

namespace farpool {

class Quotas {
public:
    using Owner = std::pair<std::uint32_t, std::uint64_t>;  // tenant, access key

    // An access key that may connect.
    struct Key {
        bool has_memory;       // the key has a right that lets it hold something
        std::uint64_t nbytes;  // bytes that it may hold; 0 if the keys file does not say
    };

    struct Charges {
        std::size_t pins = 0, preparations = 0, leases = 0, connections = 0, areas = 0;
        std::uint64_t nbytes =
            0;  // of leases, of publish areas, of unfinished publishes, and of pinned objects, each once; of keys only
    };

    // Upper limits, because the node keeps a record of each item, and a lease or a connection takes a descriptor.
    static constexpr Charges session_max{100'000, 4'096, 1'024, 0, 64, 0};
    static constexpr Charges tenant_max{1'000'000, 16'384, 4'096, 16'384, 256, 0};

    explicit Quotas(const Budget& budget) : budget_(budget) {}

    void expect(std::map<Owner, Key> keys);

    // Reasons to refuse one more item; empty if it is allowed. `of_session`: how many the session has.
    std::string pin_refusal(const Owner& owner, std::size_t of_session, std::uint64_t extent, std::uint64_t nbytes) const;
    std::string preparation_refusal(const Owner& owner, std::size_t of_session, std::uint64_t nbytes) const;
    std::string lease_refusal(const Owner& owner, std::size_t of_session, std::uint64_t nbytes) const;
    std::string area_refusal(const Owner& owner, std::size_t of_session, std::uint64_t nbytes) const;
    std::string connection_refusal(const Owner& owner) const;

    void pin(const Owner& owner, std::uint64_t extent, std::uint64_t nbytes);
    void unpin(const Owner& owner, std::uint64_t extent);
    void prepare(const Owner& owner, std::uint64_t nbytes) { charge(owner, &Charges::preparations, nbytes); }
    void end_preparation(const Owner& owner, std::uint64_t nbytes) { discharge(owner, &Charges::preparations, nbytes); }
    void lend(const Owner& owner, std::uint64_t nbytes) { charge(owner, &Charges::leases, nbytes); }
    void take_back(const Owner& owner, std::uint64_t nbytes) { discharge(owner, &Charges::leases, nbytes); }
    void lend_area(const Owner& owner, std::uint64_t nbytes) { charge(owner, &Charges::areas, nbytes); }
    void end_area(const Owner& owner, std::uint64_t nbytes) { discharge(owner, &Charges::areas, nbytes); }
    void connect(const Owner& owner) { charge(owner, &Charges::connections, 0); }
    void disconnect(const Owner& owner) { discharge(owner, &Charges::connections, 0); }

    Charges of_key(const Owner& owner) const;
    Charges of_tenant(std::uint32_t tenant) const;

private:
    struct Pinned {
        std::uint64_t nbytes;
        std::size_t pins;
    };
    struct Usage {
        Charges charges;
        std::unordered_map<std::uint64_t, Pinned> pinned;  // by extent
    };
    struct Expected {
        std::size_t keys = 0, memory_keys = 0;
    };

    void charge(const Owner& owner, std::size_t Charges::* what, std::uint64_t nbytes);
    void discharge(const Owner& owner, std::size_t Charges::* what, std::uint64_t nbytes);
    Expected expected_of(std::uint32_t tenant) const;
    std::string refusal(const Owner& owner, std::size_t Charges::* what, std::size_t of_session, const char* things) const;
    enum class Use { lease, pin, publish };
    std::string nbytes_refusal(const Owner& owner, std::uint64_t nbytes, Use use) const;
    std::string descriptor_refusal(const Owner& owner) const;

    const Budget& budget_;
    std::map<Owner, Key> keys_;
    std::map<std::uint32_t, Expected> tenants_;  // counts of `keys_`, by tenant
    std::map<Owner, Usage> usages_;
    std::map<std::uint32_t, Charges> of_tenants_;
};

}  // namespace farpool
