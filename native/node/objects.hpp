// A tenant's published objects: where they lie, which generation of a key counts, who has to go when there is no room.
//
// Objects are immutable. A publish is prepared (it has room), written by whoever publishes, and committed; until then nobody finds it.
// What is being read by a connection or pinned by a session is *held*: it leaves the index when it is replaced, deleted or
// expired, but its memory is not used again before the last holder lets it go.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/free_space.hpp"
#include "node/index.hpp"
#include "node/shelf.hpp"
#include "policy/sieve.hpp"
#include "wire/frame.hpp"

namespace farpool {

// What a node may lend altogether, and how much of it is in use.
struct Budget {
    std::uint64_t limit;
    std::uint64_t used = 0;
    std::uint64_t objects = 0;  // of that
    std::uint64_t backed = 0;   // memory that the system has given for objects, their holes included
    // Memory that the system has given.
    std::uint64_t taken() const noexcept { return used - objects + backed; }
    std::uint64_t left() const noexcept { return used < limit ? limit - used : 0; }
};

// What a request on a key came to. A generation as on the wire's page.
struct Outcome {
    Status status;
    std::uint64_t generation = 0;
};

struct Found : Outcome {
    std::uint32_t slot = 0;
    std::uint64_t offset = 0;  // of the extent in the data file: what holds are by
    std::uint64_t payload = 0;  // of the payload
    std::uint64_t nbytes = 0;
    std::uint64_t expiry = 0;
    std::uint32_t crc = 0;
    std::uint32_t pins = 0;
    std::uint32_t block = 0;              // where the payload lies in the file
    bool shelved = false;                 // it lies there, not in memory
    bool visited = false;                 // before
    std::shared_ptr<Aside> aside;         // the payload, while it is on its way to the file
};

struct Prepared : Outcome {
    std::uint64_t offset = 0;
    std::uint64_t payload = 0;
};

struct Listed {
    std::string key;
    std::uint64_t generation;
    std::uint64_t nbytes;
    std::uint64_t expiry;
    std::uint32_t pins;
};

class Objects {
public:
    struct Counts {
        std::uint64_t evictions = 0;
        std::uint64_t expired = 0;
        std::uint64_t adopted = 0;
        std::uint64_t tombstones = 0;
        std::uint64_t payload_bytes = 0;  // in memory and in the file
        std::uint64_t shelved = 0;        // objects
        std::uint64_t demotions = 0;
        std::uint64_t promotions = 0;
    };

    // Whose index a file of this name is; nothing where it is none.
    static std::optional<std::uint32_t> tenant_of(const std::string& file_name);

    struct Paths {
        std::string index, data;
    };

    // Adopts what lies in the folder unless `fresh`; files that do not fit together are removed, and `note` says why.
    // `shelf` may be null.
    Objects(const std::string& folder, std::uint32_t tenant, Budget& budget, Shelf* shelf, bool fresh, std::string& note);
    ~Objects();
    Objects(const Objects&) = delete;
    Objects& operator=(const Objects&) = delete;

    Found find(std::string_view key, bool visit);
    Prepared prepare(std::string_view key, std::uint64_t nbytes, std::uint64_t expiry, std::uint64_t generation);
    Outcome commit(std::uint64_t offset, std::uint64_t generation, std::uint32_t crc);
    bool abort(std::uint64_t offset, std::uint64_t generation);
    Outcome remove(std::string_view key, std::uint64_t generation);
    Outcome touch(std::string_view key, std::uint64_t expiry);
    Outcome forget(std::string_view key, std::uint64_t generation);

    // Brings a payload that was read from the file back into memory; where it lies then, nothing where there is no room for
    // it. A holder of the old place keeps that.
    std::optional<Found> promote(std::uint64_t offset, std::uint64_t generation, const Aside& payload);
    // A payload could not be read from the file.
    void lose(std::uint64_t offset, std::uint64_t generation);
    // A job of the shelf has ended; false if it is not one of these objects' writes.
    bool written(std::uint64_t job, bool ok);

    void hold(const Found& found);
    // One more program (or one less) has been told where a payload lies.
    void count_lent_out(std::int64_t change);
    void drop(std::uint64_t offset);

    // Frees at least that many bytes of the budget by evicting; false where it cannot.
    bool make_room(std::uint64_t nbytes);
    // Bytes that evicting everything would free.
    std::uint64_t reclaimable() const noexcept { return (indexed_units_ - held_units_) * unit_nbytes; }
    // Bytes of memory that the system has given for payloads and headers.
    std::uint64_t backed() const noexcept { return backed_nbytes_; }
    // Looks at some slots for what has expired.
    void sweep(std::size_t slots);
    // Gives the memory of holes back to the system.
    void trim();

    // Where a listing goes on behind a key; 0 for none.
    std::uint64_t place_of(std::string_view after) const { return after.empty() ? 0 : Index::reversed(index_->hash(after)); }
    // Adds what lies behind `after`, from `place` on, until there are at least `limit` or enough was looked at for once; moves
    // `place`, to 0 at the end.
    void list(std::uint64_t& place, std::string_view after, std::string_view prefix, std::size_t limit, bool tombstones,
              std::vector<Listed>& found) const;
    std::byte* at(std::uint64_t offset) const noexcept { return data_.memory.data() + offset; }
    std::size_t size() const noexcept { return index_->size(); }
    const Counts& counts() const noexcept { return counts_; }
    // Bytes that objects take beside their keys and payloads.
    std::uint64_t overhead() const noexcept;
    std::uint64_t capacity() const noexcept { return data_.nbytes(); }
    const Paths& paths() const noexcept { return paths_; }
    // The marks of visits: memory that has no name. The descriptor stays this object's.
    const File& visited() const noexcept { return visited_.file; }
    void retire() { index_->set_retired(true); }
    void remove_files();

private:
    // The data segment is backed by memory in steps of this, as long as the node has enough.
    static constexpr std::uint64_t chunk_nbytes = std::uint64_t{2} << 20;

    struct Preparation {
        std::string key;
        std::uint64_t nbytes;
        std::uint64_t expiry;
        std::uint64_t generation;
        std::uint32_t units;
    };
    struct Held {
        std::uint32_t count = 0;
        bool gone = false;  // no longer in the index: freed by the last holder
        std::uint32_t units = 0;
        std::uint32_t block = 0;
        std::uint32_t blocks = 0;
    };
    // What the node has to know of an object: publishers may write headers, so it keeps this to itself.
    struct Shape {
        std::uint16_t last_of_key : 8;  // bytes of the key, less 1
        std::uint16_t padding : 6;      // bytes behind the payload, but for whole units
        std::uint16_t tombstone : 1;
    };
    struct Writing {
        std::uint64_t generation;
        std::shared_ptr<Aside> payload;
    };

    void open(std::uint64_t capacity, bool fresh, std::string& note);
    void make_visited();
    bool fits(const ObjectHeader& header, const Index::Entry& entry) const;
    void count(std::uint32_t slot, const ObjectHeader& header);
    void discount(std::uint32_t slot);
    std::size_t key_nbytes(std::uint32_t slot) const { return std::size_t{shapes_[slot].last_of_key} + 1; }
    std::uint64_t payload_nbytes(std::uint32_t slot) const;
    bool adopt(std::uint32_t slot);
    void leave_old_file();
    std::uint32_t slot_of(std::string_view key, std::uint64_t hash) const;
    bool is_intact(std::uint32_t slot) const;
    ObjectHeader& header_at(std::uint64_t offset) const noexcept { return *data_.memory.at<ObjectHeader>(offset); }
    std::string_view key_at(std::uint32_t slot) const;
    // The slot if its object has not expired; expired ones go.
    std::uint32_t live_slot(std::string_view key, std::uint64_t hash);
    std::optional<std::uint64_t> alloc(std::uint32_t units);
    void free_extent(std::uint64_t offset, std::uint32_t units);
    void free_blocks(std::uint32_t block, std::uint32_t blocks);
    // Out of the index; its memory is free unless it is held.
    void take_out(std::uint32_t slot);
    void drop_knowledge(std::uint32_t slot);  // take_out, and the floor remembers
    // Moved to the file, or forgotten.
    void leave(std::uint32_t slot);
    bool demote(std::uint32_t slot);  // whether the slot is empty now
    std::optional<std::uint32_t> alloc_blocks(std::uint32_t blocks);
    // The live slot of this very object; none where it has gone.
    std::uint32_t slot_at(std::uint64_t offset, std::uint64_t generation) const;
    std::uint32_t enter(const ObjectHeader& settings, std::string_view key, Index::Entry entry);
    policy::Policy& queue_of(const Index::Entry& entry) { return entry.blocks == 0 ? *sieve_ : *lower_; }
    void enqueue(std::uint32_t slot, const Index::Entry& entry) { queue_of(entry).insert(slot, {entry.hash, entry.units}); }
    auto in_use() const {
        return [this](std::uint32_t slot) { return held_.contains(index_->at(slot).offset); };
    }
    bool evict_one();
    void evict_around(std::uint32_t units);
    bool is_tombstone(std::uint32_t slot) const;
    Outcome publish(std::uint64_t offset, const Preparation& what, std::uint32_t crc, std::uint16_t flags);
    bool back_extent(std::uint64_t offset, std::uint32_t units);
    bool back_pages(std::uint64_t begin, std::uint64_t end);
    std::uint64_t mark_pages(std::uint64_t begin, std::uint64_t end, bool backed);  // bytes that were not so before
    void forget_backing(bool backed);
    void take(std::uint32_t units);
    void give(std::uint32_t units);
    bool back_visited(std::uint64_t slot);

    std::uint32_t tenant_;
    Budget& budget_;
    Paths paths_;
    Segment data_;
    Segment visited_;
    std::unique_ptr<Index> index_;
    Shelf* shelf_;
    policy::Marks marks_;                   // of visits: in `visited_`, where mapped readers set them
    std::unique_ptr<policy::Policy> sieve_;  // of what lies in memory
    std::unique_ptr<policy::Policy> lower_;  // of what lies in the file
    std::unordered_map<std::uint64_t, Writing> writing_;      // by the extent, which is held meanwhile
    std::unordered_map<std::uint64_t, std::uint64_t> writes_;  // the extents by job
    std::unique_ptr<FreeSpace> space_;
    std::unordered_map<std::uint64_t, Preparation> preparations_;
    std::unordered_map<std::uint64_t, Held> held_;
    std::vector<Shape> shapes_;            // by slot
    std::vector<std::uint8_t> free_units_;  // by slot: whole units behind the payload in its last block; empty without a file
    std::vector<bool> backed_;  // by page of the data segment
    std::uint64_t backed_nbytes_ = 0;
    std::uint64_t trimmed_ = 0;  // backed bytes of the node after the last trim
    std::uint64_t visited_backed_ = 0;  // slots
    std::uint64_t indexed_units_ = 0;
    std::uint64_t held_units_ = 0;  // of those in the index that cannot be evicted
    std::uint64_t header_bytes_ = 0;  // headers and padding of the objects in the index
    std::uint32_t sweep_at_ = 0;
    std::int64_t lent_out_ = 0;
    Counts counts_;
};

}  // namespace farpool
