// A tenant's published objects: where they lie, and which are evicted when there is no room.
//
// Objects are write-once: a key that is there keeps what it has. A publish is prepared (it has room), written by whoever
// publishes, and committed; until then nobody finds it. What is being read by a connection or pinned by a session is *held*: it
// leaves the index when it is dropped or expires, but its memory is not used again before the last holder lets it go.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/free_space.hpp"
#include "node/budget.hpp"
#include "node/index.hpp"
#include "node/shelf.hpp"
#include "node/visits.hpp"
#include "policy/marked_reuse.hpp"
#include "wire/frame.hpp"

namespace farpool {

// Result of a request on a key: its status, and the object if there is one.
struct Found {
    Status status = Status::missing;
    std::uint64_t serial = 0;
    std::uint32_t slot = 0;
    std::uint64_t offset = 0;   // of the extent in the data file; holds are counted by it
    std::uint64_t payload = 0;  // of the payload
    std::uint64_t nbytes = 0;
    std::uint32_t crc = 0;
    std::uint32_t pins = 0;
    std::uint32_t block = 0;  // where the payload lies in the NVMe file
    bool shelved = false;     // the payload lies in the NVMe file, not in memory
    bool visited = false;     // for an object in the file: it was visited before
    ObjectHead head{};
};

struct Listed {
    std::string key;
    std::uint64_t serial;
    std::uint64_t nbytes;
    std::uint64_t ttl_ms;
    std::uint32_t pins;
    std::uint8_t copies;
    bool kept;
};

// Number and bytes of the objects that a new epoch has made unreadable.
struct Rotated {
    std::uint64_t objects = 0;
    std::uint64_t nbytes = 0;
};

enum class Keep : std::uint8_t { as_it_is = 0, keep = 1, let_go = 2 };

// A mark that no object has. A touch that names it keeps only what is kept already.
constexpr std::uint64_t mark_of_none = ~std::uint64_t{0};

// Outcome of a touch. The mark names this object, its time to live and how often it was kept or let go; 0 without an object.
struct Touched {
    Status status;
    std::uint64_t mark;
};

class Objects {
public:
    struct Counts {
        std::uint64_t evictions = 0;
        std::uint64_t damaged = 0;    // of `evictions`: because their headers or keys were damaged
        std::uint64_t from_file = 0;  // of `evictions`: because the NVMe file had no room for them or failed
        std::uint64_t expired = 0;
        std::uint64_t adopted = 0;
        std::uint64_t payload_bytes = 0;  // in memory and in the file
        std::uint64_t shelved = 0;        // objects in the file
        std::uint64_t demotions = 0;
        std::uint64_t promotions = 0;
        std::uint64_t searches = 0;  // keys that were looked for in the index
        std::uint64_t gets = 0;      // objects that connections asked for
        std::uint64_t hits = 0;      // those that were there
    };

    // The tenant whose index file has this name; empty where the name is not that of an index.
    static std::optional<std::uint32_t> tenant_of(const std::string& file_name);

    struct Paths {
        std::string index, data;
    };

    // Adopts the tenant's files in the folder; those that do not fit together are removed, and `note` says why. If `fresh`, all
    // of them are removed, and the objects lie in anonymous memory, of which a killed node leaves nothing. `shelf`, the NVMe
    // file, may be null.
    Objects(const std::string& folder, std::uint32_t tenant, Budget& budget, Shelf* shelf, bool fresh, std::string& note);
    ~Objects();
    Objects(const Objects&) = delete;
    Objects& operator=(const Objects&) = delete;

    Found find(std::string_view key, bool visit);
    // Makes a place for a payload, which readers do not find before the commit. `present`, with the object, where the key has
    // one, which then gets the longer of both times to live. With `in_slices` only the first slice has memory at first.
    enum class Arrival { at_once, in_slices };
    Found prepare(std::string_view key, std::uint64_t nbytes, const ObjectHead& head, Arrival arrival = Arrival::at_once);
    // True if places for `nbytes` more may be announced beside those that were.
    bool may_announce(std::uint64_t nbytes) const { return announced_units_ * unit_nbytes + nbytes <= budget_.limit; }
    // Backs the next slice of a payload that is being received with memory; returns `done`, or why there is none.
    Status extend(std::uint64_t offset);
    // Bytes of a prepared payload that have memory.
    std::uint64_t writable(std::uint64_t offset) const;
    // Publishes a prepared object; `present`, as in prepare(), where another publisher was first.
    Found commit(std::uint64_t offset, std::uint64_t serial, std::uint32_t crc);
    bool abort(std::uint64_t offset, std::uint64_t serial);
    Status remove(std::string_view key);
    // With `seen` only if that is the object's mark. Otherwise `unknown`, because another program has kept, released or
    // extended the object since; but a kept object may always be kept again.
    Touched touch(std::string_view key, std::uint64_t ttl_ms, Keep keep, std::uint64_t seen = 0);

    std::uint32_t epoch() const noexcept { return epoch_; }
    // Objects that the epoch made unreadable when it began; zeros after a restart.
    const Rotated& begun() const noexcept { return begun_; }
    // Begins a new epoch, higher than the present one: no present object is found from now on, even after a restart. Held
    // objects stay in place until they are released, and the memory of many objects is freed little by little.
    void rotate(std::uint32_t epoch);

    // Brings the payload of a held object, as read from the file, back into memory. Returns where it lies then; empty where
    // there is no room. Holders of the old place keep it.
    std::optional<Found> promote(std::uint64_t offset, const Aside& payload);
    // Removes a held object whose payload could not be read from the file.
    void lose(std::uint64_t offset);
    // Moves the payload of a found object to the file; `done` also where it lies there or is on its way. Else nothing has
    // changed: `unknown` without a file, `busy` where it is pinned, kept or being read, `too_large` for the file, `full` where
    // the file has no room or as much is on its way as may be.
    Status demote(const Found& found);
    // Notes the end of a job of the NVMe file; false if it is not a write of one of these objects.
    bool written(std::uint64_t job, bool ok);

    void hold(const Found& found);
    void drop(std::uint64_t offset);
    // Pins an object: holds it as long as a program says, not only until a reply has been sent.
    void pin(const Found& found);
    void unpin(std::uint64_t offset);
    // Counts the programs that know where a payload lies: `change` is 1 or -1.
    void count_lent_out(std::int64_t change);

    // Bytes of the budget that these objects use. See reclaimable() for those that eviction could free.
    std::uint64_t used() const noexcept { return used_; }
    // Bytes of memory that the system has given for payloads and headers, holes included.
    std::uint64_t backed() const noexcept { return backed_nbytes_; }
    // Bytes used for the index and the marks of visits, beyond those that every tenant has from its beginning.
    std::uint64_t tables() const noexcept { return tables_; }
    // Bytes of memory that these objects' files take according to the system, index and marks of visits included.
    std::uint64_t taken() const { return data_.file.taken() + visits_->taken() + index_->segment().file.taken(); }
    std::uint64_t reclaimable() const noexcept { return (indexed_units_ - fixed_units_) * unit_nbytes; }
    // Moves one object to the NVMe file, or drops it, which frees its memory `at_once`. False where all that is left is in use
    // or kept.
    bool evict_one(bool at_once = false);
    // True if the object may be pinned or kept: all that cannot be evicted stays within the tenant's share, an eighth of which
    // is left for objects that come and go. So a program that may only read cannot keep others from publishing.
    bool may_fix(const Found& found) const;
    // True if a reply may hold this object. `nbytes`: held by other replies to its access key, which may hold `most` in all.
    bool may_send(const Found& found, std::uint64_t nbytes, std::uint64_t most) const;
    // Bytes of memory that an object takes.
    std::uint64_t room_of(const Found& found) const { return std::uint64_t{index_->at(found.slot).units} * unit_nbytes; }
    void count_get() { ++counts_.gets; }
    void count_hit() { ++counts_.hits; }
    // Changes the count of bytes that replies hold.
    void count_unsent(std::int64_t change) { unsent_ += static_cast<std::uint64_t>(change); }
    // Looks at the next `slots` slots and removes objects that have expired or are of an earlier epoch.
    void sweep(std::size_t slots);
    // Gives the memory of holes back to the system.
    void trim();
    // Returns the memory to the system that holes have not used during the last `idle_rounds` calls, at most `most` bytes in
    // this call. True if it looked at holes, which takes up to some milliseconds.
    static constexpr int idle_rounds = 30;
    bool return_idle(std::uint64_t most);

    // Place from which a listing goes on behind the key `after`; 0 for an empty one, the beginning.
    std::uint64_t place_of(std::string_view after) const { return after.empty() ? 0 : Index::reversed(index_->hash(after)); }
    // Lists objects with the prefix behind `after`, from `place` on, until at least `limit` are found or enough was looked at
    // for one call. Moves `place` on, to 0 at the end.
    void list(std::uint64_t& place, std::string_view after, std::string_view prefix, std::size_t limit,
              std::vector<Listed>& found) const;
    std::byte* at(std::uint64_t offset) const noexcept { return data_.memory.data() + offset; }
    std::size_t size() const noexcept { return index_->size(); }
    const Counts& counts() const noexcept { return counts_; }
    // Bytes that objects take beside their keys and payloads.
    std::uint64_t overhead() const noexcept;
    // Bytes of the data file behind its header: places for objects, more than there is memory for.
    std::uint64_t room() const noexcept { return data_.nbytes(); }
    const Paths& paths() const noexcept { return paths_; }
    // Descriptors of the index, for reading only, and of the data file, owned by the caller. Throws std::system_error.
    std::pair<int, int> open_files(bool writable) const;
    Visits& visits() noexcept { return *visits_; }
    // Ends a session's marks of visits; those that it has set count as the node's own.
    void end_visits(std::uint64_t session) { visits_->end(session, index_->slots_used()); }
    void retire() { index_->set_retired(true); }
    void remove_files();

private:
    // Step in which the data segment is backed by memory, as long as the node has enough.
    static constexpr std::uint64_t chunk_nbytes = std::uint64_t{2} << 20;
    // Step in which a payload that is being received takes memory, as its bytes come.
    static constexpr std::uint64_t slice_nbytes = std::uint64_t{128} << 10;
    // A payload of at most this size gets all of its memory at first, even if it comes in slices.
    static constexpr std::uint64_t one_slice_nbytes = std::uint64_t{1} << 20;

    struct Preparation {
        std::string key;
        std::uint64_t serial;
        std::uint64_t expiry;
        std::uint32_t units;  // places in the data file
        std::uint32_t taken;  // units that have memory
        ObjectHeader header;
        bool copied;          // from another node
        std::uint32_t epoch;  // epoch on that node
    };
    struct Held {
        std::uint32_t count = 0;
        std::uint32_t pins = 0;  // holds that are pins
        bool gone = false;       // no longer in the index: freed by the last holder
        std::uint32_t slot = 0;
        std::uint32_t units = 0;
        std::uint32_t block = 0;
        std::uint32_t blocks = 0;
    };
    // Lengths of an object's key and padding, private to the node, as publishers may write headers.
    struct Shape {
        std::uint16_t last_of_key : 8;  // bytes of the key, less 1
        std::uint16_t padding : 6;      // bytes behind the payload, but for whole units
    };
    // An object that is being written to the NVMe file. It stays in memory, and is found there, until the file has it.
    struct Leaving {
        std::uint64_t offset;  // where its header and key will lie
        std::uint32_t units;
        std::uint32_t block;
        std::uint32_t blocks;
    };

    void open(std::uint64_t lent, std::uint64_t places, bool fresh, std::string& note);
    bool fits(const ObjectHeader& header, const Index::Entry& entry) const;
    void count(std::uint32_t slot, const ObjectHeader& header);
    void discount(std::uint32_t slot);
    std::size_t key_nbytes(std::uint32_t slot) const { return std::size_t{shapes_[slot].last_of_key} + 1; }
    std::uint64_t payload_nbytes(std::uint32_t slot) const;
    bool adopt(std::uint32_t slot);
    void leave_old_file(std::string& note);
    std::uint32_t slot_of(std::string_view key, std::uint64_t hash) const;
    bool is_intact(std::uint32_t slot) const;
    ObjectHeader& header_at(std::uint64_t offset) const noexcept { return *data_.memory.at<ObjectHeader>(offset); }
    std::string_view key_at(std::uint32_t slot) const;
    // The slot of a live object of this key; one that has expired or is of an earlier epoch is taken out.
    std::uint32_t live_slot(std::string_view key, std::uint64_t hash);
    Found found_at(std::uint32_t slot) const;
    Found present(std::uint32_t slot, std::uint64_t expiry);
    // Remembers a dropped key by its hash, and refuses copies of it for some time: a copy from another node may be under way
    // while the key is dropped, read before and written after.
    void remember_drop(std::uint64_t hash);
    bool dropped_lately(std::uint64_t hash) const;
    // True if the object has expired or is of an earlier epoch.
    bool is_over(const Index::Entry& entry) const;
    void take_out_over(std::uint32_t slot);
    bool is_fixed(const Index::Entry& entry) const { return (entry.expiry & kept_flag) != 0 || held_.contains(entry.offset); }
    bool is_pinned(std::uint64_t offset) const {
        const auto held = held_.find(offset);
        return held != held_.end() && held->second.pins > 0;
    }
    bool is_firm(const Index::Entry& entry) const { return (entry.expiry & kept_flag) != 0 || is_pinned(entry.offset); }
    void set_expiry(std::uint32_t slot, std::uint64_t expiry);
    // Takes an extent of `units` in the data file, with memory for the first `taken` of them. Empty where there is no room.
    std::optional<std::uint64_t> alloc(std::uint32_t units, std::uint32_t taken);
    std::optional<std::uint64_t> alloc(std::uint32_t units) { return alloc(units, units); }
    void free_prepared(std::uint64_t offset, const Preparation& prepared);
    // Returns the memory of whole pages in a range to the system; the result is their bytes.
    std::uint64_t release(std::uint64_t begin, std::uint64_t end);
    // Bytes of memory in holes, with pages that a hole shares with an object.
    std::uint64_t hole_nbytes() const;
    void free_extent(std::uint64_t offset, std::uint32_t units);
    void free_blocks(std::uint32_t block, std::uint32_t blocks);
    // Takes an object out of the index and frees its memory unless it is held.
    void take_out(std::uint32_t slot);
    void evict(std::uint32_t slot);
    bool demote(std::uint32_t slot);  // false where nothing was changed
    std::optional<std::uint32_t> alloc_blocks(std::uint32_t blocks);
    // The live slot of a held object; `none` where the object has gone.
    std::uint32_t held_slot(std::uint64_t offset) const;
    std::uint32_t enter(const ObjectHeader& settings, std::string_view key, const Index::Entry& entry);
    policy::MarkedReuse& queue_of(const Index::Entry& entry) { return entry.blocks == 0 ? *upper_ : *lower_; }
    void enqueue(std::uint32_t slot, const Index::Entry& entry);
    void unqueue(std::uint32_t slot, const Index::Entry& entry, policy::Leaving why);
    auto in_use() const {
        return [this](std::uint32_t slot) { return held_.contains(index_->at(slot).offset); };
    }
    bool evict_from_bucket(std::uint64_t hash);
    void evict_around(std::uint32_t units);
    // True if `nbytes` more are free or can be freed by eviction, and the system can back them with memory.
    bool can_take(std::uint64_t nbytes) const;
    bool back_extent(std::uint64_t offset, std::uint32_t units, std::optional<std::uint32_t> ahead = {});
    bool back_pages(std::uint64_t begin, std::uint64_t end);
    std::uint64_t mark_pages(std::uint64_t begin, std::uint64_t end, bool backed);  // bytes that were not so before
    void forget_backing(bool backed);
    void take(std::uint32_t units);
    void give(std::uint32_t units);
    // Makes room in the index for one more entry, and for its mark of visits; false where there is none.
    bool reserve_slot();
    void charge_tables();

    std::uint32_t tenant_;
    std::uint32_t epoch_ = 0;
    std::uint64_t first_serial_ = 0;  // of the epoch
    Rotated begun_;
    Rotated outdated_;  // in the index still, of earlier epochs
    Budget& budget_;
    Paths paths_;
    Segment data_;
    std::unique_ptr<Index> index_;
    std::unique_ptr<Visits> visits_;
    Shelf* shelf_;
    policy::Marks marks_;                                      // of visits
    std::unique_ptr<policy::MarkedReuse> upper_;               // of what lies in memory and is not kept or leaving
    std::unique_ptr<policy::MarkedReuse> lower_;               // of what lies in the file and is not kept
    std::unordered_map<std::uint64_t, Leaving> leaving_;       // by offset of the extent, until that is free
    std::unordered_map<std::uint64_t, std::uint64_t> writes_;  // offsets of the extents, which are held meanwhile, by job
    std::unique_ptr<FreeSpace> space_;
    std::unordered_map<std::uint64_t, Preparation> preparations_;
    std::uint64_t announced_units_ = 0;  // units with a place that get memory as their bytes come
    static constexpr std::uint64_t drops_kept_ms = 60'000;
    static constexpr std::size_t most_drops = 65536;
    std::unordered_map<std::uint64_t, std::uint64_t> dropped_;   // until when a dropped key is remembered, by its hash
    std::deque<std::pair<std::uint64_t, std::uint64_t>> drops_;  // until when, and hash; oldest first
    std::unordered_map<std::uint64_t, Held> held_;
    std::vector<Shape> shapes_;             // by slot
    std::vector<std::uint8_t> free_units_;  // by slot: whole units behind the payload in its last block; empty without a file
    std::vector<bool> backed_;              // by page of the data segment
    std::uint64_t backed_nbytes_ = 0;
    std::uint64_t backed_end_ = 0;                       // offset from which on no page is backed
    int rounds_ = 0;                                     // calls of return_idle() since it began to watch holes
    std::uint64_t least_holes_ = 0;                      // bytes of holes in the round that had the fewest
    std::uint64_t idle_nbytes_ = 0;                      // bytes of holes that are still to be returned
    std::pair<std::int64_t, std::int64_t> next_idle_{};  // the hole to look at next: units, offset
    std::uint64_t next_idle_end_ = 0;                    // end of the part of it that is still to be looked at
    std::uint64_t used_ = 0;
    std::uint64_t tables_ = 0;  // bytes of `used_`, as tables()
    std::uint64_t indexed_units_ = 0;
    std::uint64_t fixed_units_ = 0;   // units of objects in the index that cannot be evicted
    std::uint64_t firm_units_ = 0;    // units of kept or pinned objects, also of those no longer in the index
    std::uint64_t unsent_ = 0;        // bytes of objects that replies hold
    std::uint64_t header_bytes_ = 0;  // headers and padding of the objects in the index
    std::uint32_t sweep_at_ = 0;
    std::int64_t lent_out_ = 0;
    Counts counts_;
};

}  // namespace farpool
