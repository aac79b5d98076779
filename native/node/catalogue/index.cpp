#include "node/catalogue/index.hpp"

#include <algorithm>
#include <bit>
#include <new>
#include <stdexcept>
#include <utility>

namespace farpool {

namespace {

constexpr std::uint64_t first_level = 10;
constexpr std::size_t bucket_entries_max = 64;
constexpr std::uint64_t backing_nbytes = 65536;  // the step in which we back the table with memory

constexpr std::uint64_t round_up(std::uint64_t value, std::uint64_t step) { return (value + step - 1) / step * step; }

}  // namespace

void Index::lay_out(SegmentHeader& header, std::uint64_t capacity) {
    header.kind = static_cast<std::uint32_t>(SegmentKind::index);
    header.hash_seed = random_word();
    // One for each unit, one for the slot that was removed last, and one for an object that enters before another one leaves.
    header.slot_limit = std::min<std::uint64_t>(capacity / unit_nbytes + 2, Index::none - 1);
    const std::uint64_t bucket_limit = std::max(std::bit_ceil(header.slot_limit), std::uint64_t{1} << first_level);
    header.buckets_at = segment_header_nbytes;
    header.slots_at = round_up(header.buckets_at + bucket_limit * sizeof(std::uint32_t), backing_nbytes);
    header.capacity = header.slots_at + round_up(header.slot_limit * sizeof(IndexSlot), backing_nbytes) - segment_header_nbytes;
}

Index::Index(Segment segment)
    : segment_(std::move(segment)),
      header_(segment_.header()),
      buckets_(segment_.memory.at<std::atomic<std::uint32_t>>(header_.buckets_at)),
      slots_(segment_.memory.at<IndexSlot>(header_.slots_at)),
      buckets_backed_(header_.buckets_at),
      slots_backed_(header_.slots_at) {
    set_retired(true);
    if (!back_to(buckets_backed_, header_.buckets_at + (sizeof(std::uint32_t) << first_level))) {
        throw std::bad_alloc();
    }
    header_.level_and_split.store(first_level << 32, std::memory_order_release);
    header_.slots_used.store(std::min<std::uint64_t>(header_.slots_used.load(), header_.slot_limit), std::memory_order_relaxed);
}

std::uint64_t Index::hash(std::string_view key) const noexcept { return hash64(key.data(), key.size(), header_.hash_seed); }

std::uint64_t Index::bucket_of_hash(std::uint64_t hash) const noexcept {
    return bucket_of(hash, header_.level_and_split.load(std::memory_order_relaxed));
}

std::uint64_t Index::reversed(std::uint64_t hash) noexcept {
    constexpr std::uint64_t masks[] = {0x5555555555555555u, 0x3333333333333333u, 0x0f0f0f0f0f0f0f0fu};
    for (unsigned step = 0; step < 3; ++step) {
        const unsigned shift = 1u << step;
        hash = ((hash >> shift) & masks[step]) | ((hash & masks[step]) << shift);
    }
    return __builtin_bswap64(hash);
}

std::uint64_t Index::next_place(std::uint64_t place) const noexcept {
    const std::uint64_t table = header_.level_and_split.load(std::memory_order_relaxed);
    const std::uint64_t level = table >> 32;
    const bool was_split = (reversed(place) & ((std::uint64_t{1} << level) - 1)) < (table & 0xffffffffu);
    const std::uint64_t bits = was_split ? level + 1 : level;
    return (place | (~std::uint64_t{0} >> bits)) + 1;
}

std::uint32_t Index::slots_used() const noexcept {
    return static_cast<std::uint32_t>(header_.slots_used.load(std::memory_order_relaxed));
}

std::uint64_t Index::buckets() const noexcept {
    const std::uint64_t table = header_.level_and_split.load(std::memory_order_relaxed);
    return (std::uint64_t{1} << (table >> 32)) + (table & 0xffffffffu);
}

std::vector<std::uint32_t> Index::bucket(std::uint64_t number) const {
    std::vector<std::uint32_t> found;
    for (std::uint32_t next = buckets_[number].load(std::memory_order_relaxed); next != 0;) {
        found.push_back(next - 1);
        next = slot(next - 1).next.load(std::memory_order_relaxed);
    }
    return found;
}

bool Index::back_to(std::uint64_t& backed, std::uint64_t end) {
    if (end > backed) {
        const std::uint64_t to = std::min(round_up(end, backing_nbytes), static_cast<std::uint64_t>(segment_.memory.nbytes()));
        if (!back(segment_, backed, to - backed)) {
            return false;
        }
        backed = to;
    }
    return true;
}

bool Index::is_crowded(std::uint64_t hash) const noexcept {
    std::size_t found = 0;
    for (std::uint32_t next = buckets_[bucket_of_hash(hash)].load(std::memory_order_relaxed);
         next != 0 && found < bucket_entries_max; ++found) {
        next = slot(next - 1).next.load(std::memory_order_relaxed);
    }
    return found == bucket_entries_max;
}

std::uint64_t Index::buckets_end() const noexcept { return header_.buckets_at + (buckets() + 1) * sizeof(std::uint32_t); }

std::uint64_t Index::slots_end() const noexcept {
    return header_.slots_at + (std::uint64_t{slots_used()} + (spare_.empty() ? 1 : 0)) * sizeof(IndexSlot);
}

bool Index::reserve() {
    return back_to(buckets_backed_, buckets_end()) && (!spare_.empty() || slots_used() < header_.slot_limit) &&
           back_to(slots_backed_, slots_end());
}

std::uint64_t Index::growth() const noexcept {
    const bool slots_grow = slots_end() > slots_backed_ && slots_backed_ > header_.slots_at;
    return (buckets_end() > buckets_backed_ ? backing_nbytes : 0) + (slots_grow ? backing_nbytes : 0);
}

std::uint64_t Index::grown() const noexcept {
    const std::uint64_t slots = slots_backed_ - header_.slots_at;
    return buckets_backed_ - header_.buckets_at - std::min(buckets_backed_ - header_.buckets_at, backing_nbytes) + slots -
           std::min(slots, backing_nbytes);
}

std::uint32_t Index::add(const Entry& entry) {
    const std::uint32_t number = next_slot();
    if (spare_.empty()) {
        header_.slots_used.store(number + 1, std::memory_order_relaxed);
    } else {
        spare_.pop_back();
    }
    IndexSlot& fresh = slot(number);
    fresh.offset.store(entry.offset, std::memory_order_relaxed);
    fresh.expiry.store(entry.expiry, std::memory_order_relaxed);
    fresh.hash.store(entry.hash, std::memory_order_relaxed);
    fresh.units.store(entry.units, std::memory_order_relaxed);
    fresh.block.store(entry.block, std::memory_order_relaxed);
    fresh.blocks.store(entry.blocks, std::memory_order_relaxed);
    fresh.serial.store(entry.serial, std::memory_order_release);
    link(number, bucket_of_hash(entry.hash));
    ++size_;
    if (size_ > buckets()) {
        split_one();
    }
    return number;
}

void Index::link(std::uint32_t number, std::uint64_t bucket) {
    slot(number).next.store(buckets_[bucket].load(std::memory_order_relaxed), std::memory_order_relaxed);
    buckets_[bucket].store(number + 1, std::memory_order_release);
}

void Index::remove(std::uint32_t number) {
    IndexSlot& gone = slot(number);
    gone.serial.store(0, std::memory_order_relaxed);
    // Readers see writes into its memory, which may follow, only after the 0.
    std::atomic_thread_fence(std::memory_order_release);
    std::atomic<std::uint32_t>* place = &buckets_[bucket_of_hash(gone.hash.load(std::memory_order_relaxed))];
    for (std::uint32_t next = place->load(std::memory_order_relaxed); next != number + 1;
         next = place->load(std::memory_order_relaxed)) {
        place = &slot(next - 1).next;
    }
    place->store(gone.next.load(std::memory_order_relaxed), std::memory_order_release);
    if (resting_ != none) {
        spare_.push_back(resting_);
    }
    resting_ = number;
    --size_;
}

void Index::split_one() {
    const std::uint64_t table = header_.level_and_split.load(std::memory_order_relaxed);
    const std::uint64_t level = table >> 32;
    const std::uint64_t split = table & 0xffffffffu;
    const std::vector<std::uint32_t> members = bucket(split);
    const std::uint64_t half = std::uint64_t{1} << level;
    buckets_[split + half].store(0, std::memory_order_relaxed);
    const bool full_level = split + 1 == half;
    header_.level_and_split.store(full_level ? (level + 1) << 32 : table + 1, std::memory_order_release);
    buckets_[split].store(0, std::memory_order_release);
    for (auto member = members.rbegin(); member != members.rend(); ++member) {  // keeps the order in the chain
        link(*member, bucket_of_hash(slot(*member).hash.load(std::memory_order_relaxed)));
    }
}

Index::Entry Index::at(std::uint32_t number) const noexcept {
    const IndexSlot& found = slot(number);
    return {found.serial.load(std::memory_order_relaxed), found.offset.load(std::memory_order_relaxed),
            found.expiry.load(std::memory_order_relaxed), found.hash.load(std::memory_order_relaxed),
            found.units.load(std::memory_order_relaxed),  found.block.load(std::memory_order_relaxed),
            found.blocks.load(std::memory_order_relaxed)};
}

bool Index::is_live(std::uint32_t number) const noexcept {
    return number < slots_used() && slot(number).serial.load(std::memory_order_relaxed) != 0;
}

void Index::set_shelf(std::uint64_t id) noexcept {
    if (header_.session != id) {  // a node that is killed here leaves a header with a wrong checksum
        header_.session = id;
        seal(header_);
    }
}

void Index::set_expiry(std::uint32_t number, std::uint64_t expiry) noexcept {
    slot(number).expiry.store(expiry, std::memory_order_relaxed);
}

void Index::set_retired(bool retired) noexcept { header_.retired.store(retired ? 1 : 0, std::memory_order_seq_cst); }

void Index::adopt(const std::function<bool(std::uint32_t)>& keep) {
    const std::uint64_t used = slots_used();
    discard(segment_, header_.buckets_at, header_.slots_at - header_.buckets_at);
    buckets_backed_ = header_.buckets_at;
    slots_backed_ = header_.slots_at;
    if (!back_to(buckets_backed_, header_.buckets_at + (sizeof(std::uint32_t) << first_level)) ||
        !back_to(slots_backed_, header_.slots_at + used * sizeof(IndexSlot))) {
        throw std::bad_alloc();
    }
    // Discarded memory reads as zero only if the file system supports holes. A split fills the later buckets.
    for (std::uint64_t bucket = 0; bucket < std::uint64_t{1} << first_level; ++bucket) {
        buckets_[bucket].store(0, std::memory_order_relaxed);
    }
    header_.level_and_split.store(first_level << 32, std::memory_order_relaxed);
    spare_.clear();
    resting_ = none;
    size_ = 0;
    std::uint64_t newest = 0;
    for (std::uint32_t number = 0; number < used; ++number) {
        newest = std::max(newest, slot(number).serial.load(std::memory_order_relaxed));
        if (is_live(number) && keep(number)) {
            if (!back_to(buckets_backed_, header_.buckets_at + (buckets() + 1) * sizeof(std::uint32_t))) {
                throw std::bad_alloc();
            }
            link(number, bucket_of_hash(slot(number).hash.load(std::memory_order_relaxed)));
            ++size_;
            if (size_ > buckets()) {
                split_one();
            }
        } else {
            slot(number).serial.store(0, std::memory_order_relaxed);
            spare_.push_back(number);
        }
    }
    header_.next_serial.store(std::max(header_.next_serial.load(), newest + 1), std::memory_order_relaxed);
}

}  // namespace farpool
