// The writer's side of an index segment: a linear hash table that readers in other processes search while it changes.
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
    // Fills in the layout of an index for a data segment of `capacity` bytes. The caller sets tenant and id.
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
    // The slot with this hash for which `same` is true; `none` if there is no such slot.
    template <typename Same>
    std::uint32_t find(std::uint64_t hash, Same same) const;
    // True if the bucket of this hash is so long that lookups there would be slow. That does not happen by chance, but readers
    // know the seed and can choose keys.
    bool is_crowded(std::uint64_t hash) const noexcept;
    // Makes room for one more entry and backs it with memory; false if there is no room or no memory.
    bool reserve();
    // Bytes of memory that the table has in addition to its first buckets and slots, and bytes that reserve() would add.
    std::uint64_t grown() const noexcept;
    std::uint64_t growth() const noexcept;
    // The slot that the next add() will fill.
    std::uint32_t next_slot() const noexcept { return spare_.empty() ? slots_used() : spare_.back(); }
    // Publishes an entry; readers find it before an older entry of the same key. Call reserve() first.
    std::uint32_t add(const Entry& entry);
    // Removes an entry. Readers do not find it once this returns, so its memory may be used again.
    void remove(std::uint32_t slot);
    Entry at(std::uint32_t slot) const noexcept;
    bool is_live(std::uint32_t slot) const noexcept;
    void set_expiry(std::uint32_t slot, std::uint64_t expiry) noexcept;

    // A serial that no object has had before, not even before a restart of the node.
    std::uint64_t next_serial() noexcept { return header_.next_serial.fetch_add(1, std::memory_order_relaxed); }
    // The tenant's epoch; empty if its word is damaged. Objects of earlier epochs have serials below first_serial().
    std::optional<std::uint32_t> epoch() const noexcept {
        return first_serial() <= header_.next_serial.load() ? epoch_in(header_.epoch.load()) : std::nullopt;
    }
    std::uint64_t first_serial() const noexcept { return header_.first_serial.load(std::memory_order_relaxed); }
    // Begins an epoch. We store its word last: a node that is killed before that has lost objects, and its clients report the
    // epoch again.
    void begin_epoch(std::uint32_t epoch, std::uint64_t first_serial) noexcept {
        header_.first_serial.store(first_serial, std::memory_order_release);
        header_.epoch.store(epoch_word(epoch), std::memory_order_release);
    }
    // Id of the lower medium to which the slots refer; 0 for none.
    std::uint64_t shelf() const noexcept { return header_.session; }
    void set_shelf(std::uint64_t id) noexcept;
    // True while programs know the places of payloads, from pins and preparations that have not ended.
    bool lent_out() const noexcept { return header_.lent_out.load(std::memory_order_relaxed) != 0; }
    // Counts these programs: `change` is 1 or -1. At a start the count is 0.
    void count_lent_out(std::int64_t change) noexcept {
        lent_out_ += change;
        header_.lent_out.store(lent_out_ > 0 ? 1 : 0, std::memory_order_relaxed);
    }
    // Tells readers that have the index mapped whether they must stop using it.
    void set_retired(bool retired) noexcept;

    // Rebuilds the table from the slots for which `keep` is true and drops all others.
    void adopt(const std::function<bool(std::uint32_t)>& keep);

    std::uint32_t slots_used() const noexcept;
    std::size_t size() const noexcept { return size_; }
    std::uint64_t buckets() const noexcept;
    // The live slots in a bucket.
    std::vector<std::uint32_t> bucket(std::uint64_t number) const;
    std::uint64_t bucket_of_hash(std::uint64_t hash) const noexcept;
    // Place of a hash in a walk over the table, and the end of the bucket that contains `place` (0 for the last one). A walk
    // visits hashes by their reversed bits: a bucket is a range of these, and a split of the bucket splits the range.
    static std::uint64_t reversed(std::uint64_t hash) noexcept;
    std::uint64_t next_place(std::uint64_t place) const noexcept;
    const Segment& segment() const noexcept { return segment_; }

private:
    IndexSlot& slot(std::uint32_t number) const noexcept { return slots_[number]; }
    void link(std::uint32_t number, std::uint64_t bucket);
    void split_one();
    bool back_to(std::uint64_t& backed, std::uint64_t end);
    // Offsets up to which buckets and slots must be backed with memory for one more entry.
    std::uint64_t buckets_end() const noexcept;
    std::uint64_t slots_end() const noexcept;

    Segment segment_;
    SegmentHeader& header_;
    std::atomic<std::uint32_t>* buckets_;
    IndexSlot* slots_;
    std::vector<std::uint32_t> spare_;
    // The slot that was removed last. We do not use it for the next entry: an object that moves gets another slot, so that
    // readers never confuse its two places.
    std::uint32_t resting_ = none;
    std::size_t size_ = 0;
    std::int64_t lent_out_ = 0;
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
