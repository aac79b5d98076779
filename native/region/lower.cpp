#include "region/lower.hpp"

#include <algorithm>
#include <mutex>

#include "core/crc32c.hpp"

namespace farpool::region {

namespace {

std::uint64_t bytes(Page pages) { return std::uint64_t{pages} * page_nbytes; }

}  // namespace

void Lower::append(Extent extent) {
    const std::lock_guard lock(mutex_);
    const Page first = stored_.empty() ? 0 : stored_.back()->first + stored_.back()->extent.count;
    std::vector<std::uint32_t> sums(extent.checked ? extent.count : 0);
    stored_.push_back(std::make_unique<Stored>(Stored{first, std::move(extent), std::move(sums)}));
}

void Lower::cut(Page end) {
    const std::lock_guard lock(mutex_);
    while (!stored_.empty() && stored_.back()->first >= end) {
        stored_.pop_back();
    }
}

Page Lower::pages() const noexcept {
    const std::shared_lock lock(mutex_);
    return stored_.empty() ? 0 : stored_.back()->first + stored_.back()->extent.count;
}

Lower::Stored& Lower::of(Page page) const {
    const std::shared_lock lock(mutex_);
    const auto after = std::ranges::upper_bound(stored_, page, {}, [](const auto& one) { return one->first; });
    return **std::prev(after);
}

Page Lower::together(Page first, Page count) const {
    const Stored& stored = of(first);
    return std::min(count, stored.first + stored.extent.count - first);
}

bool Lower::copies(Page page) const { return of(page).extent.port->copies(); }

std::string Lower::tier(Page page) const { return of(page).extent.tier; }

const Port* Lower::port(Page page) const { return of(page).extent.port; }

std::byte* Lower::address(Page first, Page count) const {
    const auto& [begin, extent, sums] = of(first);
    return extent.checked ? nullptr : extent.port->address(extent.offset + bytes(first - begin), bytes(count));
}

void Lower::read(Page first, Page count, std::byte* into) const {
    const Stored& stored = of(first);
    const Page place = first - stored.first;
    stored.extent.port->read(stored.extent.offset + bytes(place), into, bytes(count));
    for (Page page = 0; stored.extent.checked && page < count; ++page) {
        if (crc32c(into + bytes(page), page_nbytes) != stored.sums[place + page]) {
            fail_checksum(stored.extent.tier, "the 4096 bytes read at offset " +
                                                  std::to_string(stored.extent.offset + bytes(place + page)) +
                                                  " are not those that were written");
        }
    }
}

void Lower::write(Page first, Page count, const std::byte* from) {
    // One page is never in two transfers at the same time, so its sum needs no lock.
    Stored& stored = of(first);
    const Page place = first - stored.first;
    for (Page page = 0; stored.extent.checked && page < count; ++page) {
        stored.sums[place + page] = crc32c(from + bytes(page), page_nbytes);
    }
    stored.extent.port->write(stored.extent.offset + bytes(place), from, bytes(count));
}

}  // namespace farpool::region
