#include "kvpool/reuse/siblings.hpp"

namespace kvpool {

Siblings::Siblings(const RadixTree& tree, NodeId parent, Level level, const Query& query, NodeId except) noexcept
    : tree_(&tree), root_(tree.at(parent).child(level).value()), level_(level), query_(query), except_(except) {
    const TreapPlace place = tree.place(parent, level, query);
    before_ = place.before;
    after_ = place.from;
    if (before_ == except_.value() && before_ != kNil) {
        step_before();
    }
    if (after_ == except_.value() && after_ != kNil) {
        step_after();
    }
    shared_before_ = shared_with(before_);
    shared_after_ = shared_with(after_);
}

Siblings::Sibling Siblings::next() noexcept {
    if (shared_before_ == 0 && shared_after_ == 0) {
        return {kNoNode, 0};
    }
    Sibling sibling;
    if (shared_before_ >= shared_after_) {
        sibling = {NodeId(before_), shared_before_};
        step_before();
        if (before_ == except_.value() && before_ != kNil) {
            step_before();
        }
        shared_before_ = shared_with(before_);
    } else {
        sibling = {NodeId(after_), shared_after_};
        step_after();
        if (after_ == except_.value() && after_ != kNil) {
            step_after();
        }
        shared_after_ = shared_with(after_);
    }
    return sibling;
}

void Siblings::step_before() noexcept {
    const RadixTree::Access<const RadixTree> access{*tree_, level_};
    const Query here = Query::encoded(tree_->tokens(NodeId(before_)));
    before_ =
        treap_place(root_, access, [&](std::int32_t other) { return tree_->compare(here, NodeId(other)); }).before;
}

void Siblings::step_after() noexcept {
    const RadixTree::Access<const RadixTree> access{*tree_, level_};
    const Query here = Query::encoded(tree_->tokens(NodeId(after_)));
    after_ = treap_after(root_, access, [&](std::int32_t other) { return tree_->compare(here, NodeId(other)); });
}

std::int64_t Siblings::shared_with(std::int32_t node) const noexcept {
    return node == kNil ? 0 : static_cast<std::int64_t>(common_prefix(query_.tokens, tree_->tokens(NodeId(node))));
}

}  // namespace kvpool
