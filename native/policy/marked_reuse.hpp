// Expected reuse from marks: the policy of a node, whose readers report a use only by setting a mark.
//
// The policy draws some objects at random and evicts the one that saves least for each unit of size and time (as in "Hyperbolic
// caching", Blankstein et al., ATC 2017); it learns the savings from the objects themselves (reuse_model.hpp). Uses are noticed
// in sweeps over all marks. The sweeps are so frequent that one sweep finds the uses of few requests, and all of these count as
// used at the same time.
//
// A node does not know which block of a prefix depends on which other block, but the blocks of a prefix are inserted one after
// the other. So together with the chosen object the policy evicts the objects that were inserted next and are worth no more,
// the last one first: a prefix is evicted from its end. Before the model has learnt anything, the objects are evicted that cost
// least for each unit of size and of time since their last use.
#pragma once

#include "policy/marks.hpp"
#include "policy/reuse_model.hpp"
#include "policy/slot_list.hpp"

namespace farpool::policy {

class MarkedReuse final : public Policy {
public:
    // Objects that the model remembers, at about 80 bytes each.
    static constexpr std::size_t most_remembered = 524288;
    explicit MarkedReuse(Marks marks = {}, std::size_t remembered = most_remembered)
        : marks_(std::move(marks)), most_remembered_(remembered) {}

    // True if the object was used recently or is worth more than most.
    bool would_pass(Slot slot) const { return marks_.get(slot) != 0 || worth(objects_[slot]) > usual_; }
    // Bytes for objects and for the uses that are remembered.
    std::uint64_t nbytes() const noexcept;

private:
    struct Object {
        std::uint32_t key = 0;         // for the model; two objects in billions may share one
        std::uint32_t used = 0;        // time of the last noticed use, without its upper half
        std::uint32_t place = 0;       // index in `slots_`
        std::uint8_t level = 0;        // logarithm of the cost of a unit of size; 0 if it is not known
        std::uint8_t uses : 7 = 0;     // known uses before the last one; more than a few count alike
        std::uint8_t leaving : 1 = 0;  // 1 if it is in `run_`
    };

    void on_touch(Slot slot, std::int64_t) override { marks_.set(slot); }
    void on_insert(Slot slot, const Item& item) override;
    Slot on_victim(const Item& incoming, const InUse& in_use) override;
    void on_remove(Slot slot, Leaving why) override;

    // Time since the last use.
    std::uint32_t age(const Object& object) const { return static_cast<std::uint32_t>(model_.now()) - object.used; }
    double learnt(const Object& object) const { return model_.worth(object.uses, model_.now() - age(object)); }
    double worth(const Object& object) const;
    bool in_sample(std::uint32_t key) const;
    std::uint32_t use(const Object& object, std::uint32_t before);
    bool look(Slot slot, std::uint64_t when);
    void sweep();
    Slot least_worth(const InUse& in_use);
    void follow(Slot slot, const InUse& in_use);

    Marks marks_;
    std::size_t most_remembered_;
    ReuseModel model_;
    std::vector<Object> objects_;  // by slot
    std::vector<Slot> slots_;      // of all objects in the cache
    Links links_;
    SlotList arrivals_{links_};
    std::vector<Slot> run_;          // evicted next, the last one first
    std::uint64_t sample_mask_ = 0;  // of a key's hash: the model remembers the keys whose bits here are 0
    std::uint64_t stamp_ = 0;        // time of the last sweep
    std::uint64_t inserted_ = 0;     // since the last sweep
    std::uint64_t dice_ = 0;
    double usual_ = 0.0;        // mean worth of the objects drawn last
    std::uint64_t levels_ = 0;  // sum
    std::uint64_t valued_ = 0;  // objects with a level
};

}  // namespace farpool::policy
