// The last changes of a tenant's objects, numbered, for readers that follow them.
//
// Changes are counted from 0 at the start of the journal, which gets a random number of its own, its life. A change that no
// longer fits is forgotten, the oldest first. So a reader that names another life, or a forgotten change, has lost some.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace farpool {

enum class Change : std::uint8_t {
    stored = 1,
    kept = 2,     // never evicted from now on
    let_go = 3,   // no longer kept
    dropped = 4,  // deleted by a program
    expired = 5,
    evicted = 6,
    damaged = 7,   // its record or its payload
    outdated = 8,  // a new epoch made all objects with smaller serials unreadable
};

struct Changed {
    Change change;
    std::uint64_t serial;
    std::string key;  // empty if a program has damaged it
    std::uint64_t nbytes = 0;
    std::uint64_t expiry = 0;  // word of the expiry when the change was made
    std::uint8_t copies = 0;
};

class Journal {
public:
    // Bytes of keys for which there is room, per change. With longer keys the journal has fewer changes.
    static constexpr std::size_t key_nbytes = 64;

    // Memory of a journal on a node that lends `capacity` bytes.
    static std::uint64_t nbytes_for(std::uint64_t capacity);

    bool is_on() const noexcept { return !records_.empty(); }
    // Takes about `nbytes` of memory, and records changes from now on. Throws std::bad_alloc.
    void begin(std::uint64_t nbytes);
    void add(Change change, std::uint64_t serial, std::string_view key, std::uint64_t nbytes = 0, std::uint64_t expiry = 0,
             std::uint8_t copies = 0);

    std::uint64_t life() const noexcept { return life_; }
    // Numbers of the oldest change that is there, and of the next one.
    std::uint64_t first() const noexcept { return first_; }
    std::uint64_t end() const noexcept { return end_; }
    std::uint64_t nbytes() const noexcept { return records_.size() * (sizeof(Record) + key_nbytes); }
    Changed at(std::uint64_t number) const;

private:
    struct Record {
        std::uint64_t serial;
        std::uint64_t nbytes;
        std::uint64_t expiry;
        std::uint64_t key_at;  // bytes of keys before this one since the start
        std::uint16_t key_nbytes;
        Change change;
        std::uint8_t copies;
    };

    const Record& record(std::uint64_t number) const { return records_[number % records_.size()]; }

    std::uint64_t life_ = 0;
    std::vector<Record> records_;  // a ring
    std::vector<char> keys_;       // a ring
    std::uint64_t first_ = 0;
    std::uint64_t end_ = 0;
    std::uint64_t keys_end_ = 0;  // bytes of keys since the start
};

}  // namespace farpool
