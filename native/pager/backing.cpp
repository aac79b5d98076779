#include "pager/backing.hpp"

namespace farpool::pager {

std::int32_t Backing::add_source() {
    spaces_.push_back(nullptr);
    return static_cast<std::int32_t>(spaces_.size()) - 1;
}

void Backing::adopt(BlockId block, const Piece& piece) {
    sources_[block].push_back(piece);
    blocks_[block].sourced = true;
}

void Backing::note_copy(BlockId block, std::int32_t tier, std::int64_t offset) {
    blocks_[block].tier = static_cast<std::int16_t>(tier);
    blocks_[block].copy = offset;
}

std::vector<Piece> Backing::pieces(BlockId block, std::int64_t place) const {
    if (!blocks_[block].sourced) {
        return {extent(block, place)};
    }
    std::vector<Piece> pieces = sources_.at(block);
    for (Piece& piece : pieces) {
        piece.place += place;
    }
    return pieces;
}

Piece Backing::extent(BlockId block, std::int64_t place) const {
    const Block& b = blocks_[block];
    return {b.tier, b.copy, place, b.size};
}

bool Backing::is_barred(BlockId block, std::size_t tier) const {
    const auto found = barred_.find(block);
    return found != barred_.end() && tier < found->second.size() && found->second[tier];
}

bool Backing::reserve(BlockId block) {
    Block& b = blocks_[block];
    if (b.tier >= 0) {
        return true;
    }
    for (std::size_t tier = 0; tier < spaces_.size(); ++tier) {
        Space* space = spaces_[tier].get();
        if (space == nullptr || is_barred(block, tier)) {
            continue;
        }
        std::int64_t offset = space->reserve(b.size, b.cls);
        while (offset < 0 && make_way(static_cast<std::int32_t>(tier), b.size)) {
            offset = space->reserve(b.size, b.cls);
        }
        if (offset >= 0) {
            b.tier = static_cast<std::int16_t>(tier);
            b.copy = offset;
            return true;
        }
    }
    return false;
}

// Makes room in a full tier by dropping the copy of one resident block: a stale copy, else a clean one.
bool Backing::make_way(std::int32_t tier, std::int64_t nbytes) {
    BlockId found = -1;
    arena_.each_owner([&](BlockId block, std::int64_t, std::int64_t) {
        const Block& b = blocks_[block];
        if (b.tier == tier && b.size >= nbytes && may_lose_(block)) {
            if (found < 0 || b.dirty) {
                found = block;
            }
            return !b.dirty;
        }
        return true;
    });
    if (found < 0) {
        return false;
    }
    drop(found);
    blocks_[found].dirty = true;
    return true;
}

void Backing::drop_sources(BlockId block) {
    if (blocks_[block].sourced) {
        blocks_[block].sourced = false;
        sources_.erase(block);
    }
}

void Backing::drop(BlockId block) {
    drop_sources(block);
    if (blocks_[block].tier >= 0) {
        free(block);
    }
}

void Backing::free(BlockId block) {
    Block& b = blocks_[block];
    spaces_[static_cast<std::size_t>(b.tier)]->free(b.copy, b.size, b.cls);
    b.tier = -1;
    b.copy = nowhere;
}

bool Backing::bar(BlockId block) {
    std::vector<bool>& barred = barred_[block];
    barred.resize(spaces_.size());
    barred[static_cast<std::size_t>(blocks_[block].tier)] = true;
    free(block);
    for (std::size_t tier = 0; tier < spaces_.size(); ++tier) {
        if (spaces_[tier] != nullptr && !barred[tier]) {
            return true;
        }
    }
    return false;
}

}  // namespace farpool::pager
