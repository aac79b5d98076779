#include "node/turns.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>
#include <string>
#include <utility>

namespace farpool {

namespace {

// Smaller caps would make a turn last for seconds, and smaller shares would hardly ever give one.
constexpr std::uint64_t cap_min = 64 * 1024;
constexpr double share_min = 1.0 / 1024, share_max = 1024 * 1024;
// Work outside of turns leaves a debt of so much of a cap at most. A program that connects again and again, while its tenant
// is above the cap, would otherwise keep the tenant from its data for as long as it did so.
constexpr std::chrono::seconds outside_debt_max{10};
// Above this, clocks are counted from the start again: a double must show the least turn of the largest share.
constexpr double clock_max = 1e12;

void check(std::uint32_t tenant, const Bandwidth& bandwidth) {
    const std::string whose = "the bandwidth of tenant " + std::to_string(tenant) + " has ";
    if (!(bandwidth.share >= share_min && bandwidth.share <= share_max)) {
        throw std::invalid_argument(whose + "the share " + std::to_string(bandwidth.share) +
                                    ", expected a number from 1/1024 to 1048576");
    }
    if (bandwidth.cap != 0 && bandwidth.cap < cap_min) {
        throw std::invalid_argument(whose + "a cap of " + std::to_string(bandwidth.cap) +
                                    " bytes a second, expected at least 65536, or 0 for no cap");
    }
    if (bandwidth.cap != 0 && bandwidth.guarantee > bandwidth.cap) {
        throw std::invalid_argument(whose + "a guarantee of " + std::to_string(bandwidth.guarantee) +
                                    " bytes a second and a cap of " + std::to_string(bandwidth.cap) +
                                    "; lower the guarantee or raise the cap");
    }
}

}  // namespace

const Turns::Tenant& Turns::tenant_of(const Flow& flow) noexcept {
    const Flow* top = &flow;
    while (top->above_ != nullptr) {
        top = top->above_;
    }
    return static_cast<const Tenant&>(*top);
}

Turns::Tenant& Turns::tenant_of(Flow& flow) noexcept { return const_cast<Tenant&>(tenant_of(static_cast<const Flow&>(flow))); }

Turns::Tenant& Turns::tenant(std::uint32_t number) {
    auto known = tenants_.find(number);
    if (known == tenants_.end()) {
        working_.reserve(tenants_.size() + 1);  // so that want() allocates nothing
        known = tenants_.emplace(number, std::make_unique<Tenant>(number)).first;
        known->second->clock_ = clock_;
    }
    return *known->second;
}

Turns::Flow& Turns::below(Flow& group, std::uint64_t name) {
    const auto known = group.below_.find(name);
    if (known != group.below_.end()) {
        return *known->second;
    }
    return *group.below_.emplace(name, std::unique_ptr<Flow>(new Flow(&group, name))).first->second;
}

Turns::Seat Turns::join(std::uint32_t number_of_tenant, std::uint64_t key, std::uint64_t number, bool latency) {
    Flow& of_tenant = tenant(number_of_tenant);
    Flow& of_key = below(of_tenant, key);
    Flow& flow = below(of_key, number);
    if (of_key.joined_ == 0) {
        ++keys_;
        recall(of_key);
    }
    flow.joined_ = 1;
    flow.is_latency_ = latency;
    ++of_key.joined_;
    ++of_tenant.joined_;
    return Seat(&flow, Leave{this});
}

void Turns::leave(Flow& flow) noexcept {
    rest(flow);
    if (chosen_ == &flow) {
        chosen_ = nullptr;
    }
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

// Removes a key that has no connections.
void Turns::forget(Flow& key) noexcept {
    recall(key);
    stand(key, Flow::Stands::nowhere);
    key.above_->below_.erase(key.name_);
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

// Puts a connection and its key into the lines of urgent flows, or takes them out, as their urgency and their credit say.
void Turns::hurry(Flow& flow) noexcept {
    for (Flow* one = &flow; one->above_ != nullptr; one = one->above_) {
        const bool hurries = (one->is_urgent_ || !one->urgent_.empty()) && one->credit_ > -ahead;
        Flow::Line& line = one->above_->urgent_;
        if (hurries && !one->hurried_.empty()) {
            line.splice(line.end(), one->hurried_);
        } else if (!hurries && one->hurried_.empty()) {
            one->hurried_.splice(one->hurried_.end(), line, one->hurried_place_);
        }
    }
}

void Turns::want(Flow& flow) noexcept {
    if (flow.has_work_) {
        return;
    }
    flow.is_urgent_ = flow.is_latency_;
    Flow* one = &flow;
    for (; one->above_ != nullptr && !one->has_work_; one = one->above_) {
        one->has_work_ = true;
        ++one->above_->working_;
        if (std::exchange(one->above_rests_, one->above_->rests_) != one->above_->rests_) {
            stand(*one, Flow::Stands::nowhere);  // others did not wait for it since, so it has no debt
        }
        if (one->stands_ == Flow::Stands::nowhere) {
            one->credit_ = quantum;
            stand(*one, Flow::Stands::fresh);
        }
    }
    if (one->above_ == nullptr && !one->has_work_) {
        enter(static_cast<Tenant&>(*one));
    }
    if (flow.is_urgent_) {
        hurry(flow);
    }
}

// The flow keeps its place in line, if it has one, until its turn. Only after that may it go before other flows again.
void Turns::rest(Flow& flow) noexcept {
    if (!flow.has_work_) {
        return;
    }
    if (flow.is_urgent_) {
        flow.is_urgent_ = false;
        hurry(flow);
    }
    Flow* one = &flow;
    for (; one->above_ != nullptr && one->working_ == 0; one = one->above_) {
        one->has_work_ = false;
        one->above_->rests_ += --one->above_->working_ == 0 ? 1 : 0;
    }
    if (one->above_ == nullptr && one->working_ == 0) {
        quit(static_cast<Tenant&>(*one));
    }
}

void Turns::enter(Tenant& tenant) noexcept {
    tenant.has_work_ = true;
    tenant.clock_ = std::max(tenant.clock_, clock_);
    tenant.is_served_ = false;
    tenant.entry_ = ++entries_;
    working_.push_back(&tenant);
}

void Turns::quit(Tenant& tenant) noexcept {
    tenant.has_work_ = false;
    end_throttling(tenant, now_);
    *std::find(working_.begin(), working_.end(), &tenant) = working_.back();
    working_.pop_back();
}

// True if a tenant that has work is above its cap. Notes when that begins and ends.
bool Turns::is_throttled(Tenant& tenant, Clock::time_point now) noexcept {
    tenant.cap_.refill(now);
    if (!tenant.cap_.is_used() || !tenant.cap_.is_empty()) {
        end_throttling(tenant, now);
        return false;
    }
    if (!tenant.is_throttled_) {
        tenant.is_throttled_ = true;
        tenant.throttled_since_ = now;
    }
    return true;
}

void Turns::end_throttling(Tenant& tenant, Clock::time_point now) noexcept {
    if (tenant.is_throttled_) {
        tenant.is_throttled_ = false;
        tenant.usage_.throttled += now - tenant.throttled_since_;
        tenant.clock_ = std::max(tenant.clock_, clock_);  // it saves nothing up
    }
}

Turns::Claim Turns::claim_of(Tenant& tenant, Clock::time_point now) const noexcept {
    tenant.guarantee_.refill(now);
    const bool is_behind = tenant.guarantee_.is_used() && tenant.guarantee_.level() > 0;
    const bool may_be_early = (tenant.clock_ - clock_) * tenant.share_ <= static_cast<double>(ahead);
    const bool is_urgent = !tenant.urgent_.empty() && (is_behind || may_be_early);
    const Reason reason = is_urgent && (is_behind || owed_ > -ahead) ? Reason::urgent
                          : is_behind && owed_ < quantum             ? Reason::guarantee
                          : is_urgent                                ? Reason::early
                                                                     : Reason::share;
    const double first = reason == Reason::guarantee ? -tenant.guarantee_.seconds() : tenant.clock_;
    return {reason, first, tenant.clock_, tenant.is_served_, tenant.entry_};
}

Turns::Flow& Turns::next_below(Flow& group) noexcept {
    for (;;) {  // ends, because one flow has work, and each round gives it a quantum
        Flow& first = *(group.fresh_.empty() ? group.old_ : group.fresh_).front();
        if (first.credit_ <= 0) {
            first.credit_ += quantum;
            stand(first, Flow::Stands::old);
            hurry(first);
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

Turns::Flow* Turns::next(Clock::time_point now) noexcept {
    now_ = now;
    Tenant* first = nullptr;
    Claim best{};
    for (Tenant* const one : working_) {
        if (is_throttled(*one, now)) {
            continue;
        }
        const Claim claim = claim_of(*one, now);
        if (first == nullptr || claim < best) {
            first = one;
            best = claim;
        }
    }
    if (first == nullptr) {
        return nullptr;
    }
    reason_ = std::get<Reason>(best);
    chosen_ = first;
    while (chosen_->working_ > 0) {
        const bool hurries = (reason_ == Reason::urgent || reason_ == Reason::early) && !chosen_->urgent_.empty();
        chosen_ = hurries ? chosen_->urgent_.front() : &next_below(*chosen_);
    }
    return chosen_;
}

std::uint64_t Turns::turn_units(const Flow& flow) const noexcept {
    const Bucket& cap = tenant_of(flow).cap_;
    const auto most = static_cast<double>(is_shared() ? quantum : lone_turn);
    const double units = cap.is_used() ? std::clamp(cap.level(), static_cast<double>(quantum), most) : most;
    return static_cast<std::uint64_t>(units);
}

void Turns::charge(Flow& flow, const Work& work, Clock::time_point now) noexcept {
    const bool was_chosen = &flow == std::exchange(chosen_, nullptr);
    for (Flow* one = &flow; one->above_ != nullptr; one = one->above_) {
        one->credit_ -= static_cast<std::int64_t>(work.units());
    }
    if (was_chosen) {
        flow.is_urgent_ = false;  // it had its turn
    }
    hurry(flow);
    if (Flow& key = *flow.above_; was_chosen && key.hurried_.empty()) {  // other keys are first now
        Flow::Line& line = key.above_->urgent_;
        line.splice(line.end(), line, key.hurried_place_);
    }
    charge(tenant_of(flow), work, was_chosen ? std::optional(reason_) : std::nullopt, now);
}

void Turns::charge_tenant(std::uint32_t number, const Work& work, Clock::time_point now) {
    charge(tenant(number), work, std::nullopt, now);
}

// `reason`: for which the tenant was chosen; none for work outside of turns.
void Turns::charge(Tenant& tenant, const Work& work, std::optional<Reason> reason, Clock::time_point now) noexcept {
    const auto units = static_cast<double>(work.units());
    const auto metered = static_cast<double>(work.metered());
    tenant.usage_.work.bytes_in += work.bytes_in;
    tenant.usage_.work.bytes_out += work.bytes_out;
    tenant.usage_.work.other += work.other;
    tenant.is_served_ = true;
    if (reason) {
        tenant.cap_.take(metered, now);
    } else {
        tenant.cap_.drain(metered, tenant.cap_.given_in(outside_debt_max), now);
    }
    tenant.guarantee_.refill(now);
    const double clock = tenant.clock_ + units / tenant.share_;
    const bool by_guarantee = reason == Reason::guarantee ||
                              (reason == Reason::urgent && tenant.guarantee_.is_used() && tenant.guarantee_.level() > 0);
    tenant.guarantee_.drain(metered, tenant.guarantee_.depth(), now);
    if (by_guarantee) {
        // A guarantee may be more than the part by the share, so this does not become a debt without bounds.
        tenant.clock_ = std::min(clock, std::max(tenant.clock_, clock_ + static_cast<double>(ahead) / tenant.share_));
        owed_ += static_cast<std::int64_t>(work.units()) / shared_part;
        return;
    }
    if (reason == Reason::share) {
        clock_ = std::max(clock_, tenant.clock_);
    }
    if (reason == Reason::urgent) {
        owed_ -= static_cast<std::int64_t>(work.units());
    } else if (reason) {
        owed_ = std::max<std::int64_t>(owed_ - static_cast<std::int64_t>(work.units()), 0);
    }
    tenant.clock_ = clock;
    if (!reason && working_.empty()) {  // it takes nothing from others, so it is not ahead of them
        clock_ = std::max(clock_, clock);
    }
    if (clock_ > clock_max) {
        begin_clocks_again();
    }
}

void Turns::begin_clocks_again() noexcept {
    for (const auto& [number, one] : tenants_) {
        one->clock_ -= clock_;
    }
    clock_ = 0;
}

void Turns::set_bandwidth(const std::map<std::uint32_t, Bandwidth>& tenants, Clock::time_point now) {
    for (const auto& [number, bandwidth] : tenants) {
        check(number, bandwidth);
    }
    std::map<std::uint32_t, Bandwidth> named = tenants;
    for (const auto& [number, bandwidth] : named) {
        tenant(number);
    }
    for (const auto& [number, one] : tenants_) {
        const auto found = named.find(number);
        const Bandwidth bandwidth = found == named.end() ? Bandwidth{} : found->second;
        // What a tenant is ahead of or behind its part stays the same number of units.
        one->clock_ = clock_ + (one->clock_ - clock_) * one->share_ / bandwidth.share;
        one->share_ = bandwidth.share;
        one->guarantee_.set(static_cast<double>(bandwidth.guarantee), now);
        one->cap_.set(static_cast<double>(bandwidth.cap), now);
    }
    bandwidth_.swap(named);
}

Turns::Usage Turns::usage(std::uint32_t number, Clock::time_point now) const {
    const auto known = tenants_.find(number);
    if (known == tenants_.end()) {
        return {};
    }
    Usage usage = known->second->usage_;
    if (known->second->is_throttled_) {
        usage.throttled += std::max(now - known->second->throttled_since_, Clock::duration::zero());
    }
    return usage;
}

Clock::time_point Turns::below_cap_at(std::uint32_t number, Clock::time_point now) const {
    const auto known = tenants_.find(number);
    if (known == tenants_.end() || !known->second->cap_.is_used()) {
        return now;
    }
    Bucket cap = known->second->cap_;
    cap.refill(now);
    return cap.is_empty() ? cap.filled_at() : now;
}

std::optional<Clock::time_point> Turns::next_at(Clock::time_point now) noexcept {
    now_ = now;
    std::optional<Clock::time_point> first;
    for (Tenant* const one : working_) {
        if (!is_throttled(*one, now)) {
            return now;
        }
        const Clock::time_point filled = one->cap_.filled_at();
        first = first ? std::min(*first, filled) : filled;
    }
    return first;
}

}  // namespace farpool
