// The writing end of an index segment: a linear hash table that readers in other processes look into while it changes.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
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
        std::uint64_t serial;
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
    // Whether so many entries stand where this hash would that whoever looks there would take long: chance does not do that, but
    // readers know the seed and can choose keys.
    bool is_crowded(std::uint64_t hash) const noexcept;
    // Whether one more entry has room; backs it with memory.
    bool reserve();
    // Bytes of memory that the table has beyond its first buckets and slots, and by how much reserve() would make them more.
    std::uint64_t grown() const noexcept;
    std::uint64_t growth() const noexcept;
    // The slot that the next add() will fill.
    std::uint32_t next_slot() const noexcept { return spare_.empty() ? slots_used() : spare_.back(); }
    // Published when this returns; it is found before another one of the same key. Needs a reserve() before.
    std::uint32_t add(const Entry& entry);
    // Invalid for readers when this returns: its memory may be used again.
    void remove(std::uint32_t slot);
    Entry at(std::uint32_t slot) const noexcept;
    bool is_live(std::uint32_t slot) const noexcept;
    void set_expiry(std::uint32_t slot, std::uint64_t expiry) noexcept;

    // A number that no publish has had before, whatever became of the node.
    std::uint64_t next_serial() noexcept { return header_.next_serial.fetch_add(1, std::memory_order_relaxed); }
    // The tenant's epoch, none where that is damaged; objects of earlier ones have serials below the first.
    std::optional<std::uint32_t> epoch() const noexcept {
        return first_serial() <= header_.next_serial.load() ? epoch_in(header_.epoch.load()) : std::nullopt;
    }
    std::uint64_t first_serial() const noexcept { return header_.first_serial.load(std::memory_order_relaxed); }
    // The epoch last: a node that is killed in between has lost objects and is told the epoch again.
    void begin_epoch(std::uint32_t epoch, std::uint64_t first_serial) noexcept {
        header_.first_serial.store(first_serial, std::memory_order_release);
        header_.epoch.store(epoch_word(epoch), std::memory_order_release);
    }
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
    // Where the memory of buckets and slots has to end for one entry more.
    std::uint64_t buckets_end() const noexcept;
    std::uint64_t slots_end() const noexcept;

    Segment segment_;
    SegmentHeader& header_;
    std::atomic<std::uint32_t>* buckets_;
    IndexSlot* slots_;
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
