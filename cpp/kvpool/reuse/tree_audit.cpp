// RadixTree::audit(): whether all that the tree remembers about its nodes is what the nodes say.
#include <array>
#include <string>
#include <vector>

#include "kvpool/core/errors.hpp"
#include "kvpool/reuse/radix_tree.hpp"

namespace kvpool {

void RadixTree::audit() const {
    std::int64_t broken = 0;
    NodeId previous = kNoNode;
    for (const NodeId root : roots_in_order()) {
        if (previous != kNoNode && !(scopes_[at(previous).scope].scope < scopes_[at(root).scope].scope)) {
            throw CorruptedError("radix tree: scopes out of order");
        }
        previous = root;
    }
    for (const NodeId node : nodes_in_order()) {
        broken += counts_as_broken(at(node)) ? 1 : 0;
        audit_node(node);
        audit_children(node);
    }
    if (broken != num_broken_) {
        throw CorruptedError("radix tree: " + std::to_string(broken) + " nodes are broken, " +
                             std::to_string(num_broken_) + " counted");
    }
}

void RadixTree::audit_node(NodeId node) const {
    const Node& n = at(node);
    const auto fail = [&](const char* what) {
        throw CorruptedError("radix tree: node " + std::to_string(node.value()) + ": " + what);
    };
    if (n.is_root()) {
        return;
    }
    std::uint16_t lacking_full_like = 0;
    std::uint16_t lacking_required = num_required_;
    std::uint32_t whole = 0;
    for (const ReuseRules::LifeCycleRule& rule : rules_->life_cycles) {
        const Link& l = link(node, rule.id);
        const auto& [slot, coverage] = l.page;
        if ((slot == kBadSlot) != (coverage == 0) || coverage < 0 || coverage > n.num_tokens || l.tails < 0) {
            fail("a page without coverage, or the reverse");
        }
        const bool is_required = !rule.key.is_ssm && !rule.key.optional;
        if (is_required && rule.is_full_like(n.ordinal) && coverage != n.num_tokens) {
            ++lacking_full_like;
        }
        if (is_required && rule.key.window != 1 && slot != kBadSlot) {
            --lacking_required;
        }
        whole |= coverage == n.num_tokens ? rule.window_bit : 0;
    }
    if (lacking_full_like != n.summary.lacking_full_like || lacking_required != n.summary.lacking_required ||
        whole != n.summary.whole) {
        fail("the summary of its pages is wrong");
    }
    if (n.num_tokens < 1 || n.num_tokens > tokens_per_block_ || n.ordinal != at(n.parent).ordinal + 1 ||
        n.has_digests != has_digests(tokens(node))) {
        fail("a wrong place");
    }
    if (n.num_tokens < tokens_per_block_ && (n.num_children != 0 || n.holders != 0)) {
        fail("partial, but not a leaf");
    }
}

void RadixTree::audit_children(NodeId parent) const {
    const auto fail = [&](const char* what) {
        throw CorruptedError("radix tree: children of node " + std::to_string(parent.value()) + ": " + what);
    };
    std::array<std::int64_t, 3> expected{};
    NodeId previous = kNoNode;
    for (NodeId c = first_child(parent); c != kNoNode; c = next_sibling(c)) {
        if (at(c).parent != parent) {
            fail("one has another parent");
        }
        if (previous != kNoNode && (compare(Query::encoded(tokens(previous)), c) >= 0 ||
                                    common_prefix(tokens(previous), tokens(c)) == tokens(previous).size())) {
            fail("out of order");
        }
        for (std::size_t level = 0; level < num_levels_; ++level) {
            expected[level] += level == 0 || is_in(c, static_cast<Level>(level)) ? 1 : 0;
        }
        previous = c;
    }
    for (std::size_t level = 0; level < num_levels_; ++level) {
        std::int64_t found = 0;
        std::vector<std::int32_t> stack{at(parent).roots[level]};
        while (!stack.empty()) {
            const std::int32_t node = stack.back();
            stack.pop_back();
            if (node == kNil) {
                continue;
            }
            const TreapLinks& links = at(NodeId(node)).links[level];
            for (const std::int32_t below : {links.left, links.right}) {
                if (below != kNil && treap_priority(below) > treap_priority(node)) {
                    fail("a treap that is no heap");
                }
                stack.push_back(below);
            }
            if (level != 0 && !is_in(NodeId(node), static_cast<Level>(level))) {
                fail("one that is not usable is listed as such");
            }
            ++found;
        }
        if (found != expected[level]) {
            fail("not all are listed");
        }
    }
    if (expected[0] != at(parent).num_children) {
        fail("the count is wrong");
    }
}

}  // namespace kvpool
