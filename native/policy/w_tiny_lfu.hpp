// W-TinyLFU (Einziger, Friedman and Manes, "TinyLFU: a highly efficient cache admission policy", 2017): new objects enter a
// small window in order of use. The object at the end of the window is compared with the next victim of the main part, and the
// one used more often, by a sketch of frequencies, stays. The main part is an LRU in two segments: a fifth of it on probation;
// the rest, objects used again there, is protected.
//
// Details on which the numbers of misses depend: the window is a hundredth of the capacity. Uses in the window are not counted;
// an insertion, a use in the main part and a comparison at the window's end are. Counts are halved after 32 uses of each object
// in the main part. The parts keep to their shares at once: an object that loses its place before its room is needed is
// `leaving` until then, and a use in between counts as an insertion.
#pragma once

#include <array>

#include "policy/frequency_sketch.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class WTinyLfu final : public Policy {
public:
    // `counters`: bytes of the sketch for each object in the cache. 16 tell frequent objects from rare ones; with 512 hardly
    // any estimate is wrong, also if a trace has many more objects than the cache holds.
    explicit WTinyLfu(std::uint64_t capacity, std::size_t counters = 16);

private:
    enum Part : std::uint8_t { window, probation, protected_, leaving };
    struct Object {
        std::uint64_t key;
        std::uint64_t size;
        Part part;
    };

    void on_touch(Slot slot, std::int64_t next_use) override;
    void on_insert(Slot slot, const Item& item) override;
    Slot on_victim(const Item& incoming, const InUse& in_use) override;
    void on_remove(Slot slot, Leaving why) override;

    void enter(Slot slot, Part part);
    void leave(Slot slot);
    void move(Slot slot, Part part);
    Slot main_victim(const InUse& in_use) const;
    std::uint64_t main_nbytes() const { return nbytes_[probation] + nbytes_[protected_]; }
    bool fits(Part part, std::uint64_t size) const { return nbytes_[part] + size <= capacity_[part]; }

    std::array<std::uint64_t, 4> capacity_;
    std::array<std::uint64_t, 4> nbytes_{};
    std::vector<Object> objects_;
    Links links_;
    std::array<SlotList, 4> queues_{SlotList(links_), SlotList(links_), SlotList(links_), SlotList(links_)};
    FrequencySketch frequency_;
    std::uint64_t uses_ = 0;  // since the counts were last halved
};

}  // namespace farpool::policy
