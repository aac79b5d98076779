#include "node/turns.hpp"

namespace farpool {

Turns::Flow& Turns::below(Flow& group, std::uint64_t name) {
    const auto known = group.below_.find(name);
    if (known != group.below_.end()) {
        return *known->second;
    }
    return *group.below_.emplace(name, std::unique_ptr<Flow>(new Flow(&group, name))).first->second;
}

Turns::Seat Turns::join(std::uint32_t tenant, std::uint64_t key, std::uint64_t number) {
    Flow& of_tenant = below(root_, tenant);
    Flow& of_key = below(of_tenant, key);
    Flow& flow = below(of_key, number);
    if (of_key.joined_ == 0) {
        ++keys_;
        recall(of_key);
    }
    flow.joined_ = 1;
    ++of_key.joined_;
    ++of_tenant.joined_;
    return Seat(&flow, Leave{this});
}

void Turns::leave(Flow& flow) noexcept {
    rest(flow);
    Flow& key = *flow.above_;
    stand(flow, Flow::Stands::nowhere);
    key.below_.erase(flow.name_);
    --key.joined_;
    --key.above_->joined_;
    if (key.joined_ == 0) {
        --keys_;
        remember(key);
    }
}

// Keeps a key without connections as long as it is in a line. To bound the memory, we forget the key that left first.
void Turns::remember(Flow& key) noexcept {
    if (key.stands_ == Flow::Stands::nowhere) {
        return forget(key);
    }
    remembered_.splice(remembered_.end(), key.left_);
    if (remembered_.size() > remembered_max) {
        forget(*remembered_.front());
    }
}

// Takes a key out of the line of remembered keys, if it is there.
void Turns::recall(Flow& key) noexcept {
    if (key.left_.empty()) {
        key.left_.splice(key.left_.end(), remembered_, key.left_place_);
    }
}

// Removes a key or a tenant that has no connections. Removes the tenant of a key, too, if it has no other key.
void Turns::forget(Flow& gone) noexcept {
    recall(gone);
    for (const auto& [name, key] : gone.below_) {
        recall(*key);
    }
    stand(gone, Flow::Stands::nowhere);
    Flow& above = *gone.above_;
    above.below_.erase(gone.name_);
    if (above.above_ != nullptr && above.below_.empty()) {
        forget(above);
    }
}

void Turns::stand(Flow& flow, Flow::Stands where) noexcept {
    const auto line_of = [&](Flow::Stands stands) -> Flow::Line& {
        return stands == Flow::Stands::nowhere ? flow.own_
               : stands == Flow::Stands::fresh ? flow.above_->fresh_
                                               : flow.above_->old_;
    };
    Flow::Line& to = line_of(where);
    to.splice(to.end(), line_of(flow.stands_), flow.place_);
    flow.stands_ = where;
}

void Turns::want(Flow& flow) noexcept {
    for (Flow* one = &flow; one->above_ != nullptr && !one->has_work_; one = one->above_) {
        one->has_work_ = true;
        ++one->above_->working_;
        if (one->stands_ == Flow::Stands::nowhere) {
            one->credit_ = quantum;
            stand(*one, Flow::Stands::fresh);
        }
    }
}

// The flow keeps its place in line, if it has one, until its turn. Only after that may it go before other flows again.
void Turns::rest(Flow& flow) noexcept {
    for (Flow* one = &flow; one->above_ != nullptr && one->has_work_ && one->working_ == 0; one = one->above_) {
        one->has_work_ = false;
        --one->above_->working_;
    }
}

Turns::Flow& Turns::next_below(Flow& group) noexcept {
    for (;;) {  // ends, because one flow has work, and each round gives it a quantum
        Flow& first = *(group.fresh_.empty() ? group.old_ : group.fresh_).front();
        if (first.credit_ <= 0) {
            first.credit_ += quantum;
            stand(first, Flow::Stands::old);
        } else if (first.has_work_) {
            return first;
        } else {
            const bool waits = first.stands_ == Flow::Stands::fresh && !group.old_.empty();
            stand(first, waits ? Flow::Stands::old : Flow::Stands::nowhere);
            if (!waits && first.joined_ == 0) {  // it has paid its debt
                forget(first);
            }
        }
    }
}

Turns::Flow* Turns::next() noexcept {
    if (root_.working_ == 0) {
        return nullptr;
    }
    Flow* flow = &root_;
    while (flow->working_ > 0) {
        flow = &next_below(*flow);
    }
    return flow;
}

void Turns::charge(Flow& flow, std::uint64_t units) noexcept {
    for (Flow* one = &flow; one->above_ != nullptr; one = one->above_) {
        one->credit_ -= static_cast<std::int64_t>(units);
    }
}

}  // namespace farpool
