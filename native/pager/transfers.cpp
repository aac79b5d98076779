#include "pager/transfers.hpp"

#include <algorithm>
#include <variant>

namespace farpool::pager {

TransferId Transfers::start(Kind kind, BlockId block, std::vector<Piece> pieces, std::vector<TransferId> after, bool demand,
                            std::int64_t last_use) {
    auto transfer = std::make_shared<const Transfer>(
        Transfer{++number_, kind, block, demand, std::move(pieces), std::move(after), last_use});
    under_way_.emplace_hint(under_way_.end(), number_, transfer);
    moving_[block] = number_;
    blocks_[block].moving = true;
    commands_.emplace_back(std::move(transfer));
    return number_;
}

std::shared_ptr<const Transfer> Transfers::finish(TransferId number) {
    const auto found = under_way_.find(number);
    if (found == under_way_.end()) {
        return nullptr;
    }
    std::shared_ptr<const Transfer> transfer = std::move(found->second);
    under_way_.erase(found);
    moving_.erase(transfer->block);
    blocks_[transfer->block].moving = false;
    return transfer;
}

void Transfers::cancel(TransferId number) {
    std::erase_if(commands_, [&](const Command& command) {
        const auto* transfer = std::get_if<std::shared_ptr<const Transfer>>(&command);
        return transfer != nullptr && (*transfer)->id == number;
    });
    finish(number);
}

void Transfers::raise(BlockId block) {
    if (blocks_[block].moving && !under_way_.at(number_of(block))->demand) {
        raised_.push_back(number_of(block));
    }
}

std::shared_ptr<const Transfer> Transfers::find(TransferId number) const {
    const auto found = under_way_.find(number);
    return found == under_way_.end() ? nullptr : found->second;
}

std::vector<std::shared_ptr<const Transfer>> Transfers::ordered_after(TransferId number) const {
    std::vector<std::shared_ptr<const Transfer>> waiting;
    for (const auto& [id, transfer] : under_way_) {
        if (std::ranges::find(transfer->after, number) != transfer->after.end()) {
            waiting.push_back(transfer);
        }
    }
    return waiting;
}

}  // namespace farpool::pager
