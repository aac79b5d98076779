#include "policy/marked_reuse.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/hash.hpp"

namespace farpool::policy {

namespace {

// Objects drawn to find the one worth least: on average, it is then among the lowest 1/64 of all.
constexpr std::size_t drawn = 64;
// Marks that are checked for each inserted object.
constexpr std::size_t looks = 256;
// Maximum number of objects that are evicted together.
constexpr std::size_t longest_run = 256;
// Objects that the model remembers for each object in the cache, if its limit allows it. The model forgets the uses of an
// object with the object: if it forgets the oldest ones, it forgets whole prefixes; if it remembers only a sample, it lacks
// blocks in the middle of prefixes. So it takes a sample only if it could remember fewer than `fewest` without one.
constexpr std::size_t remembered = 8;
constexpr std::size_t fewest = 2;
constexpr std::uint32_t most_uses = 127;
// Levels of cost for each doubling: 255 of them reach from 2^-42 to 2^42.
constexpr double steps = 3.0;
// Expected uses of an object that never returned so far, during a further time as long as its age. The age is rounded as
// coarsely as the ages of the model, so that objects of equal worth stay equal.
constexpr double doubt = 1.0 / 1024;

}  // namespace

std::uint64_t MarkedReuse::nbytes() const noexcept {
    return objects_.size() * (sizeof(Object) + sizeof(Slot) + sizeof(Link)) + model_.nbytes();
}

double MarkedReuse::worth(const Object& object) const {
    const double mean = valued_ > 0 ? static_cast<double>(levels_) / static_cast<double>(valued_) : 0.0;
    const double value = object.level == 0 ? 1.0 : std::exp2((object.level - mean) / steps);
    return (learnt(object) + doubt / static_cast<double>(std::bit_floor(std::uint64_t{age(object)} + 1))) * value;
}

bool MarkedReuse::in_sample(std::uint32_t key) const { return (mix64(key) & sample_mask_) == 0; }

// Reports a use to the model, also the first one; returns the number of known uses before it.
std::uint32_t MarkedReuse::use(const Object& object, std::uint32_t before) {
    if (in_sample(object.key)) {
        before = model_.use(object.key);
    } else {
        model_.pass();
    }
    return std::min(before, most_uses);
}

// Notices a use that was marked; true if there was one.
bool MarkedReuse::look(Slot slot, std::uint64_t when) {
    const bool used = marks_.take(slot);
    if (used) {
        Object& object = objects_[slot];
        object.uses = use(object, object.uses + 1u);
        object.used = static_cast<std::uint32_t>(when);
    }
    return used;
}

// Checks all marks, if a sweep is due.
void MarkedReuse::sweep() {
    if (++inserted_ * looks < slots_.size() * (1 + marks_.areas())) {
        return;
    }
    inserted_ = 0;
    stamp_ = model_.now();
    for (const Slot slot : slots_) {
        look(slot, stamp_);
    }
    model_.remember(std::min(remembered * std::max<std::size_t>(slots_.size(), 1024), most_remembered_));
    sample_mask_ = std::bit_ceil(std::max<std::size_t>(fewest * slots_.size() / most_remembered_, 1)) - 1;
}

void MarkedReuse::on_insert(Slot slot, const Item& item) {
    sweep();
    if (slot >= objects_.size()) {
        objects_.resize(std::size_t{slot} + 1);
    }
    marks_.clear(slot);
    Object& object = objects_[slot];
    object = {.key = static_cast<std::uint32_t>(mix64(item.key)),
              .used = static_cast<std::uint32_t>(stamp_),
              .place = static_cast<std::uint32_t>(slots_.size())};
    if (item.cost > 0.0) {
        const double octaves = std::log2(item.cost / static_cast<double>(std::max<std::uint64_t>(item.size, 1)));
        object.level = static_cast<std::uint8_t>(std::clamp(std::round(steps * octaves) + 128.0, 1.0, 255.0));
        levels_ += object.level;
        ++valued_;
    }
    object.uses = use(object, 0);
    slots_.push_back(slot);
    arrivals_.push(slot);
}

Slot MarkedReuse::on_victim(const Item&, const InUse& in_use) {
    for (; !run_.empty(); run_.pop_back()) {
        const Slot slot = run_.back();
        if (!in_use(slot) && !look(slot, model_.now())) {
            return slot;
        }
        objects_[slot].leaving = 0;
    }
    const Slot least = least_worth(in_use);
    if (least == no_slot) {
        return no_slot;
    }
    follow(least, in_use);
    return run_.back();
}

Slot MarkedReuse::least_worth(const InUse& in_use) {
    Slot found = no_slot;
    double least = 0.0;
    double all = 0.0;
    const auto consider = [&](Slot slot) {
        double own = worth(objects_[slot]);
        all += own;
        const auto is_less = [&] {
            return found == no_slot || own < least || (own == least && age(objects_[slot]) > age(objects_[found]));
        };
        if (!is_less() || in_use(slot)) {
            return;
        }
        if (look(slot, model_.now())) {  // used since the last sweep
            own = worth(objects_[slot]);
        }
        if (is_less()) {
            found = slot;
            least = own;
        }
    };
    const std::size_t count = std::min(drawn, slots_.size());
    for (std::size_t number = 0; number < count; ++number) {
        consider(slots_[slots_.size() <= drawn ? number : (dice_ = mix64(dice_)) % slots_.size()]);
    }
    usual_ = all / static_cast<double>(count);
    for (std::size_t number = 0; found == no_slot && number < slots_.size(); ++number) {  // all drawn objects are in use
        consider(slots_[number]);
    }
    return found;
}

// Chooses an object to evict, together with the objects that were inserted next and are worth no more.
void MarkedReuse::follow(Slot slot, const InUse& in_use) {
    double least = worth(objects_[slot]);
    run_.push_back(slot);
    objects_[slot].leaving = 1;
    const std::size_t most = std::min(longest_run, slots_.size() / 16);
    for (Slot next = arrivals_.newer(slot); learnt(objects_[slot]) > 0.0 && run_.size() < most && next != no_slot;
         next = arrivals_.newer(next)) {
        if (in_use(next) || look(next, model_.now()) || worth(objects_[next]) > least) {
            return;
        }
        least = worth(objects_[next]);
        run_.push_back(next);
        objects_[next].leaving = 1;
    }
}

void MarkedReuse::on_remove(Slot slot, Leaving) {
    const Object& object = objects_[slot];
    if (object.leaving != 0) {
        std::erase(run_, slot);
    }
    if (object.level > 0) {
        levels_ -= object.level;
        --valued_;
    }
    slots_[object.place] = slots_.back();
    objects_[slots_.back()].place = object.place;
    slots_.pop_back();
    arrivals_.remove(slot);
}

}  // namespace farpool::policy
