// The objects in a catalogue's index, with their memory: how they enter and leave, who uses them, and what that costs.
//
// An object to which a reply or a pin refers leaves the index when it is deleted or expires, and its memory is released with
// the last reference.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>

#include "node/catalogue/epochs.hpp"
#include "node/catalogue/index.hpp"
#include "node/catalogue/journal.hpp"
#include "node/catalogue/media.hpp"
#include "node/catalogue/queues.hpp"
#include "node/catalogue/records.hpp"
#include "node/catalogue/references.hpp"
#include "node/catalogue/room.hpp"
#include "wire/frame.hpp"

namespace farpool {

// Result of a request on a key: its status, and the object if there is one.
struct Found {
    Status status = Status::missing;
    std::uint64_t serial = 0;
    std::uint32_t slot = 0;
    std::uint64_t offset = 0;           // of the extent in the data file; references are counted by it
    std::uint64_t payload = 0;          // offset of the payload, if it is in RAM
    std::uint64_t nbytes = 0;           // of the payload
    const std::byte* view = nullptr;    // the payload in the node's memory; null: read it with Medium::get()
    bool is_mapped_by_readers = false;  // programs that map the tenant's files can read the payload, and may pin it
    std::uint32_t block = 0;            // place of the payload in the lower medium
    std::uint32_t crc = 0;
    std::uint32_t pins = 0;
    bool visited = false;  // for an object in the lower medium: it was visited before
    ObjectHead head{};
};

class Entries {
public:
    struct Counts {
        std::uint64_t evictions = 0;
        std::uint64_t damaged = 0;    // part of `evictions`: headers or keys were damaged
        std::uint64_t from_file = 0;  // part of `evictions`: the lower medium had no room or failed
        std::uint64_t expired = 0;
        std::uint64_t adopted = 0;
        std::uint64_t payload_bytes = 0;  // in all media
        std::uint64_t shelved = 0;        // objects in the lower medium
        std::uint64_t demotions = 0;
        std::uint64_t promotions = 0;
        std::uint64_t retained = 0;            // objects with a priority above 0
        std::uint64_t retained_bytes = 0;      // of their payloads
        std::uint64_t retained_evictions = 0;  // part of `evictions`
        std::uint64_t searches = 0;            // keys that were searched in the index
        std::uint64_t gets = 0;                // objects that connections requested
        std::uint64_t hits = 0;                // requested objects that were found
        std::uint64_t lookups = 0;             // keys that connections looked up
        std::uint64_t found = 0;               // keys of lookups that have an object
        std::uint64_t puts = 0;                // objects that connections put
    };

    Entries(std::uint32_t tenant, Room& room, Index& index, Media& media);

    // The slot of the live object of a key; `Index::none` if there is none. Removes a damaged or outdated one that it finds.
    std::uint32_t find(std::string_view key, std::uint64_t hash);
    Index::Entry at(std::uint32_t slot) const { return index_.at(slot); }
    Found found_at(std::uint32_t slot) const;
    void visit(std::uint32_t slot) { queues_.visit(slot); }
    // Makes room in the index for one more entry and for its mark of visits; false if there is none.
    bool reserve_slot();
    // Writes the record of an extent and enters it into the index. Call reserve_slot() first.
    std::uint32_t enter(const ObjectHeader& settings, std::string_view key, const Index::Entry& entry,
                        const Retained& retained = {});
    // Enters the object in a slot of an earlier start; false if it is not intact.
    bool adopt(std::uint32_t slot);
    // Removes an object from the index, and releases its memory unless it has references. For an object that stays at another
    // place, or that no reader of the journal has seen.
    void remove(std::uint32_t slot);
    // Removes an object that is gone with that, and tells the readers of the journal why.
    void remove(std::uint32_t slot, Change why);
    void evict(std::uint32_t slot, Change why = Change::evicted) {
        counts_.retained_evictions += priority(slot) > 0 ? 1 : 0;
        remove(slot, why);
        ++counts_.evictions;
    }
    void set_expiry(std::uint32_t slot, std::uint64_t word);

    std::uint8_t priority(std::uint32_t slot) const { return queues_.retention().priority(slot); }
    // Nothing if the priority has ended, although no sweep has taken it yet.
    Retained retained(std::uint32_t slot) const {
        return queues_.retention().has_ended(slot) ? Retained{} : queues_.retention().of(slot);
    }
    void set_retained(std::uint32_t slot, const Retained& retained);
    // Ends a session that retains objects, and returns their number. sweep() does what is left to do with many objects.
    std::size_t end_session(std::uint64_t session);

    // Add a reference to an object, and pin it: a program releases a pin, and the node releases a reference after its reply.
    void retain(std::uint64_t offset, std::uint32_t slot);
    void retain_again(std::uint64_t offset) { references_.add_again(offset); }
    void release(std::uint64_t offset);
    void pin(const Found& found);
    void unpin(std::uint64_t offset);
    // Key and bytes of memory of an object that has references. The key is empty if a program has damaged it.
    std::pair<std::string, std::uint64_t> held(std::uint64_t offset) const;
    std::uint32_t retained_slot(std::uint64_t offset) const { return references_.slot(offset); }
    bool is_fixed(const Index::Entry& entry) const { return is_kept(entry) || references_.contains(entry.offset); }
    // True if the object may be pinned or kept.
    bool may_fix(const Found& found) const;
    // True if a reply may refer to this object. `nbytes`: of objects of other replies to its access key, at most `nbytes_max`.
    bool may_send(const Found& found, std::uint64_t nbytes, std::uint64_t nbytes_max) const;

    // True if the object has expired or is of an earlier epoch.
    bool is_over(const Index::Entry& entry) const { return epochs_.is_outdated(entry.serial) || has_expired(entry.expiry); }
    // Checks the next `slots` slots, removes the objects that are over, and ends priorities whose time is over.
    void sweep(std::size_t slots);
    void rotate(std::uint32_t epoch) {
        epochs_.begin(epoch, index_, {index_.size(), counts_.payload_bytes});
        journal_.add(Change::outdated, index_.first_serial(), {});
    }

    Index& index() noexcept { return index_; }
    const Epochs& epochs() const noexcept { return epochs_; }
    const Records& records() const noexcept { return records_; }
    Queues& queues() noexcept { return queues_; }
    const Queues& queues() const noexcept { return queues_; }
    Journal& journal() noexcept { return journal_; }
    const Journal& journal() const noexcept { return journal_; }
    Counts& counts() noexcept { return counts_; }
    const Counts& counts() const noexcept { return counts_; }
    // True for an object that a reference keeps in memory.
    auto in_use() const {
        return [this](std::uint32_t slot) { return references_.contains(index_.at(slot).offset); };
    }
    // Bytes that objects take in addition to their keys and payloads.
    std::uint64_t overhead_nbytes() const noexcept;

private:
    static bool is_kept(const Index::Entry& entry) { return (entry.expiry & kept_flag) != 0; }
    bool is_firm(const Index::Entry& entry) const { return is_kept(entry) || references_.is_pinned(entry.offset); }
    bool fits(const ObjectHeader& header, const Index::Entry& entry) const;
    void enqueue(std::uint32_t slot, const Index::Entry& entry);
    void count_retained(std::uint32_t slot, bool more);
    void release_ended(std::size_t objects);
    void remove_over(std::uint32_t slot);
    void set_up(std::uint32_t slot, const ObjectHeader& header);
    void charge_tables();

    const std::uint32_t tenant_;
    Room& room_;
    Index& index_;
    Media& media_;
    Records records_;
    References references_;
    Queues queues_;
    Epochs epochs_;
    Journal journal_;
    Counts counts_;
    std::uint32_t sweep_at_ = 0;
};

}  // namespace farpool
