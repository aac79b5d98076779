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
        now_ = std::max(now_, next_end());
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
        const auto* taken = std::get_if<std::shared_ptr<const Transfer>>(&command);
        if (taken == nullptr) {
            continue;
        }
        const Transfer& transfer = **taken;
        const auto direction = static_cast<std::size_t>(transfer.kind);
        now_ += hardware_.transfer_seconds;
        double begin = std::max({now_, free_[direction], computed(transfer.last_use)});
        for (const TransferId other : transfer.after) {
            if (const auto found = ends_.find(other); found != ends_.end()) {
                begin = std::max(begin, found->second);
            }
        }
        std::int64_t nbytes = 0;
        for (const Piece& piece : transfer.pieces) {
            nbytes += piece.nbytes;
        }
        const double end = begin + static_cast<double>(nbytes) * hardware_.seconds_per_byte;
        moved_[direction] += nbytes;
        free_[direction] = ends_[transfer.id] = end;
        under_way_[direction].push_back({end, begin, transfer.id});
    }
    pager_.take_raised();
}

void SimulatedProgram::complete() {
    while (!computing_.empty() && computing_.front().end <= now_) {
        pager_.ran(computing_.front().ordinal, computing_.front().start, computing_.front().end);
        computing_.pop_front();
    }
    std::vector<Ending> ended;
    for (auto& transfers : under_way_) {
        while (!transfers.empty() && transfers.front().end <= now_) {
            ended.push_back(transfers.front());
            transfers.pop_front();
        }
    }
    std::ranges::sort(ended, {}, [](const Ending& ending) { return std::pair(ending.end, ending.transfer); });
    for (const Ending& ending : ended) {
        ends_.erase(ending.transfer);
        pager_.completed(ending.transfer, ending.begin, ending.end);
    }
}

double SimulatedProgram::next_end() const {
    double next = std::numeric_limits<double>::infinity();
    for (const auto& transfers : under_way_) {
        next = transfers.empty() ? next : std::min(next, transfers.front().end);
    }
    return next;
}

}  // namespace farpool::pager
