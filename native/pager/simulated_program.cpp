#include "pager/simulated_program.hpp"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <utility>
#include <variant>
#include <vector>

#include "core/extent_allocator.hpp"

namespace farpool::pager {

namespace {

constexpr std::int64_t block_bytes = 4096;
constexpr std::int64_t share = 4;     // the arena holds this part of the blocks
constexpr std::int64_t chunk = 1000;  // blocks of one storage
constexpr double link = 1e-6;         // virtual seconds that a block takes on the link, and that the program computes

// A tier's bookkeeping without a tier.
class SimulatedSpace : public Space {
public:
    SimulatedSpace(std::int64_t capacity, std::int64_t unit) : extents_(capacity, unit) {}
    std::int64_t reserve(std::int64_t nbytes, int) override { return extents_.alloc(nbytes); }
    void free(std::int64_t offset, std::int64_t, int) override { extents_.free(offset); }

private:
    ExtentAllocator extents_;
};

// Numbers of blocks of the storages that have so many blocks together.
std::vector<std::int64_t> storages_of(std::int64_t blocks) {
    std::vector<std::int64_t> storages;
    for (std::int64_t start = 0; start < blocks; start += chunk) {
        storages.push_back(std::min(chunk, blocks - start));
    }
    return storages;
}

}  // namespace

SimulatedProgram::SimulatedProgram(std::int64_t blocks, std::int64_t history)
    : SimulatedProgram(blocks * block_bytes / share, storages_of(blocks), block_bytes, history,
                       {link / static_cast<double>(block_bytes), link, 0.0, false}) {}

SimulatedProgram::SimulatedProgram(std::int64_t capacity, std::span<const std::int64_t> storages, std::int64_t nbytes,
                                   std::int64_t history, SimulatedHardware hardware)
    : hardware_(hardware),
      blocks_(std::accumulate(storages.begin(), storages.end(), std::int64_t{0})),
      pager_(capacity, {std::make_shared<SimulatedSpace>(blocks_ * nbytes, nbytes)}, 1, 64, history, true,
             hardware.computes_on_device) {
    for (const std::int64_t blocks : storages) {
        pager_.create(std::vector<std::int64_t>(static_cast<std::size_t>(blocks), nbytes), 0);
    }
}

void SimulatedProgram::fill() {
    for (std::int64_t block = 0; block < blocks_; ++block) {
        access(static_cast<BlockId>(block), Mode::overwrite);
    }
}

void SimulatedProgram::loop(std::int64_t accesses) {
    for (; accesses > 0; --accesses) {
        access(static_cast<BlockId>(next_), Mode::read);
        next_ = (next_ + 1) % blocks_;
    }
}

void SimulatedProgram::shuffled(std::int64_t accesses) {
    for (; accesses > 0; --accesses) {
        access(static_cast<BlockId>(random_() % static_cast<std::uint64_t>(blocks_)), Mode::read);
    }
}

void SimulatedProgram::access(std::vector<Run> runs, double seconds) {
    now_ += hardware_.access_seconds;
    complete();
    const std::shared_ptr<Access> access = pager_.request(std::move(runs), now_);
    start();
    while (!access->granted) {
        if (!std::holds_alternative<std::monostate>(access->refusal)) {
            throw std::logic_error("SimulatedProgram: an access was refused");
        }
        if (ended_.empty()) {
            now_ = std::max(now_, next_end());
        }
        complete();
        pager_.proceed(now_);
        start();
    }
    if (hardware_.computes_on_device) {
        const double begin = std::max(now_, computed_);
        computed_ = begin + seconds;
        computing_.push_back({access->ordinal, begin, computed_});
    }
    pager_.release(*access, true);
    start();
}

// When the device has done all accesses up to this one; 0 if it has done so already.
double SimulatedProgram::computed(std::int64_t ordinal) const {
    const auto after = std::ranges::partition_point(computing_, [&](const Ran& ran) { return ran.ordinal <= ordinal; });
    return after == computing_.begin() ? 0.0 : std::prev(after)->end;
}

void SimulatedProgram::start() {
    for (const Command& command : pager_.take_commands()) {
        if (const auto* transfer = std::get_if<std::shared_ptr<const Transfer>>(&command)) {
            now_ += hardware_.transfer_seconds;
            open_.insert((*transfer)->id);
            waiting_[static_cast<std::size_t>((*transfer)->kind)].emplace_back(*transfer, (*transfer)->demand);
        }
    }
    raise();
    progress(now_);
    dispatch(now_);
}

// Makes transfers urgent for which an access has begun to wait, and those that they wait for.
void SimulatedProgram::raise() {
    std::vector<TransferId> raised = pager_.take_raised();
    while (!raised.empty()) {
        const TransferId id = raised.back();
        raised.pop_back();
        for (auto& waiting : waiting_) {
            for (auto& [transfer, urgent] : waiting) {
                if (transfer->id == id && !std::exchange(urgent, true)) {
                    raised.insert(raised.end(), transfer->after.begin(), transfer->after.end());
                }
            }
        }
    }
}

// The index of the transfer that the link moves next; the number of transfers if each waits for another one.
std::size_t SimulatedProgram::most_urgent(const std::vector<Waiting>& waiting) const {
    std::size_t best = waiting.size();
    for (std::size_t index = 0; index < waiting.size(); ++index) {
        const auto& [transfer, urgent] = waiting[index];
        const bool ready = std::ranges::none_of(transfer->after, [&](TransferId other) { return open_.contains(other); });
        if (ready && (best == waiting.size() || (urgent && !waiting[best].second))) {
            best = index;
        }
    }
    return best;
}

void SimulatedProgram::dispatch(double time) {
    for (std::size_t direction = 0; direction < waiting_.size();) {
        auto& waiting = waiting_[direction];
        const std::size_t next = moving_[direction] ? waiting.size() : most_urgent(waiting);
        if (next == waiting.size()) {
            ++direction;
            continue;
        }
        const std::shared_ptr<const Transfer> transfer = waiting[next].first;
        waiting.erase(waiting.begin() + static_cast<std::ptrdiff_t>(next));
        std::int64_t nbytes = 0;
        for (const Piece& piece : transfer->pieces) {
            nbytes += piece.nbytes;
        }
        if (nbytes == 0) {
            ended_.push_back({time, time, transfer->id});
            open_.erase(transfer->id);
            direction = 0;  // others may have waited for it
            continue;
        }
        const double begin = std::max(time, computed(transfer->last_use));
        moving_[direction] = {begin + static_cast<double>(nbytes) * hardware_.seconds_per_byte, begin, transfer->id};
        moved_[direction] += nbytes;
    }
}

// Lets the link work until a time.
void SimulatedProgram::progress(double until) {
    while (next_end() <= until) {
        const bool second = !moving_[0] || (moving_[1] && moving_[1]->end < moving_[0]->end);
        const Ending ending = *std::exchange(moving_[second ? 1 : 0], std::nullopt);
        open_.erase(ending.transfer);
        ended_.push_back(ending);
        dispatch(ending.end);
    }
}

void SimulatedProgram::complete() {
    progress(now_);
    while (!computing_.empty() && computing_.front().end <= now_) {
        const Ran ran{computing_.front().ordinal, computing_.front().start, computing_.front().end};
        pager_.ran({&ran, 1});
        computing_.pop_front();
    }
    for (const Ending& ending : std::exchange(ended_, {})) {
        pager_.completed(ending.transfer, ending.begin, ending.end);
    }
}

double SimulatedProgram::next_end() const {
    double next = std::numeric_limits<double>::infinity();
    for (const auto& moving : moving_) {
        next = moving ? std::min(next, moving->end) : next;
    }
    return next;
}

}  // namespace farpool::pager
