#include "core/hole_tree.hpp"

#include <algorithm>

#include "core/hash.hpp"
#include "core/room.hpp"

namespace farpool {

void HoleTree::update(std::int32_t node) {
    Node& n = nodes_[index(node)];
    n.largest = std::max({n.hole.nbytes, largest_of(n.left), largest_of(n.right)});
}

void HoleTree::split(std::int32_t node, std::int64_t offset, std::int32_t& below, std::int32_t& rest) {
    if (node == none) {
        below = rest = none;
        return;
    }
    Node& n = nodes_[index(node)];
    if (n.hole.offset < offset) {
        split(n.right, offset, n.right, rest);
        below = node;
    } else {
        split(n.left, offset, below, n.left);
        rest = node;
    }
    update(node);
}

std::int32_t HoleTree::merge(std::int32_t left, std::int32_t right) {
    if (left == none || right == none) {
        return left == none ? right : left;
    }
    if (nodes_[index(left)].priority > nodes_[index(right)].priority) {
        nodes_[index(left)].right = merge(nodes_[index(left)].right, right);
        update(left);
        return left;
    }
    nodes_[index(right)].left = merge(left, nodes_[index(right)].left);
    update(right);
    return right;
}

void HoleTree::make_room(std::size_t holes) {
    farpool::make_room(spare_, holes);  // so that `erase` needs no memory
    farpool::make_room(nodes_, holes);
    while (nodes_.size() < holes) {
        spare_.push_back(static_cast<std::int32_t>(nodes_.size()));
        nodes_.emplace_back();
    }
}

void HoleTree::insert(Hole hole) {
    make_room(nodes_.size() - spare_.size() + 1);
    const std::int32_t node = spare_.back();
    spare_.pop_back();
    nodes_[index(node)] = {hole, hole.nbytes, mix64(static_cast<std::uint64_t>(hole.offset)), none, none};
    std::int32_t below = none;
    std::int32_t rest = none;
    split(root_, hole.offset, below, rest);
    root_ = merge(merge(below, node), rest);
}

void HoleTree::erase(std::int64_t offset) {
    std::int32_t below = none;
    std::int32_t rest = none;
    std::int32_t found = none;
    split(root_, offset, below, rest);
    split(rest, offset + 1, found, rest);
    if (found != none) {
        spare_.push_back(found);
    }
    root_ = merge(below, rest);
}

Hole HoleTree::first_fit(std::int64_t nbytes) const {
    std::int32_t node = root_;
    if (largest_of(node) < nbytes) {
        return {0, 0};
    }
    for (;;) {
        const Node& n = nodes_[index(node)];
        if (largest_of(n.left) >= nbytes) {
            node = n.left;
        } else if (n.hole.nbytes >= nbytes) {
            return n.hole;
        } else {
            node = n.right;
        }
    }
}

Hole HoleTree::at_or_below(std::int64_t offset) const {
    Hole best{0, 0};
    for (std::int32_t node = root_; node != none;) {
        const Node& n = nodes_[index(node)];
        if (n.hole.offset <= offset) {
            best = n.hole;
            node = n.right;
        } else {
            node = n.left;
        }
    }
    return best;
}

}  // namespace farpool
