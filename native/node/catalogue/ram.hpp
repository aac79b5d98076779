// The first medium of a catalogue: the tenant's data segment, with the headers and keys of all objects and the payloads in RAM.
//
// An extent has a place in the segment from the start, and memory only while the system has backed its pages. Places are
// offsets in the file.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/free_space.hpp"
#include "node/catalogue/medium.hpp"
#include "node/catalogue/room.hpp"
#include "node/files.hpp"
#include "wire/segment.hpp"

namespace farpool {

class Ram final : public Medium {
public:
    Ram(Room& room, Segment segment);
    Ram(const Ram&) = delete;
    Ram& operator=(const Ram&) = delete;

    std::uint64_t id() const noexcept override { return 0; }  // the index has the id of its segment
    std::uint64_t capacity() const noexcept override { return segment_.nbytes(); }
    std::uint64_t used() const noexcept override;
    std::uint64_t unit() const noexcept override { return unit_nbytes; }
    // The lowest hole that is large enough.
    std::optional<std::uint64_t> alloc(std::uint32_t units) override;
    bool adopt(std::uint64_t offset, std::uint32_t units) override;
    void release(std::uint64_t offset, std::uint32_t units) override;
    const std::byte* view(std::uint64_t offset) const noexcept override { return at(offset); }
    bool is_mapped_by_readers() const noexcept override { return true; }
    void put(std::uint64_t offset, const Source& source, Then then) override;

    std::byte* at(std::uint64_t offset) const noexcept { return segment_.memory.data() + offset; }
    ObjectHeader& header_at(std::uint64_t offset) const noexcept { return *segment_.memory.at<ObjectHeader>(offset); }
    std::uint64_t end() const noexcept { return segment_header_nbytes + capacity(); }
    // True if such an extent can be in the segment.
    bool has_place(std::uint64_t offset, std::uint32_t units) const noexcept;
    // The hole that ends the bytes before `offset`: its units (0 if these bytes are used), and the offset of its end.
    struct Gap {
        std::uint64_t units;
        std::uint64_t end;
    };
    Gap gap_before(std::uint64_t offset) const;
    const Segment& segment() const noexcept { return segment_; }
    // Replaces the segment by another one of the same capacity, in which no page is backed. Returns the old one.
    Segment replace(Segment segment);
    // Closes the segment; only replace() may follow.
    void close_segment() { segment_ = {}; }

    // Backs an extent with memory, in large chunks, because each takes a system call. If a chunk is more than the node may
    // take, we first return free memory and then back only the pages of the extent. `ahead` is the number of units that the
    // same object takes next: if there is no memory for them, we evict nothing. Without `ahead` we never evict.
    bool back(std::uint64_t offset, std::uint32_t units, std::optional<std::uint32_t> ahead = {});
    // Assumes that every page, or none, is backed, because the true state is not known.
    void assume_backed(bool backed);
    // Bytes of memory that the system has given for payloads and headers, holes included.
    std::uint64_t backed() const noexcept { return backed_nbytes_; }
    // Returns the memory of the whole pages in a range to the system; the result is their bytes.
    std::uint64_t return_pages(std::uint64_t begin, std::uint64_t end);
    // Returns the memory of all holes to the system.
    void trim();
    // Returns the memory that no round of the last `idle_rounds` calls has used, at most `nbytes_max` bytes in this call. True
    // if it searched holes, which takes up to some milliseconds.
    static constexpr int idle_rounds = 30;
    bool return_idle(std::uint64_t nbytes_max);

private:
    // The search for holes whose memory was not used for some time.
    struct Idle {
        int rounds = 0;                                // calls since we began to watch holes
        std::uint64_t least_nbytes = 0;                // of holes, in the round that had the fewest
        std::uint64_t nbytes = 0;                      // still to return
        std::pair<std::int64_t, std::int64_t> next{};  // the hole to search next: units, offset
        std::uint64_t next_end = 0;                    // end of the part of that hole that we have not searched
    };

    static std::int64_t unit_of(std::uint64_t offset) {
        return static_cast<std::int64_t>((offset - segment_header_nbytes) / unit_nbytes);
    }
    static std::uint64_t offset_of(std::int64_t unit) {
        return segment_header_nbytes + static_cast<std::uint64_t>(unit) * unit_nbytes;
    }
    bool back_pages(std::uint64_t begin, std::uint64_t end);
    std::uint64_t mark_pages(std::uint64_t begin, std::uint64_t end, bool backed);  // bytes that were not so before
    // Bytes of memory in holes, with the pages that a hole shares with an object.
    std::uint64_t hole_nbytes() const noexcept;

    Room& room_;
    Segment segment_;
    FreeSpace space_;
    std::vector<bool> backed_;  // by page
    std::uint64_t backed_nbytes_ = 0;
    std::uint64_t backed_end_ = 0;  // no page from this offset on is backed
    Idle idle_;
};

}  // namespace farpool
