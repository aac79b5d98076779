// The epochs of a tenant. A new epoch makes all objects of earlier epochs unreadable.
//
// An object belongs to an earlier epoch if its serial is below the first one of the present epoch. Such objects stay in the
// index until a sweep or a request comes to them.
#pragma once

#include <cstdint>

#include "node/catalogue/index.hpp"

namespace farpool {

// Number and bytes of the objects that a new epoch has made unreadable.
struct Rotated {
    std::uint64_t objects = 0;
    std::uint64_t nbytes = 0;
};

class Epochs {
public:
    // The epoch in which an earlier start of the node ended.
    explicit Epochs(const Index& index) : epoch_(index.epoch().value_or(0)), first_serial_(index.first_serial()) {}

    std::uint32_t epoch() const noexcept { return epoch_; }
    bool is_outdated(std::uint64_t serial) const noexcept { return serial < first_serial_; }
    // The objects that the present epoch made unreadable when it began; zeros after a restart.
    const Rotated& begun() const noexcept { return begun_; }

    // Count an object that enters or leaves the index.
    void add(std::uint64_t serial, std::uint64_t nbytes) noexcept {
        if (is_outdated(serial)) {
            ++outdated_.objects;
            outdated_.nbytes += nbytes;
        }
    }
    void remove(std::uint64_t serial, std::uint64_t nbytes) noexcept {
        if (is_outdated(serial)) {
            --outdated_.objects;
            outdated_.nbytes -= nbytes;
        }
    }
    // Begins an epoch, in a catalogue that has `present` objects, outdated ones included.
    void begin(std::uint32_t epoch, Index& index, Rotated present) {
        begun_ = {present.objects - outdated_.objects, present.nbytes - outdated_.nbytes};
        outdated_ = present;
        epoch_ = epoch;
        first_serial_ = index.next_serial();
        index.begin_epoch(epoch_, first_serial_);
    }

private:
    std::uint32_t epoch_;
    std::uint64_t first_serial_;
    Rotated begun_;
    Rotated outdated_;  // objects of earlier epochs that are still in the index
};

}  // namespace farpool
