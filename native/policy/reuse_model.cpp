#include "policy/reuse_model.hpp"

#include <algorithm>

namespace farpool::policy {

namespace {

// Pseudo-observations by which a class with few blocks leans on all classes together.
constexpr double prior = 4.0;

}  // namespace

std::uint32_t ReuseModel::use(std::uint64_t id) {
    std::uint32_t number = numbers_.find(id);
    std::uint32_t before = 0;
    if (number != IdMap::none) {
        Known& known = known_[number];
        used_[class_of(known.uses)][age_of(clock_ - known.used)] += 1.0;
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
    }
    ++clock_;
    if (clock_ - learnt_ >= std::max<std::size_t>(256, known_.size() / 8)) {
        learn();
    }
    return before;
}

void ReuseModel::learn() {
    learnt_ = clock_;
    Table ends = used_;  // uses again, blocks forgotten, and blocks that are this old now
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
    for (std::size_t of = 0; of < classes; ++of) {
        std::array<double, ages> chance{};
        for (std::size_t age = 0; age < oldest; ++age) {
            const double all = used_of_all[age] / reached_of_all[age];
            chance[age] = (used_[of][age] + prior * all) / (reached[of][age] + prior);
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
