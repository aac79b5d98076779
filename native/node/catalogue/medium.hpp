// The interface of the memory that stores the payloads of objects.
//
// A catalogue keeps the header and the key of every object in RAM, which is its first medium (ram.hpp). If it has a lower
// medium, payloads move there when RAM is needed for other objects. The NVMe file (nvme.hpp) is one; memory behind CXL would be
// another. A new medium implements this interface, and nothing else changes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <new>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace farpool {

// Memory whose address and length are multiples of a file system's block, as direct reads of a file need them.
class AlignedBuffer {
public:
    static constexpr std::uint64_t alignment_nbytes = 4096;

    explicit AlignedBuffer(std::uint64_t nbytes)
        : nbytes_((nbytes + alignment_nbytes - 1) / alignment_nbytes * alignment_nbytes),
          data_(static_cast<std::byte*>(std::aligned_alloc(alignment_nbytes, nbytes_))) {
        if (data_ == nullptr) {
            throw std::bad_alloc();
        }
    }

    std::byte* data() const noexcept { return data_.get(); }
    std::uint64_t nbytes() const noexcept { return nbytes_; }

private:
    struct Free {
        void operator()(std::byte* data) const noexcept { std::free(data); }
    };
    std::uint64_t nbytes_;
    std::unique_ptr<std::byte, Free> data_;
};

class Medium {
public:
    // Receives true once all bytes of a put or a get have arrived, and false if they cannot arrive.
    using Then = std::function<void(bool)>;

    // The bytes of a payload: in memory, and in the file that this memory maps. A medium that copies on a thread of its own
    // reads the file, because a publisher may truncate it, and an access to the memory would then end the process.
    struct Source {
        const std::byte* data;
        std::uint64_t nbytes;
        int file = -1;             // -1: no file
        std::uint64_t offset = 0;  // in the file
    };

    virtual ~Medium() = default;

    // Id of the content, never 0 for a medium that keeps it across restarts. A medium that gives its content up gets a new id,
    // by which a catalogue sees that its payloads are lost.
    virtual std::uint64_t id() const noexcept = 0;
    // Bytes for payloads, and the bytes that are allocated.
    virtual std::uint64_t capacity() const noexcept = 0;
    virtual std::uint64_t used() const noexcept = 0;
    // Bytes written since the start to a device that wears with them; any thread may ask.
    virtual std::uint64_t written() const noexcept { return 0; }
    // Bytes by which the medium allocates: a multiple of 64 and at most 16,320, because a catalogue has one byte per object to
    // count the unused units of 64 bytes at the end of its extent.
    virtual std::uint64_t unit() const noexcept = 0;
    std::uint32_t units(std::uint64_t nbytes) const noexcept {
        return static_cast<std::uint32_t>((nbytes + unit() - 1) / unit());
    }

    // Allocates an extent and returns its place; empty if no hole is large enough. Places of a lower medium fit into 32 bits.
    virtual std::optional<std::uint64_t> alloc(std::uint32_t units) = 0;
    // Allocates an extent in which an earlier start of the node stored a payload; false if any of it is allocated or outside.
    virtual bool adopt(std::uint64_t place, std::uint32_t units) = 0;
    virtual void release(std::uint64_t place, std::uint32_t units) = 0;

    // The payload at a place, if the node can address it; it may be sent from there. Null: it has to be read with get().
    virtual const std::byte* view(std::uint64_t place) const noexcept = 0;
    // True if programs that map the tenant's files can read payloads here. Only these payloads can be pinned.
    virtual bool is_mapped_by_readers() const noexcept { return false; }

    // Stores a payload in an allocated extent. `then` is called before put() returns, or by finished() later. The source must
    // stay as it is until then.
    virtual void put(std::uint64_t place, const Source& source, Then then) = 0;
    // Reads an extent that has no view() into a buffer. finished() returns the call of `then`. Other media need no get().
    virtual void get(std::uint64_t place, std::shared_ptr<AlignedBuffer> into, Then then) {
        static_cast<void>(into);
        static_cast<void>(then);
        throw std::logic_error("the payload at " + std::to_string(place) + " has no view, and its medium does not read");
    }
    // The calls of `then` for all puts and gets that have finished since the last call. The caller makes them.
    virtual std::vector<std::function<void()>> finished() { return {}; }
    // Waits for all puts and gets, and closes the medium. Idempotent.
    virtual void close() {}
};

}  // namespace farpool
