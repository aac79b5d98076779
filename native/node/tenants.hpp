// The catalogues of a node's tenants, and the medium below their RAM.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "node/budget.hpp"
#include "node/catalogue/catalogue.hpp"
#include "node/catalogue/medium.hpp"
#include "node/events.hpp"

namespace farpool {

class Tenants {
public:
    // `fresh`: catalogues start without objects. `lower` may be null.
    Tenants(std::string folder, bool fresh, Budget& budget, std::unique_ptr<Medium> lower, Events& events);
    // Makes the catalogues of the tenants that have files in the folder.
    void adopt();

    // The catalogue of a tenant, made if there is none. Throws std::system_error, also after close().
    Catalogue& of(std::uint32_t tenant);
    Catalogue& at(std::uint32_t tenant) const { return *catalogues_.at(tenant); }
    // Null if the tenant has no catalogue.
    Catalogue* find(std::uint32_t tenant) const;
    const std::map<std::uint32_t, std::unique_ptr<Catalogue>>& all() const noexcept { return catalogues_; }
    // Null without a lower medium.
    const Medium* lower() const noexcept { return lower_.get(); }
    // The puts and gets of the lower medium that have finished: the caller calls them.
    std::vector<std::function<void()>> finished();
    // Removes objects that are over, and returns memory to the system that was not used for some time.
    void tidy();
    // Finishes all puts of the lower medium, retires the catalogues and removes fresh files.
    void close();
    // Lets the lower medium and its threads alone, in a child forked from the process that has them.
    void abandon() { static_cast<void>(lower_.release()); }

private:
    std::string folder_;
    bool fresh_;
    Budget& budget_;
    std::unique_ptr<Medium> lower_;
    Events& events_;
    std::map<std::uint32_t, std::unique_ptr<Catalogue>> catalogues_;
    bool closed_ = false;
};

}  // namespace farpool
