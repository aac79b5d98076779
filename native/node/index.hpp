// The writing end of an index segment: a linear hash table that readers in other processes look into while it changes.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

#include "node/files.hpp"

namespace farpool {

class Index {
public:
    // The header of an index for a data segment of `capacity` bytes: where it keeps what. Tenant and id are the caller's.
    static void lay_out(SegmentHeader& header, std::uint64_t capacity);

    explicit Index(Segment segment);

    struct Entry {
        std::uint64_t generation;
        std::uint64_t offset;
        std::uint64_t expiry;
        std::uint64_t hash;
        std::uint32_t units;
        std::uint32_t block = 0;
        std::uint32_t blocks = 0;
    };

    static constexpr std::uint32_t none = 0xffffffffu;

    std::uint64_t hash(std::string_view key) const noexcept;
    // The slot whose hash is the same and for which `same` holds; none where there is no such.
    template <typename Same>
    std::uint32_t find(std::uint64_t hash, Same same) const;
    // Whether one more entry has room; backs it with memory.
    bool reserve();
    // The slot that the next add() will fill.
    std::uint32_t next_slot() const noexcept { return spare_.empty() ? slots_used() : spare_.back(); }
    // Published when this returns; it is found before older ones of the same key. Needs a reserve() before.
    std::uint32_t add(const Entry& entry);
    // Invalid for readers when this returns: its memory may be used again.
    void remove(std::uint32_t slot);
    Entry at(std::uint32_t slot) const noexcept;
    bool is_live(std::uint32_t slot) const noexcept;
    void set_written(std::uint32_t slot) noexcept;
    void set_expiry(std::uint32_t slot, std::uint64_t expiry) noexcept;

    std::uint64_t floor(std::uint64_t hash) const noexcept;
    void raise_floor(std::uint64_t hash, std::uint64_t generation) noexcept;
    // The NVMe file whose blocks the slots name; 0 for none.
    std::uint64_t shelf() const noexcept { return header_.session; }
    void set_shelf(std::uint64_t id) noexcept;
    // Whether programs have been told where payloads lie, in pins and preparations that have not ended.
    bool lent_out() const noexcept { return header_.lent_out.load(std::memory_order_relaxed) != 0; }
    void set_lent_out(bool lent_out) noexcept { header_.lent_out.store(lent_out ? 1 : 0, std::memory_order_relaxed); }
    // Readers that have the index mapped must not use it.
    void set_retired(bool retired) noexcept;

    // Forgets the table, keeps those slots for which `keep` holds and builds the table anew.
    void adopt(const std::function<bool(std::uint32_t)>& keep);

    std::uint32_t slots_used() const noexcept;
    std::size_t size() const noexcept { return size_; }
    std::uint64_t buckets() const noexcept;
    // The live slots in a bucket.
    std::vector<std::uint32_t> bucket(std::uint64_t number) const;
    std::uint64_t bucket_of_hash(std::uint64_t hash) const noexcept;
    // A walk over the table goes by hashes with their bits reversed: a bucket is a range of them, and when it is split, so is the
    // range. Where the range of the bucket that contains `place` ends; 0 for the last one.
    static std::uint64_t reversed(std::uint64_t hash) noexcept;
    std::uint64_t next_place(std::uint64_t place) const noexcept;
    const Segment& segment() const noexcept { return segment_; }

private:
    IndexSlot& slot(std::uint32_t number) const noexcept { return slots_[number]; }
    void link(std::uint32_t number, std::uint64_t bucket);
    void split_one();
    bool back_to(std::uint64_t& backed, std::uint64_t end);

    Segment segment_;
    SegmentHeader& header_;
    std::atomic<std::uint32_t>* buckets_;
    IndexSlot* slots_;
    std::atomic<std::uint64_t>* floors_;
    std::vector<std::uint32_t> spare_;
    // The slot removed last. It rests, so that an object that moves gets another slot and no reader takes one for the other.
    std::uint32_t resting_ = none;
    std::size_t size_ = 0;
    std::uint64_t buckets_backed_;
    std::uint64_t slots_backed_;
};

template <typename Same>
std::uint32_t Index::find(std::uint64_t hash, Same same) const {
    const std::uint64_t bucket = bucket_of_hash(hash);
    for (std::uint32_t next = buckets_[bucket].load(std::memory_order_relaxed); next != 0;) {
        const IndexSlot& found = slot(next - 1);
        if (found.hash.load(std::memory_order_relaxed) == hash && same(next - 1)) {
            return next - 1;
        }
        next = found.next.load(std::memory_order_relaxed);
    }
    return none;
}

}  // namespace farpool
