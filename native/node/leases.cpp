#include "node/leases.hpp"

#include <cerrno>
#include <filesystem>
#include <stdexcept>
#include <string_view>
#include <system_error>

namespace farpool {

namespace {

constexpr std::string_view prefix = "lease-";
constexpr std::string_view suffix = ".data";

std::string file_name(std::uint64_t lease) { return std::string(prefix) + std::to_string(lease) + std::string(suffix); }

// Whether a node gives files such names; another file in its folder is not its own.
bool is_file_name(std::string_view name) {
    if (name.size() <= prefix.size() + suffix.size() || !name.starts_with(prefix) || !name.ends_with(suffix)) {
        return false;
    }
    const std::string_view number = name.substr(prefix.size(), name.size() - prefix.size() - suffix.size());
    return number.find_first_not_of("0123456789") == std::string_view::npos;
}

}  // namespace

void Leases::adopt(std::vector<std::string>& notes) {
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
        const std::string name = entry.path().filename().string();
        if (!is_file_name(name)) {
            continue;
        }
        try {
            Segment segment = open_segment(entry.path().string(), SegmentKind::lease);
            const SegmentHeader& header = segment.header();
            const std::uint64_t id = header.lease;
            const std::uint64_t session = header.session;
            const std::uint32_t tenant = header.tenant;
            const std::uint64_t owner = header.owner;
            if (name != file_name(id)) {  // its session can write the header
                throw std::runtime_error(entry.path().string() + " says that it is another lease");
            }
            leases_.emplace(id, std::make_shared<Lease>(id, session, tenant, owner, std::move(segment)));
        } catch (const std::system_error& error) {
            if (error.code() != std::errc::no_such_file_or_directory) {
                throw;  // what cannot be opened now may be whole, and somebody's memory
            }
        } catch (const std::runtime_error& error) {  // damaged
            notes.emplace_back(std::string("removed ") + error.what());
            remove_file(entry.path().string());
        }
    }
}

std::shared_ptr<Lease> Leases::make(std::uint64_t session, std::uint32_t tenant, std::uint64_t owner,
                                    std::uint64_t nbytes) const {
    SegmentHeader header{};
    header.kind = static_cast<std::uint32_t>(SegmentKind::lease);
    header.capacity = nbytes;
    header.session = session;
    header.tenant = tenant;
    header.owner = owner;
    header.lease = random_word() | 1;  // never 0
    const std::string path = folder_ + "/" + file_name(header.lease);
    const auto make = nameless_ ? make_nameless_segment : make_segment;
    auto lease = std::make_shared<Lease>(header.lease, session, tenant, owner, make(path, header));
    if (!back(lease->segment, 0, segment_header_nbytes + nbytes)) {
        const int code = errno;
        remove_file(path);
        throw std::system_error(code, std::generic_category(), path);
    }
    return lease;
}

void Leases::add(std::shared_ptr<Lease> lease) { leases_.emplace(lease->id, std::move(lease)); }

std::shared_ptr<Lease> Leases::find(std::uint64_t session, std::uint32_t tenant, std::uint64_t owner, std::uint64_t id) const {
    const auto found = leases_.find(id);
    const bool is_theirs = found != leases_.end() && found->second->session == session && found->second->tenant == tenant &&
                           found->second->owner == owner;
    return is_theirs ? found->second : nullptr;
}

std::vector<std::shared_ptr<Lease>> Leases::of(std::uint64_t session) const {
    std::vector<std::shared_ptr<Lease>> found;
    for (const auto& [id, lease] : leases_) {
        if (lease->session == session) {
            found.push_back(lease);
        }
    }
    return found;
}

std::vector<std::shared_ptr<Lease>> Leases::all() const {
    std::vector<std::shared_ptr<Lease>> found;
    for (const auto& [id, lease] : leases_) {
        found.push_back(lease);
    }
    return found;
}

void Leases::remove(const Lease& lease) {
    lease.segment.header().retired.store(1, std::memory_order_seq_cst);  // whoever has it mapped learns that it is lost
    remove_file(lease.segment.path);
    leases_.erase(lease.id);
}

}  // namespace farpool
