// Who a connection belongs to.
#pragma once

#include <cstdint>
#include <string>

#include "node/catalogue/catalogue.hpp"
#include "node/quotas.hpp"

namespace farpool {

class Unsent;

struct Client {
    int fd;
    std::uint64_t number;  // of the connection, because descriptors are used again
    std::uint64_t session;
    std::uint32_t tenant;
    std::uint32_t rights;
    std::string key;      // name of the access key
    Quotas::Owner owner;  // tenant and access key
    Catalogue& objects;   // of the tenant
    Unsent& unsent;       // of the access key
    bool is_latency;      // the class of its traffic

    bool may(std::uint32_t right) const noexcept { return (rights & right) != 0; }
};

}  // namespace farpool
