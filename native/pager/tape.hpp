// The tape: the recorded sequence of accesses, and the place of the program in it.
//
// The tape is the history. A program that loops repeats the accesses that followed the last time it was in the same context, so
// a pointer follows the present at a distance of one turn of the loop. At each access it moves on by one; the accesses between
// the pointer and the present are the known future. The context is the last few accesses. When the program does something else
// than the pointer predicts, the pointer searches the history for the context and goes on from there. No caller has to say what
// a step is:
//
// - an inner loop (micro-batches) inside an outer one (optimizer steps): at the end of the inner loop the pointer jumps once,
// to
//   the end of the inner loop of the turn before. From then on the distance is a whole outer turn;
// - training and evaluation, or prefill and decode: each is found again by its own context;
// - accesses picked by data (rows of a table) are a single wildcard, so they do not break the context.
//
// Positions count accesses from the beginning and only grow. The history is a ring; the oldest accesses are overwritten.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "pager/allocated.hpp"

namespace farpool::pager {

// Added to the key of a next use if the block need not be kept until that use (see retention.hpp).
inline constexpr std::int64_t spare = std::int64_t{1} << 60;
// Key of a next use beyond the known future. The time since the last use is added, so that the least recently used block is
// evicted first.
inline constexpr std::int64_t never = std::int64_t{1} << 61;

// The position of the next use in a key; keys of `never` or more are returned unchanged.
constexpr std::int64_t coming_use(std::int64_t key) { return key >= never ? key : key & (spare - 1); }
// A position as a time, with room before the next position for accesses to rows of one table, which share a position.
constexpr std::int64_t moment(std::int64_t position) { return position << 16; }
// Key of a block of unknown next use that is worth keeping until the time `worth`; and its inverse.
constexpr std::int64_t key_until(std::int64_t worth) { return 2 * never - worth; }
constexpr std::int64_t worth_of(std::int64_t key) { return 2 * never - key; }
// Key of a block of unknown next use that was last used at `position`.
constexpr std::int64_t unknown_use(std::int64_t position) { return key_until(moment(position)); }

class Tape {
public:
    struct Token {
        std::int64_t name;  // of the first block; -1 for a wildcard
        std::int32_t count;
        bool created;  // the program had just made the blocks, so that they had no content
    };

    // `length`: accesses to remember; a loop longer than this is not predicted.
    explicit Tape(std::int64_t length);

    // Appends an access to `count` blocks from `name` on, of `nbytes` bytes; the program computed for `busy` seconds before it.
    // Returns the key of these blocks: their next use, or `never` and more if it is not known.
    std::int64_t record(std::int32_t name, std::int32_t count, std::int64_t nbytes, bool created, double busy);
    // Appends an access to rows of a table, picked by data; consecutive ones count as one.
    std::int64_t record_table(std::int32_t name, double busy);

    // Seconds that the program computed after the access at `position`.
    struct Late {
        std::int64_t position;
        double seconds;
    };
    // Adds seconds that become known later. Adding many at once takes no longer than adding one.
    void add_times(std::span<const Late> times);

    // Position of the latest access; -1 before the first one.
    std::int64_t now() const noexcept { return now_; }
    // Position of the pointer: the access after it is expected next; -1 if the history has no such context.
    std::int64_t pointer() const noexcept { return pointer_; }
    // True if the latest access was expected.
    bool foretold() const noexcept { return foretold_; }
    std::int64_t divergences() const noexcept { return divergences_; }
    // Number of times that the pointer jumped or got lost; keys from before a jump are invalid.
    std::int64_t jumps() const noexcept { return jumps_; }
    // True if the future is known well enough to act on it.
    bool followed() const noexcept { return confirmed_ >= confirm; }

    Token token(std::int64_t position) const;
    std::int64_t nbytes(std::int64_t position) const { return at(position).nbytes; }
    // Bytes accessed after position `start`, up to and with `stop`.
    std::int64_t volume(std::int64_t start, std::int64_t stop) const { return at(stop).volume - at(start).volume; }
    // Seconds that the program computed between two positions.
    double seconds(std::int64_t start, std::int64_t stop) const { return at(stop).clock - at(start).clock; }
    // First coming use of each block that the known future names, by name.
    std::unordered_map<std::int64_t, std::int64_t> upcoming() const;
    // Bytes of memory that the tape holds.
    std::int64_t allocated_bytes() const {
        return allocated(entries_) + allocated(last_) + allocated(index_) + allocated(added_);
    }

private:
    static constexpr std::int64_t context = 3;
    static constexpr std::int64_t confirm = 4;
    static constexpr std::int64_t skip = 8;
    static constexpr std::int64_t stray = 3;

    struct Entry {
        std::int64_t token;
        std::int64_t nbytes;
        std::int64_t volume;  // bytes of all accesses up to this one
        double clock;         // seconds that the program had computed up to this access
        std::int64_t next;    // position of the next access to the same first block; 0 before it takes place
    };

    const Entry& at(std::int64_t position) const { return entries_[static_cast<std::size_t>(position % length_)]; }
    Entry& at(std::int64_t position) { return entries_[static_cast<std::size_t>(position % length_)]; }
    void append(std::int64_t token, std::int64_t nbytes, double busy);
    std::size_t place(std::int64_t position) const;
    void enlarge_index();
    bool skip_to(std::int64_t token);
    void search(std::size_t place);
    void lose();

    std::int64_t length_;
    std::vector<Entry> entries_;
    std::vector<std::int64_t> last_;   // by name: position of the latest access whose first block this was
    std::vector<std::int64_t> index_;  // by hash of a context: the latest position at which a context with that hash ended
    std::int64_t now_ = -1;
    std::int64_t pointer_ = -1;
    std::int64_t confirmed_ = 0;
    std::int64_t strays_ = 0;
    bool foretold_ = false;
    std::int64_t divergences_ = 0;
    std::int64_t jumps_ = 0;
    double unclaimed_ = 0.0;     // seconds known so far that the program computed after the latest access
    std::vector<double> added_;  // scratch of `add_times`, kept to reuse its memory
};

}  // namespace farpool::pager
