#include "node/catalogue/retention.hpp"

#include <utility>

namespace farpool {

Retained Retention::of(std::uint32_t slot) const {
    if (priority(slot) == 0) {
        return {};
    }
    const Object& object = objects_[slot];
    return {object.priority, object.number == 0 ? 0 : sessions_.at(object.number).session, object.until};
}

bool Retention::has_ended(std::uint32_t slot) const {
    if (priority(slot) == 0) {
        return false;
    }
    const Object& object = objects_[slot];
    if (object.until != 0 && object.until <= now_milliseconds()) {
        return true;
    }
    if (object.number == 0) {
        return false;
    }
    // A session that ends loses its number, which a later session of the same name does not get.
    const auto known = numbers_.find(sessions_.at(object.number).session);
    return known == numbers_.end() || known->second != object.number;
}

void Retention::set(std::uint32_t slot, const Retained& retained) {
    if (slot >= objects_.size()) {
        if (retained.priority == 0) {
            return;
        }
        objects_.resize(std::size_t{slot} + 1);
    }
    const std::uint32_t before = std::exchange(objects_[slot], {}).number;
    if (before != 0) {
        leave(slot, before);
    }
    if (retained.priority == 0) {
        return;
    }
    const std::uint32_t number = retained.session == 0 ? 0 : number_of(retained.session);
    objects_[slot] = {number, retained.priority, retained.until};
    if (number != 0) {
        sessions_.at(number).objects.push(slot);
    }
}

std::uint32_t Retention::number_of(std::uint64_t session) {
    if (const auto known = numbers_.find(session); known != numbers_.end()) {
        return known->second;
    }
    do {
        ++last_;
    } while (last_ == 0 || sessions_.contains(last_));
    numbers_.emplace(session, last_);
    sessions_.emplace(last_, Session{session, policy::SlotList(links_)});
    return last_;
}

// Forgets a session with its last object.
void Retention::leave(std::uint32_t slot, std::uint32_t number) {
    Session& session = sessions_.at(number);
    session.objects.remove(slot);
    if (!session.objects.empty()) {
        return;
    }
    if (const auto known = numbers_.find(session.session); known != numbers_.end() && known->second == number) {
        numbers_.erase(known);
    }
    std::erase(ended_, number);
    sessions_.erase(number);
}

std::size_t Retention::end(std::uint64_t session) {
    const auto known = numbers_.find(session);
    if (known == numbers_.end()) {
        return 0;
    }
    ended_.push_back(known->second);
    numbers_.erase(known);
    return sessions_.at(ended_.back()).objects.size();
}

std::uint64_t Retention::nbytes() const noexcept {
    return objects_.size() * sizeof(Object) + links_.size() * sizeof(policy::Link) +
           sessions_.size() * (sizeof(Session) + 2 * sizeof(std::uint64_t));
}

}  // namespace farpool
