#include "node/leases.hpp"

#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>

#include "node/numbered_name.hpp"

namespace farpool {

namespace {

constexpr std::string_view prefix = "lease-";
constexpr std::string_view suffix = ".data";

constexpr std::uint64_t page_nbytes = 4096;
// Bytes to take from the system at once.
constexpr std::uint64_t slice_nbytes_max = std::uint64_t{4} << 20;
// The largest page in which a file system may give memory.
constexpr std::uint64_t page_nbytes_max = std::uint64_t{2} << 20;

std::string file_name(const LeaseTerms& terms) {
    return std::string(prefix) + std::to_string(terms.id) + '-' + std::to_string(terms.session) + '-' +
           std::to_string(terms.tenant) + '-' + std::to_string(terms.owner) + '-' + std::to_string(terms.nbytes) +
           std::string(suffix);
}

// The numbers in the name of a lease's file; empty if it is not the name of a lease's file.
std::vector<std::uint64_t> numbers_of(std::string_view name) {
    return name.starts_with(prefix) ? numbers_in(name, prefix.size(), suffix) : std::vector<std::uint64_t>();
}

// The terms of a lease in its file's name; empty if this version of farpool does not give such names.
std::optional<LeaseTerms> terms_in(std::string_view name, const std::vector<std::uint64_t>& numbers) {
    if (numbers.size() != 5) {
        return std::nullopt;
    }
    const LeaseTerms terms{numbers[0], numbers[1], static_cast<std::uint32_t>(numbers[2]), numbers[3], numbers[4]};
    return name == file_name(terms) ? std::optional(terms) : std::nullopt;
}

}  // namespace

Lease::~Lease() {
    if (over) {
        restore_length(segment);
        discard(segment, segment_header_nbytes, segment.nbytes());
    }
}

bool Lease::is_as_lent() const {
    struct stat status{};
    if (fstat(segment.file.fd(), &status) != 0 || static_cast<std::uint64_t>(status.st_size) != segment.memory.nbytes() ||
        segment.guarded.was_cut()) {
        return false;
    }
    const std::uint64_t lent = (segment.memory.nbytes() + page_nbytes - 1) / page_nbytes * page_nbytes;
    const std::uint64_t taken = static_cast<std::uint64_t>(status.st_blocks) * 512;
    if (taken > lent) {
        restore_length(segment);
    }
    return taken <= lent + page_nbytes_max;
}

void Leases::adopt(std::vector<std::string>& notes) {
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
        const std::string name = entry.path().filename().string();
        const std::vector<std::uint64_t> numbers = numbers_of(name);
        if (numbers.empty()) {
            continue;
        }
        try {
            const std::optional<LeaseTerms> terms = terms_in(name, numbers);
            if (!terms) {
                throw std::runtime_error(entry.path().string() + " does not say in its name whose lease it is");
            }
            Segment segment = open_segment(entry.path().string(), SegmentKind::lease, terms->nbytes);
            const SegmentHeader& header = segment.header();
            if (*terms != LeaseTerms{header.lease, header.session, header.tenant, header.owner, header.capacity}) {
                throw std::runtime_error(entry.path().string() + " says that it is another lease");
            }
            leases_.emplace(terms->id, std::make_shared<Lease>(*terms, std::move(segment)));
        } catch (const std::system_error& error) {
            if (error.code() != std::errc::no_such_file_or_directory) {
                throw;  // a file that we cannot open now may be whole, and a program may need it
            }
        } catch (const std::runtime_error& error) {  // damaged
            notes.emplace_back(std::string("removed ") + error.what());
            remove_file(entry.path().string());
        }
    }
}

std::shared_ptr<Lease> Leases::make(std::uint64_t session, std::uint32_t tenant, std::uint64_t owner, std::uint64_t nbytes,
                                    const std::function<bool(std::uint64_t)>& return_memory) const {
    SegmentHeader header{};
    header.kind = static_cast<std::uint32_t>(SegmentKind::lease);
    header.capacity = nbytes;
    header.session = session;
    header.tenant = tenant;
    header.owner = owner;
    header.lease = random_word() | 1;  // never 0
    const LeaseTerms terms{header.lease, session, tenant, owner, nbytes};
    const std::string path =
        folder_ + "/" + (nameless_ ? std::string(prefix) + std::to_string(terms.id) + std::string(suffix) : file_name(terms));
    return std::make_shared<Lease>(
        terms, backed_segment(path, header, nameless_ ? make_nameless_segment : make_segment, return_memory));
}

Segment backed_segment(const std::string& path, const SegmentHeader& header,
                       const std::function<Segment(const std::string&, const SegmentHeader&)>& make,
                       const std::function<bool(std::uint64_t)>& return_memory) {
    const std::uint64_t total = segment_header_nbytes + header.capacity;
    const auto begin = [&] {
        for (;;) {
            try {
                return make(path, header);
            } catch (const std::system_error& error) {
                if (!is_lack_of_memory(error.code().value()) || !return_memory(total)) {
                    throw;
                }
            }
        }
    };
    Segment segment = begin();
    std::uint64_t slice = slice_nbytes_max;
    for (std::uint64_t taken = 0; taken < total;) {
        const std::uint64_t step = std::min(slice, total - taken);
        if (back(segment, taken, step)) {
            taken += step;
            continue;
        }
        const int code = errno;
        if (is_lack_of_memory(code) && slice > page_nbytes) {
            slice /= 2;  // first take all memory that the system has, so that we return to it only the missing bytes
        } else if (is_lack_of_memory(code) && return_memory(total - taken)) {
            slice = slice_nbytes_max;
        } else {
            remove_file(path);
            remove_file(path + unfinished_suffix);
            throw std::system_error(code, std::generic_category(), path);
        }
    }
    return segment;
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

void Leases::remove(Lease& lease) {
    lease.over = true;
    lease.segment.header().retired.store(1, std::memory_order_seq_cst);  // programs that have it mapped see that it has ended
    remove_file(lease.segment.path);
    leases_.erase(lease.id);
}

}  // namespace farpool
