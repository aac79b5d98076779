#include "node/tenants.hpp"

#include <cerrno>
#include <filesystem>
#include <system_error>

namespace farpool {

namespace {

constexpr std::size_t swept_slots = 20'000;
constexpr std::uint64_t returned_nbytes_max = std::uint64_t{64} << 20;  // in one call, which takes milliseconds

}  // namespace

Tenants::Tenants(std::string folder, bool fresh, Budget& budget, std::unique_ptr<Medium> lower, Events& events)
    : folder_(std::move(folder)), fresh_(fresh), budget_(budget), lower_(std::move(lower)), events_(events) {}

void Tenants::adopt() {
    std::vector<std::filesystem::path> found;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
        found.push_back(entry.path());
    }
    for (const auto& path : found) {
        const std::string name = path.filename().string();
        const bool unfinished =
            name.ends_with(unfinished_suffix) && (name.starts_with("objects-") || name.starts_with("lease-"));
        const bool outdated = name.ends_with(".visited") && name.starts_with("objects-");  // made by an earlier farpool
        if (unfinished || outdated) {
            remove_file(path.string());
        } else if (const auto tenant = tenant_of_file(name)) {
            of(*tenant);
        }
    }
}

Catalogue& Tenants::of(std::uint32_t tenant) {
    if (Catalogue* const known = find(tenant)) {
        return *known;
    }
    if (closed_) {  // no one would remove the files
        throw std::system_error(ESHUTDOWN, std::generic_category(), "making files for a tenant");
    }
    std::string text;
    auto made = std::make_unique<Catalogue>(folder_, tenant, budget_, lower_.get(), fresh_, text);
    Catalogue& catalogue = *catalogues_.emplace(tenant, std::move(made)).first->second;
    if (!text.empty()) {
        events_.note("forgotten", 0, std::move(text));
    }
    return catalogue;
}

Catalogue* Tenants::find(std::uint32_t tenant) const {
    const auto found = catalogues_.find(tenant);
    return found == catalogues_.end() ? nullptr : found->second.get();
}

std::vector<std::function<void()>> Tenants::finished() {
    return lower_ == nullptr ? std::vector<std::function<void()>>() : lower_->finished();
}

void Tenants::tidy() {
    for (const auto& [tenant, objects] : catalogues_) {
        objects->sweep(swept_slots);
    }
    bool has_searched = false;  // one tenant at a time, because requests wait for it
    for (const auto& [tenant, objects] : catalogues_) {
        has_searched = objects->return_idle(has_searched ? 0 : returned_nbytes_max) || has_searched;
    }
}

void Tenants::close() {
    closed_ = true;
    if (lower_ != nullptr) {
        lower_->close();  // the next start adopts the payloads that it stores now
        for (const auto& then : finished()) {
            events_.guard(0, then);
        }
    }
    for (const auto& [tenant, objects] : catalogues_) {
        objects->retire();
        if (fresh_) {
            objects->remove_files();
        }
    }
}

}  // namespace farpool
