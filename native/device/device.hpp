// The interface of a device with memory of its own, which runs the work that is queued on its streams and records events in
// them.
//
// All calls may come from any thread that has called `enter`, and throw PortFailure if the device refuses. None of them waits
// for the device, except `synchronize`.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace farpool::device {

using Stream = void*;  // null is the default stream
using Event = void*;

// A copy between page-locked host memory and the device.
struct HostCopy {
    std::uintptr_t place;  // on the device
    std::uintptr_t host;
    std::size_t nbytes;
};

class Device {
public:
    Device() = default;
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    virtual ~Device() = default;

    // Prepares the calling thread, once per thread, for the calls below. A capture of the program, which is in progress on
    // another thread, then neither fails nor makes these calls fail.
    virtual void enter() = 0;
    // Prepares a thread of the program for `record`, `wait`, `capturing`, `stream_id` and copies, also if it uses another
    // device at present. Give the result to `detach` after these calls.
    virtual void* attach() { return nullptr; }
    virtual void detach(void* /*before*/) noexcept {}

    virtual Stream make_stream() = 0;
    virtual void end_stream(Stream stream) noexcept = 0;
    // Events have times. A new event counts as passed until it is recorded.
    virtual Event make_event() = 0;
    virtual void end_event(Event event) noexcept = 0;

    virtual void record(Event event, Stream stream) = 0;
    // Makes later work of the stream wait for the work that precedes the latest record of the event.
    virtual void wait(Stream stream, Event event) = 0;
    virtual bool passed(Event event) = 0;
    // Blocks the calling thread, without spinning, until the event has passed.
    virtual void synchronize(Event event) = 0;
    // Seconds between two events that have passed.
    virtual double elapsed(Event from, Event to) = 0;

    // Queue copies between page-locked host memory and the device, and inside the device, where the ranges must not overlap.
    virtual void copy_in(Stream stream, std::uintptr_t target, const void* source, std::size_t nbytes) = 0;
    virtual void copy_out(Stream stream, void* target, std::uintptr_t source, std::size_t nbytes) = 0;
    virtual void copy_within(Stream stream, std::uintptr_t target, std::uintptr_t source, std::size_t nbytes) = 0;
    // Queues several copies from host memory (`in`) or to it, which may be made in any order.
    virtual void copy_all(Stream stream, bool in, std::span<const HostCopy> copies) {
        for (const HostCopy& copy : copies) {
            if (in) {
                copy_in(stream, copy.place, reinterpret_cast<const void*>(copy.host), copy.nbytes);
            } else {
                copy_out(stream, reinterpret_cast<void*>(copy.host), copy.place, copy.nbytes);
            }
        }
    }
    // Queues a fill of `count` values of two bytes.
    virtual void fill(Stream stream, std::uintptr_t target, std::uint16_t value, std::size_t count) = 0;
    // True if work queued on this stream would become part of a graph instead of being done.
    virtual bool capturing(Stream stream) = 0;
    // A number that no other stream has or had. 0 if the driver has no such numbers: then a new stream with the handle of a
    // destroyed one cannot be told from it.
    virtual std::uint64_t stream_id(Stream /*stream*/) { return 0; }

    // Page-locks host memory from a page boundary on, so that copies can use it.
    virtual void lock_pages(void* memory, std::size_t nbytes) = 0;
    virtual void unlock_pages(void* memory) noexcept = 0;
    // Device memory, for copies that need room outside the arena.
    virtual std::uintptr_t allocate(std::size_t nbytes) = 0;
    virtual void free(std::uintptr_t memory) noexcept = 0;
};

// Has a thread of the program attached to a device while this lives.
class Attached {
public:
    explicit Attached(Device& device) : device_(device), before_(device.attach()) {}
    Attached(const Attached&) = delete;
    Attached& operator=(const Attached&) = delete;
    ~Attached() { device_.detach(before_); }

private:
    Device& device_;
    void* before_;
};

}  // namespace farpool::device
