#include "policy/marked_reuse.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

#include "core/hash.hpp"

namespace farpool::policy {

namespace {

// Objects that are drawn to find the one worth least: that one is then among the lowest 1/64 of all on average.
constexpr std::size_t drawn = 64;
// Marks that are looked at for each object that comes in.
constexpr std::size_t looks = 256;
// Objects that leave together, at most.
constexpr std::size_t longest_run = 256;
// Objects that the model remembers for each that is in, if it may. Of what is forgotten the uses are, too: with the oldest
// objects whole prefixes are forgotten, with those outside of a sample blocks out of their middle. So a sample is taken only
// where it would remember less than `fewest`.
constexpr std::size_t remembered = 8;
constexpr std::size_t fewest = 2;
constexpr std::uint32_t most_uses = 127;
// Levels of cost for each doubling: 255 of them reach from 2^-42 to 2^42.
constexpr double steps = 3.0;
// Uses that are expected, within as long again as an object has not been used, of what never came back so far. In steps as
// coarse as the ages of the model, so that what is worth the same stays so.
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

// Tells the model of a use, also the first one; returns how many there were before, as far as known.
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

// Notices all uses, when that is due.
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

Slot MarkedReuse::on_victim(const Item&, const Held& held) {
    for (; !run_.empty(); run_.pop_back()) {
        const Slot slot = run_.back();
        if (!held(slot) && !look(slot, model_.now())) {
            return slot;
        }
        objects_[slot].leaving = 0;
    }
    const Slot least = least_worth(held);
    if (least == no_slot) {
        return no_slot;
    }
    follow(least, held);
    return run_.back();
}

Slot MarkedReuse::least_worth(const Held& held) {
    Slot found = no_slot;
    double least = 0.0;
    double all = 0.0;
    const auto consider = [&](Slot slot) {
        double own = worth(objects_[slot]);
        all += own;
        const auto is_less = [&] {
            return found == no_slot || own < least || (own == least && age(objects_[slot]) > age(objects_[found]));
        };
        if (!is_less() || held(slot)) {
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
    for (std::size_t number = 0; found == no_slot && number < slots_.size(); ++number) {  // all that were drawn are held
        consider(slots_[number]);
    }
    return found;
}

// Lets an object leave, with those that came in next and are worth no more.
void MarkedReuse::follow(Slot slot, const Held& held) {
    double least = worth(objects_[slot]);
    run_.push_back(slot);
    objects_[slot].leaving = 1;
    const std::size_t most = std::min(longest_run, slots_.size() / 16);
    for (Slot next = arrivals_.newer(slot); learnt(objects_[slot]) > 0.0 && run_.size() < most && next != no_slot;
         next = arrivals_.newer(next)) {
        if (held(next) || look(next, model_.now()) || worth(objects_[next]) > least) {
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
