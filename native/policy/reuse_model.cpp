#include "policy/reuse_model.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace farpool::policy {

namespace {

// Pseudo-observations that draw a class with few blocks towards all classes together.
constexpr double prior = 4.0;

}  // namespace

std::uint32_t ReuseModel::use(std::uint64_t id) {
    std::uint32_t number = numbers_.find(id);
    std::uint32_t before = 0;
    if (number != IdMap::none) {
        Known& known = known_[number];
        const Kind kind{class_of(known.uses), age_of(clock_ - known.used)};
        used_[kind.first][kind.second] += 1.0;
        bursts_ += kind == last_ ? 0 : 1;
        last_ = kind;
        before = ++known.uses;
        known.used = clock_;
        order_.renew(number);
    } else {
        if (known_.size() < most_) {
            number = static_cast<std::uint32_t>(known_.size());
            known_.emplace_back();
        } else {
            number = order_.oldest();
            const Known& oldest = known_[number];
            forgotten_[class_of(oldest.uses)][age_of(clock_ - oldest.used)] += 1.0;
            numbers_.erase(oldest.id);
            order_.remove(number);
        }
        known_[number] = {id, clock_, 0};
        numbers_.insert(id, number);
        order_.push(number);
        last_ = none;
    }
    ++clock_;
    if (clock_ - learnt_ >= std::max<std::size_t>(256, known_.size() / 8)) {
        learn();
    }
    return before;
}

void ReuseModel::learn() {
    learnt_ = clock_;
    Table ends = used_;  // repeated uses, forgotten blocks, and blocks of this age now
    for (std::size_t of = 0; of < classes; ++of) {
        for (std::size_t age = 0; age < ages; ++age) {
            ends[of][age] += forgotten_[of][age];
        }
    }
    for (const Known& known : known_) {
        ends[class_of(known.uses)][age_of(clock_ - known.used)] += 1.0;
    }
    // Blocks that have reached each age, in each class and in all.
    Table reached = ends;
    std::array<double, ages> used_of_all{};
    std::array<double, ages> reached_of_all{};
    for (std::size_t age = ages; age-- > 0;) {
        for (std::size_t of = 0; of < classes; ++of) {
            reached[of][age] += age + 1 < ages ? reached[of][age + 1] : 0.0;
            used_of_all[age] += used_[of][age];
            reached_of_all[age] += reached[of][age];
        }
    }
    std::size_t oldest = ages;
    while (oldest > 0 && reached_of_all[oldest - 1] == 0.0) {
        --oldest;
    }
    // Blocks of a prefix are used together: all uses of a burst prove no more than one.
    const double uses = std::accumulate(used_of_all.begin(), used_of_all.end(), 0.0);
    const double burst = uses / static_cast<double>(std::max<std::uint64_t>(bursts_, 1));
    std::array<double, ages> chance{};  // until it is computed: of the class before
    for (std::size_t of = 0; of < classes; ++of) {
        for (std::size_t age = 0; age < oldest; ++age) {
            const double all = used_of_all[age] / reached_of_all[age];
            const double own = (used_[of][age] + prior * all) / (reached[of][age] + prior);
            const double error = std::sqrt(chance[age] * (1.0 - chance[age]) * burst / (reached[of][age] + prior));
            chance[age] = std::clamp(chance[age], own, own + 2.0 * error);
        }
        for (std::size_t from = 0; from < ages; ++from) {
            double left = 1.0;
            double hits = 0.0;
            double time = 0.0;
            double best = 0.0;
            for (std::size_t age = from; age < oldest; ++age) {
                time += left * (age_at(age + 1) - age_at(age)) * (1.0 - chance[age] / 2.0);
                hits += left * chance[age];
                left *= 1.0 - chance[age];
                best = std::max(best, hits / time);
            }
            worth_[of][from] = best;
        }
    }
}

}  // namespace farpool::policy
