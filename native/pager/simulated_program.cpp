#include "pager/simulated_program.hpp"

#include <algorithm>
#include <limits>
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
    explicit SimulatedSpace(std::int64_t capacity) : extents_(capacity, block_bytes) {}
    std::int64_t reserve(std::int64_t nbytes, int) override { return extents_.alloc(nbytes); }
    void free(std::int64_t offset, std::int64_t, int) override { extents_.free(offset); }

private:
    ExtentAllocator extents_;
};

}  // namespace

SimulatedProgram::SimulatedProgram(std::int64_t blocks, std::int64_t history)
    : blocks_(blocks),
      pager_(blocks * block_bytes / share, {std::make_shared<SimulatedSpace>(blocks * block_bytes)}, 1, 64, history, true,
             false) {
    for (std::int64_t start = 0; start < blocks; start += chunk) {
        pager_.create(std::vector<std::int64_t>(static_cast<std::size_t>(std::min(chunk, blocks - start)), block_bytes), 0);
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

void SimulatedProgram::access(BlockId block, Mode mode) {
    now_ += link;
    complete();
    const std::shared_ptr<Access> access = pager_.request({{block, 1, mode, -1}}, now_);
    start();
    while (!access->granted) {
        if (!std::holds_alternative<std::monostate>(access->refusal)) {
            throw std::logic_error("SimulatedProgram: an access was refused");
        }
        now_ = next_end();
        complete();
        pager_.proceed(now_);
        start();
    }
    pager_.release(*access, true);
    start();
}

void SimulatedProgram::start() {
    for (const Command& command : pager_.take_commands()) {
        const auto* taken = std::get_if<std::shared_ptr<const Transfer>>(&command);
        if (taken == nullptr) {
            continue;
        }
        const Transfer& transfer = **taken;
        const auto direction = static_cast<std::size_t>(transfer.kind);
        double begin = std::max(now_, free_[direction]);
        for (const TransferId other : transfer.after) {
            if (const auto found = ends_.find(other); found != ends_.end()) {
                begin = std::max(begin, found->second);
            }
        }
        const double end = begin + (transfer.pieces.empty() ? 0.0 : link);
        free_[direction] = ends_[transfer.id] = end;
        under_way_[direction].push_back({end, begin, transfer.id});
    }
    pager_.take_raised();
}

void SimulatedProgram::complete() {
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
