// The transfers under way, and the commands that the queue has not taken yet.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "pager/block_table.hpp"
#include "pager/messages.hpp"

namespace farpool::pager {

// At most one transfer is under way for a block; the block is marked as `moving` until it ends.
class Transfers {
public:
    explicit Transfers(BlockTable& blocks) : blocks_(blocks) {}

    // Starts a transfer of a block, as the next command. `after`, `demand`, `last_use`: see `Transfer`.
    TransferId start(Kind kind, BlockId block, std::vector<Piece> pieces, std::vector<TransferId> after, bool demand,
                     std::int64_t last_use);
    // Adds a copy inside the arena as the next command.
    void copy(const Move& move) { commands_.emplace_back(move); }
    // Ends a transfer and returns it; null if it was cancelled before.
    std::shared_ptr<const Transfer> finish(TransferId number);
    // Ends a transfer that has to be undone. If the queue has not taken it yet, it never starts.
    void cancel(TransferId number);
    // Asks the queue to hurry the transfer of a block, if one is under way that no access waited for.
    void raise(BlockId block);

    bool empty() const noexcept { return under_way_.empty(); }
    // By number, which is the order in which they were started.
    const std::map<TransferId, std::shared_ptr<const Transfer>>& under_way() const noexcept { return under_way_; }
    // The transfer with this number; null if it is not under way.
    std::shared_ptr<const Transfer> find(TransferId number) const;
    // Number of the transfer under way for a block that is moving.
    TransferId number_of(BlockId block) const { return moving_.at(block); }
    // Transfers that must not begin before this one has ended.
    std::vector<std::shared_ptr<const Transfer>> ordered_after(TransferId number) const;

    // Hands over the commands to start now, in order.
    std::vector<Command> take_commands() { return std::exchange(commands_, {}); }
    // The same into an empty vector, whose memory is used for the next commands.
    void take_commands(std::vector<Command>& commands) { commands_.swap(commands); }
    // Hands over the transfers started as prefetches for which an access waits now.
    std::vector<TransferId> take_raised() { return std::exchange(raised_, {}); }

private:
    BlockTable& blocks_;
    TransferId number_ = 0;
    std::map<TransferId, std::shared_ptr<const Transfer>> under_way_;
    std::unordered_map<BlockId, TransferId> moving_;
    std::vector<Command> commands_;
    std::vector<TransferId> raised_;
};

}  // namespace farpool::pager
