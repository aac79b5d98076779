// A tenant's published objects.
//
// Objects are write-once: a key that has an object keeps it. A publisher first prepares an object, which takes room, then its
// bytes are written, and then it is committed; readers do not find it before that. The parts of a catalogue are the index
// (index.hpp), the media of the payloads (media.hpp), the account of the room (room.hpp), the objects in the index
// (entries.hpp) and the eviction of objects (eviction.hpp).
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "node/budget.hpp"
#include "node/catalogue/entries.hpp"
#include "node/catalogue/eviction.hpp"
#include "node/catalogue/expiry.hpp"
#include "node/catalogue/journal.hpp"
#include "node/catalogue/media.hpp"
#include "node/catalogue/medium.hpp"
#include "node/catalogue/object_files.hpp"
#include "node/catalogue/recent_deletes.hpp"
#include "node/catalogue/room.hpp"

namespace farpool {

struct Listed {
    std::string key;
    std::uint64_t serial;
    std::uint64_t nbytes;
    std::uint64_t ttl_ms;
    std::uint32_t pins;
    std::uint8_t copies;
    bool kept;
};

enum class Keep : std::uint8_t { as_it_is = 0, keep = 1, let_go = 2 };

// Outcome of a touch. The mark stands for this object, its time to live and how often its keeping was changed; 0 without an
// object.
struct Touched {
    Status status;
    std::uint64_t mark;
};

class Catalogue final : public Evictable {
public:
    using Counts = Entries::Counts;

    // Adopts the tenant's files in the folder, or makes new ones; see open_object_files(). `lower` may be null.
    Catalogue(const std::string& folder, std::uint32_t tenant, Budget& budget, Medium* lower, bool fresh, std::string& note);
    ~Catalogue();
    Catalogue(const Catalogue&) = delete;
    Catalogue& operator=(const Catalogue&) = delete;

    Found find(std::string_view key, bool visit);
    // Makes a place for a payload. If the key has an object: `present`, with the object, which then gets the longer of both
    // times to live. With `in_slices`, only the first slice has memory at first.
    enum class Arrival { at_once, in_slices };
    Found prepare(std::string_view key, std::uint64_t nbytes, const ObjectHead& head, Arrival arrival = Arrival::at_once);
    // True if places for `nbytes` more may be announced in addition to the announced ones.
    bool may_announce(std::uint64_t nbytes) const { return room_.may_announce(nbytes); }
    // Backs the next slice of a payload that is being received with memory; returns `done`, or why there is none.
    Status extend(std::uint64_t offset);
    // Bytes of a prepared payload that have memory.
    std::uint64_t writable(std::uint64_t offset) const;
    std::byte* at(std::uint64_t offset) const noexcept { return media_.ram().at(offset); }
    // Publishes a prepared object; `present`, as in prepare(), if another publisher was first.
    Found commit(std::uint64_t offset, std::uint64_t serial, std::uint32_t crc);
    bool abort(std::uint64_t offset, std::uint64_t serial);
    // Deletes the object of a key, if there is one, and refuses copies of it from other nodes for some time.
    Status remove(std::string_view key);
    // Changes an object's time to live, and whether it is kept. With `seen` only if that is the object's mark. Otherwise the
    // result is `unknown`, because another program has kept, released or extended the object since; but a kept object may
    // always be kept again.
    Touched touch(std::string_view key, std::uint64_t ttl_ms, Keep keep, std::uint64_t seen = 0);
    // Gives an object another priority and another session (retention.hpp). If `raises`, not if its priority is higher now.
    Status retain(std::string_view key, const Retained& retained, bool raises = false);
    // Ends a session: all objects that it retains lose their priority. Returns their number.
    std::size_t end_session(std::uint64_t session) { return entries_.end_session(session); }

    std::uint32_t epoch() const noexcept { return entries_.epochs().epoch(); }
    const Rotated& begun() const noexcept { return entries_.epochs().begun(); }
    // Begins a new epoch, higher than the present one: no present object is found from now on, even after a restart. Held
    // objects stay in place until they are released, and the memory of many objects is freed little by little.
    void rotate(std::uint32_t epoch);

    // Add and release references of replies and pins to objects; see Entries.
    void retain(const Found& found) { entries_.retain(found.offset, found.slot); }
    void retain_again(std::uint64_t offset) { entries_.retain_again(offset); }
    void release(std::uint64_t offset) { entries_.release(offset); }
    void pin(const Found& found) { entries_.pin(found); }
    void unpin(std::uint64_t offset) { entries_.unpin(offset); }
    // Key and memory of a retained object. The key is empty if a program has damaged it.
    std::pair<std::string, std::uint64_t> held(std::uint64_t offset) const { return entries_.held(offset); }
    // Counts the programs that know the place of a payload: `change` is 1 or -1.
    void count_lent_out(std::int64_t change) { index_->count_lent_out(change); }
    bool may_fix(const Found& found) const { return entries_.may_fix(found); }
    bool may_send(const Found& found, std::uint64_t nbytes, std::uint64_t nbytes_max) const {
        return entries_.may_send(found, nbytes, nbytes_max);
    }
    // Bytes of RAM that an object takes.
    std::uint64_t ram_nbytes(const Found& found) const { return std::uint64_t{entries_.at(found.slot).units} * unit_nbytes; }
    void count_unsent(std::int64_t change) { room_.count_unsent(change); }
    void count_get() { ++entries_.counts().gets; }
    void count_hit() { ++entries_.counts().hits; }
    void count_put() { ++entries_.counts().puts; }
    void count_lookup(bool found) {
        ++entries_.counts().lookups;
        entries_.counts().found += found ? 1 : 0;
    }

    // Move payloads between media; see Eviction. copy_to_ram() is for a payload that has a view: it returns the object where it
    // is then, which is the old place if there is no room in RAM.
    Status demote(const Found& found) { return eviction_.demote(found); }
    std::optional<Found> promote(std::uint64_t offset, const std::byte* payload) { return eviction_.promote(offset, payload); }
    Found copy_to_ram(const Found& found);
    // Reads the payload of a retained object without a view into a buffer.
    void read(std::uint32_t block, std::shared_ptr<AlignedBuffer> into, Medium::Then then) {
        media_.lower().get(block, std::move(into), std::move(then));
    }
    // Removes a retained object whose payload the medium could not read.
    void lose(std::uint64_t offset);

    std::uint64_t used() const noexcept override { return room_.used(); }
    std::uint64_t reclaimable() const noexcept override { return room_.reclaimable(); }
    bool evict_one(bool at_once) override { return eviction_.evict_one(at_once); }
    void trim() override;
    // Bytes of memory that the system has given for payloads and headers, holes included.
    std::uint64_t backed() const noexcept { return media_.ram().backed(); }
    // Bytes of the index and the marks of visits, beyond the bytes that every tenant has from its start.
    std::uint64_t tables() const noexcept { return room_.tables(); }
    // Bytes of memory that the catalogue's files take according to the system.
    std::uint64_t taken() const;
    std::uint64_t overhead_nbytes() const noexcept { return entries_.overhead_nbytes(); }
    std::size_t size() const noexcept { return index_->size(); }
    const Counts& counts() const noexcept { return entries_.counts(); }
    // As in Entries and Ram. Call them regularly.
    void sweep(std::size_t slots) { entries_.sweep(slots); }
    bool return_idle(std::uint64_t nbytes_max) { return media_.ram().return_idle(nbytes_max); }

    // Place from which a listing continues after a key; 0 for an empty key, the start.
    std::uint64_t place_of(std::string_view after) const { return after.empty() ? 0 : Index::reversed(index_->hash(after)); }
    // Lists objects with a prefix, from `place` and after the key `after`, until at least `limit` are found or one call has
    // searched enough. Moves `place` on, to 0 at the end.
    void list(std::uint64_t& place, std::string_view after, std::string_view prefix, std::size_t limit,
              std::vector<Listed>& found) const;

    // The last changes of objects; see Journal.
    Journal& journal() noexcept { return entries_.journal(); }

    const ObjectPaths& paths() const noexcept { return paths_; }
    // Descriptors of the index, for reading only, and of the data file, owned by the caller. Throws std::system_error.
    std::pair<int, int> open_files(bool writable) const;
    Visits& visits() noexcept { return entries_.queues().visits(); }
    // Ends a session's marks of visits; the visits that it has marked count as the node's own.
    void end_visits(std::uint64_t session) { visits().end(session, index_->slots_used()); }
    void retire() { index_->set_retired(true); }
    void remove_files();

private:
    struct Preparation {
        std::string key;
        std::uint64_t serial;
        std::uint64_t expiry;
        std::uint32_t units;  // of the place in the data file
        std::uint32_t taken;  // units that have memory
        ObjectHeader header;
        bool copied;          // from another node
        std::uint32_t epoch;  // on that node
        std::uint8_t priority;
    };

    Catalogue(ObjectPaths paths, std::uint32_t tenant, Budget& budget, Medium* lower, ObjectFiles files, std::string& note);
    void leave_old_file(std::string& note);
    Found present(std::uint32_t slot, std::uint64_t expiry, std::uint8_t priority);
    bool is_refused(bool copied, std::uint32_t epoch, std::uint64_t hash) const;
    void free_prepared(std::uint64_t offset, const Preparation& prepared);

    ObjectPaths paths_;
    Room room_;
    std::unique_ptr<Index> index_;
    Media media_;
    Entries entries_;
    Eviction eviction_;
    std::unordered_map<std::uint64_t, Preparation> preparations_;  // by offset of the extent
    RecentDeletes deletes_;
};

}  // namespace farpool
