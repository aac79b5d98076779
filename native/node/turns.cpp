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
    keys_ += of_key.below_.size() == 1 ? 1 : 0;
    return Seat(&flow, Leave{this});
}

void Turns::leave(Flow& flow) noexcept {
    rest(flow);
    keys_ -= flow.above_->below_.size() == 1 ? 1 : 0;
    for (Flow* gone = &flow; gone->above_ != nullptr && gone->below_.empty();) {
        Flow* const above = gone->above_;
        stand(*gone, Flow::Stands::nowhere);
        above->below_.erase(gone->name_);
        gone = above;
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

// The flow keeps its place in line, if it has one, until its turn. Only after that may it come in front of other flows again.
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
