#include "kvpool/reuse/retention.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "kvpool/core/errors.hpp"

namespace kvpool {

template <class F>
void Retention::for_tail(NodeId node, Mark bit, F&& f) const {
    const ReuseRules& rules = tree_->rules();
    const std::int64_t slack = bit == Mark::prompt ? rules.window_tail_slack : 0;
    const std::int64_t end = std::max<std::int64_t>(0, tree_->end_of(node) - slack);
    for (const ReuseRules::LifeCycleRule& rule : rules.windowed) {
        const std::int64_t first = rule.first_in_window(end, rules.tokens_per_block);
        for (NodeId upper = node; tree_->at(upper).ordinal >= first; upper = tree_->at(upper).parent) {
            f(rule.id, upper);
        }
    }
}

void Retention::mark(NodeId node, Mark bit) {
    const Node& n = tree_->at(node);
    if (n.has(bit) || n.is_root() || !tree_->rules().retain_window_tails) {
        return;
    }
    tree_->set_marks(node, static_cast<std::uint8_t>(n.marks | static_cast<std::uint8_t>(bit)));
    count(node, bit, 1);
}

void Retention::unmark(NodeId node, Mark bit) {
    const Node& n = tree_->at(node);
    if (!n.has(bit)) {
        return;
    }
    tree_->set_marks(node, static_cast<std::uint8_t>(n.marks & ~static_cast<std::uint8_t>(bit)));
    count(node, bit, -1);
}

void Retention::clear(NodeId node) {
    for (const Mark bit : {Mark::sequence, Mark::prompt, Mark::fork}) {
        unmark(node, bit);
    }
}

void Retention::count(NodeId node, Mark bit, std::int32_t n) {
    for_tail(node, bit, [&](LifeCycleId lc, NodeId upper) {
        tree_->add_tail(upper, lc, n);
        if (tree_->tails(upper, lc) == (n > 0 ? 1 : 0)) {
            listener_->tail_changed(upper, lc);
        }
    });
}

void Retention::audit() const {
    std::map<std::pair<NodeId, LifeCycleId>, std::int32_t> expected;
    const std::vector<NodeId> nodes = tree_->nodes_in_order();
    for (const NodeId node : nodes) {
        for (const Mark bit : {Mark::sequence, Mark::prompt, Mark::fork}) {
            if (tree_->at(node).has(bit)) {
                for_tail(node, bit, [&](LifeCycleId lc, NodeId upper) { ++expected[{upper, lc}]; });
            }
        }
    }
    for (const NodeId node : nodes) {
        const Node& n = tree_->at(node);
        for (const ReuseRules::LifeCycleRule& rule : tree_->rules().life_cycles) {
            const auto it = expected.find({node, rule.id});
            if (tree_->tails(node, rule.id) != (it == expected.end() ? 0 : it->second)) {
                throw CorruptedError("node " + std::to_string(node.value()) + ", layer group " +
                                     std::to_string(rule.id.value()) + ": " +
                                     std::to_string(tree_->tails(node, rule.id)) + " marks counted");
            }
        }
        const bool is_fork = !n.is_root() && n.num_children > 1 && tree_->rules().retain_window_tails;
        if (n.has(Mark::fork) != is_fork || (n.is_root() && n.marks != 0)) {
            throw CorruptedError("node " + std::to_string(node.value()) + ": a wrong fork mark");
        }
    }
}

}  // namespace kvpool
