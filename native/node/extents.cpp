#include "node/extents.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <system_error>

#include "node/numbered_name.hpp"

namespace farpool {

namespace {

constexpr std::string_view extent_prefix = "extent-";
constexpr std::string_view extent_suffix = ".data";
constexpr std::string_view fence_prefix = "fence-";
constexpr std::string_view forgotten_prefix = "forgotten-";
constexpr std::size_t hex_digits = 32;

[[noreturn]] void fail(const std::string& path) { throw std::system_error(errno, std::generic_category(), path); }

std::string extent_name(const ExtentTerms& terms, std::uint64_t id) {
    return std::string(extent_prefix) + terms.lease.hex() + '-' + std::to_string(terms.number) + '-' +
           std::to_string(terms.epoch) + '-' + std::to_string(id) + '-' + std::to_string(terms.tenant) + '-' +
           std::to_string(terms.owner) + '-' + std::to_string(terms.nbytes) + std::string(extent_suffix);
}

std::string fence_name(const PoolLease& lease, const Tenure& tenure) {
    return std::string(fence_prefix) + lease.hex() + '-' + std::to_string(tenure.epoch) + '-' + (tenure.read_only ? '1' : '0');
}

// The pool lease in a file's name, after its prefix and before a dash.
std::optional<PoolLease> lease_in(std::string_view name, std::string_view prefix) {
    if (!name.starts_with(prefix) || name.size() <= prefix.size() + hex_digits || name[prefix.size() + hex_digits] != '-') {
        return std::nullopt;
    }
    const char* const at = name.data() + prefix.size();
    PoolLease lease;
    const auto high = std::from_chars(at, at + hex_digits / 2, lease.high, 16);
    const auto low = std::from_chars(at + hex_digits / 2, at + hex_digits, lease.low, 16);
    const bool is_whole = high.ptr == at + hex_digits / 2 && low.ptr == at + hex_digits;
    return is_whole && high.ec == std::errc() && low.ec == std::errc() ? std::optional(lease) : std::nullopt;
}

// Numbers that follow the pool lease in a file's name.
std::vector<std::uint64_t> numbers_after_lease(std::string_view name, std::string_view prefix, std::string_view suffix) {
    return numbers_in(name, prefix.size() + hex_digits + 1, suffix);
}

}  // namespace

PoolLease PoolLease::from(std::string_view bytes) {
    if (bytes.size() != 16) {
        throw std::invalid_argument("a lease's identity has " + std::to_string(bytes.size()) + " bytes, expected 16");
    }
    PoolLease lease;
    for (std::size_t at = 0; at < 8; ++at) {
        lease.high = lease.high << 8 | static_cast<unsigned char>(bytes[at]);
        lease.low = lease.low << 8 | static_cast<unsigned char>(bytes[8 + at]);
    }
    return lease;
}

std::string PoolLease::bytes() const {
    std::string text;
    for (const std::uint64_t word : {high, low}) {
        for (int shift = 56; shift >= 0; shift -= 8) {
            text.push_back(static_cast<char>(word >> shift & 0xff));
        }
    }
    return text;
}

std::string PoolLease::hex() const {
    char text[hex_digits + 1];
    std::snprintf(text, sizeof text, "%016llx%016llx", static_cast<unsigned long long>(high),
                  static_cast<unsigned long long>(low));
    return text;
}

std::string Extents::fence_path(const PoolLease& lease, const Tenure& tenure) const {
    return folder_ + '/' + fence_name(lease, tenure);
}

void Extents::adopt(Clock::time_point now, std::chrono::milliseconds wall, std::vector<std::string>& notes) {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
        names.push_back(entry.path().filename().string());
    }
    for (const std::string& name : names) {
        if (name.starts_with(extent_prefix) && name.ends_with(unfinished_suffix)) {
            remove_file(folder_ + '/' + name);
        } else if (name.starts_with(extent_prefix)) {
            adopt_extent(name, now, notes);
        } else if (name.starts_with(fence_prefix)) {
            adopt_fence(name, now);
        } else if (name.starts_with(forgotten_prefix)) {
            adopt_forgotten(name, now, wall);
        }
    }
}

void Extents::adopt_forgotten(const std::string& name, Clock::time_point now, std::chrono::milliseconds wall) {
    const std::vector<std::uint64_t> numbers = numbers_in(name, forgotten_prefix.size(), "");
    if (numbers.size() != 1 || name != std::string(forgotten_prefix) + std::to_string(numbers[0])) {
        return;
    }
    const std::string path = folder_ + '/' + name;
    // The time was a wrong clock's if it is to come: every ticket would be refused until then.
    const auto age = std::max(wall - std::chrono::milliseconds(std::min(numbers[0], static_cast<std::uint64_t>(wall.count()))),
                              std::chrono::milliseconds(0));
    const Clock::time_point until = now - age;
    if (nameless_ || until <= forgotten_until_) {
        return remove_file(path);
    }
    if (!forgotten_path_.empty()) {
        remove_file(forgotten_path_);
    }
    forgotten_until_ = until;
    forgotten_path_ = path;
}

void Extents::adopt_fence(const std::string& name, Clock::time_point now) {
    const std::optional<PoolLease> lease = lease_in(name, fence_prefix);
    const std::vector<std::uint64_t> numbers = numbers_after_lease(name, fence_prefix, "");
    if (!lease || numbers.size() != 2 || name != fence_name(*lease, {numbers[0], numbers[1] != 0})) {
        return;  // not a name that this version gives
    }
    if (nameless_) {  // it has another identity than the node before, for which the fence was
        return remove_file(folder_ + '/' + name);
    }
    const Tenure found{numbers[0], numbers[1] != 0};
    Known& of_lease = known(*lease, now);
    // A node that was killed while it wrote a fence has left the earlier one, too.
    if (of_lease.fence.epoch != 0 && of_lease.fence != found) {
        remove_file(fence_path(*lease, std::min(of_lease.fence, found)));
    }
    of_lease.fence = std::max(of_lease.fence, found);
    *of_lease.tenure = std::max(*of_lease.tenure, found);
}

void Extents::adopt_extent(const std::string& name, Clock::time_point now, std::vector<std::string>& notes) {
    const std::optional<PoolLease> lease = lease_in(name, extent_prefix);
    const std::vector<std::uint64_t> numbers = numbers_after_lease(name, extent_prefix, extent_suffix);
    if (!lease || numbers.size() != 6) {
        return;
    }
    const ExtentTerms terms{*lease,     static_cast<std::uint32_t>(numbers[0]),
                            numbers[1], static_cast<std::uint32_t>(numbers[3]),
                            numbers[4], numbers[5]};
    if (name != extent_name(terms, numbers[2])) {
        return;
    }
    const std::string path = folder_ + '/' + name;
    try {
        Segment segment = open_segment(path, SegmentKind::lease, terms.nbytes);
        const SegmentHeader& header = segment.header();
        if (header.lease != numbers[2] || header.tenant != terms.tenant || header.owner != terms.owner ||
            header.capacity != terms.nbytes) {
            throw std::runtime_error(path + " says that it is another extent");
        }
        enter(std::make_shared<Extent>(terms, numbers[2], std::move(segment)), now);
    } catch (const std::system_error& error) {
        if (error.code() != std::errc::no_such_file_or_directory) {
            throw;  // a file that we cannot open now may be whole, and a program may need it
        }
    } catch (const std::runtime_error& error) {  // damaged
        notes.emplace_back(std::string("removed ") + error.what());
        // A program may have written this, and only the node gives names. So the epoch in the name still counts.
        Known& of_lease = known(*lease, now);
        *of_lease.tenure = std::max(*of_lease.tenure, Tenure{terms.epoch, false});
        if (of_lease.fence < *of_lease.tenure) {
            write_fence(*lease, of_lease, *of_lease.tenure);
        }
        remove_file(path);
    }
}

std::shared_ptr<Extent> Extents::make(const ExtentTerms& terms, const std::function<bool(std::uint64_t)>& return_memory) const {
    SegmentHeader header{};
    header.kind = static_cast<std::uint32_t>(SegmentKind::lease);
    header.capacity = terms.nbytes;
    header.tenant = terms.tenant;
    header.owner = terms.owner;
    header.lease = random_word() | 1;  // never 0
    // A draft, because the claim may still be refused when its memory is there.
    const std::string name =
        nameless_ ? std::string(extent_prefix) + std::to_string(header.lease) : extent_name(terms, header.lease);
    return std::make_shared<Extent>(
        terms, header.lease,
        backed_segment(folder_ + '/' + name, header, nameless_ ? make_nameless_segment : draft_segment, return_memory));
}

void Extents::add(std::shared_ptr<Extent> extent, Clock::time_point now) {
    if (!nameless_) {
        put_in_place(extent->segment);
    }
    enter(std::move(extent), now);
}

void Extents::enter(std::shared_ptr<Extent> extent, Clock::time_point now) {
    Known& of_lease = known(extent->pool_lease, now);
    *of_lease.tenure = std::max(*of_lease.tenure, Tenure{extent->epoch, false});
    idle_.erase({of_lease.since, extent->pool_lease});
    extent->tenure = of_lease.tenure;
    by_id_.emplace(extent->id, extent);
    extents_.emplace(std::pair(extent->pool_lease, extent->number), std::move(extent));
}

void Extents::drop(Extent& extent) const { remove_file(extent.segment.path + unfinished_suffix); }

std::shared_ptr<Extent> Extents::find(const PoolLease& lease, std::uint32_t number) const {
    const auto found = extents_.find(std::pair(lease, number));
    return found == extents_.end() ? nullptr : found->second;
}

std::shared_ptr<Extent> Extents::find(std::uint64_t id) const {
    const auto found = by_id_.find(id);
    return found == by_id_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<Extent>> Extents::of(const PoolLease& lease) const {
    std::vector<std::shared_ptr<Extent>> found;
    for (auto at = extents_.lower_bound(std::pair(lease, std::uint32_t{0})); at != extents_.end() && at->first.first == lease;
         ++at) {
        found.push_back(at->second);
    }
    return found;
}

std::vector<std::shared_ptr<Extent>> Extents::all() const {
    std::vector<std::shared_ptr<Extent>> found;
    for (const auto& [place, extent] : extents_) {
        found.push_back(extent);
    }
    return found;
}

Tenure Extents::tenure(const PoolLease& lease) const {
    const auto found = tenures_.find(lease);
    return found == tenures_.end() ? Tenure{} : *found->second.tenure;
}

Extents::Known& Extents::known(const PoolLease& lease, Clock::time_point now) {
    Known& found = tenures_[lease];
    if (found.tenure == nullptr) {
        found.tenure = std::make_shared<Tenure>();
        touch(lease, found, now);
    }
    return found;
}

bool Extents::has_extents(const PoolLease& lease) const {
    const auto first = extents_.lower_bound(std::pair(lease, std::uint32_t{0}));
    return first != extents_.end() && first->first.first == lease;
}

void Extents::touch(const PoolLease& lease, Known& known, Clock::time_point now) {
    idle_.erase({known.since, lease});
    known.since = now;
    if (!has_extents(lease)) {
        idle_.emplace(now, lease);
    }
}

void Extents::advance(Extent& extent, std::uint64_t epoch, Clock::time_point now) {
    if (epoch > extent.epoch && !nameless_) {
        ExtentTerms terms = extent.terms();
        terms.epoch = epoch;
        const std::string path = folder_ + '/' + extent_name(terms, extent.id);
        if (rename(extent.segment.path.c_str(), path.c_str()) != 0) {
            fail(path);
        }
        extent.segment.path = path;
    }
    extent.epoch = std::max(extent.epoch, epoch);
    Known& of_lease = known(extent.pool_lease, now);
    *of_lease.tenure = std::max(*of_lease.tenure, Tenure{epoch, false});
}

void Extents::begin(const PoolLease& lease, const Tenure& tenure, Clock::time_point now) {
    Known& of_lease = known(lease, now);
    write_fence(lease, of_lease, tenure);
    *of_lease.tenure = tenure;
    touch(lease, of_lease, now);
}

// The new fence is there before the earlier one goes, so a node that is killed between the two knows the later epoch.
void Extents::write_fence(const PoolLease& lease, Known& known, const Tenure& tenure) const {
    const std::string former = known.fence.epoch == 0 ? std::string() : fence_path(lease, known.fence);
    if (!nameless_) {
        const std::string path = fence_path(lease, tenure);
        const File file(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
        const File folder(open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
        if (file.fd() < 0 || folder.fd() < 0 || (fsync(folder.fd()) != 0 && errno != EINVAL)) {
            fail(path);
        }
        if (!former.empty() && former != path) {
            remove_file(former);
        }
    }
    known.fence = tenure;
}

void Extents::remove(Extent& extent, Clock::time_point now) {
    Known& of_lease = known(extent.pool_lease, now);
    // Tickets of earlier epochs may still be valid, and the name of the extent's file no longer says that they are late.
    if (of_lease.fence < *of_lease.tenure) {
        write_fence(extent.pool_lease, of_lease, *of_lease.tenure);
    }
    extent.over = true;
    extent.segment.header().retired.store(1, std::memory_order_seq_cst);  // programs that have it mapped see that it has ended
    remove_file(extent.segment.path);
    const auto place = std::pair(extent.pool_lease, extent.number);
    by_id_.erase(extent.id);
    extents_.erase(place);
    touch(place.first, of_lease, now);
}

// The new name is there before any fence goes, so a node that is killed between the two refuses what it should.
void Extents::write_forgotten(std::chrono::milliseconds until) {
    if (nameless_) {
        return;
    }
    const std::string path = folder_ + '/' + std::string(forgotten_prefix) + std::to_string(until.count());
    const File file(open(path.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
    if (file.fd() < 0) {
        fail(path);
    }
    if (!forgotten_path_.empty() && forgotten_path_ != path) {
        remove_file(forgotten_path_);
    }
    forgotten_path_ = path;
}

void Extents::forget(Clock::time_point now, std::chrono::milliseconds wall) {
    std::vector<PoolLease> leaving;
    Clock::time_point until = forgotten_until_;
    for (const auto& [since, lease] : idle_) {
        const bool is_late = now - since >= fence_kept;
        const bool is_one_of_too_many = idle_.size() - leaving.size() > fences_max_ && now - since >= fence_kept_least;
        if ((!is_late && !is_one_of_too_many) || leaving.size() == forgotten_at_once) {
            break;
        }
        leaving.push_back(lease);
        until = is_late ? until : std::max(until, since + fence_margin);
    }
    if (until > forgotten_until_) {
        write_forgotten(wall - std::chrono::duration_cast<std::chrono::milliseconds>(now - until));
        forgotten_until_ = until;
    }
    for (const PoolLease& lease : leaving) {
        const auto known = tenures_.find(lease);
        if (!nameless_ && known->second.fence.epoch != 0) {
            remove_file(fence_path(lease, known->second.fence));
        }
        idle_.erase({known->second.since, lease});
        tenures_.erase(known);
    }
}

}  // namespace farpool
