#include "kvpool/page/reclaim.hpp"

#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool {

void Reclaim::make_room(PoolGroupId group, std::int64_t wanted) {
    while (tier_->free(group) < wanted) {
        const SlotId victim = pages_->queue(group).first();
        if (victim == kBadSlot) {
            throw CorruptedError("pool group " + std::to_string(group.value()) + ": " + std::to_string(wanted) +
                                 " slots wanted, nothing left to evict");
        }
        const Page& page = pages_->at(group, victim);
        remove_page(page.node(), page.life_cycle());
    }
}

// ---- pages

void Reclaim::remove_page(NodeId node, LifeCycleId lc) {
    const ReuseRules::LifeCycleRule& rule = tree_->rules().of(lc);
    if (rule.is_full_like(tree_->at(node).ordinal)) {
        remove_subtree(node);
        return;
    }
    pages_->unlink(node, lc);
    prune(remove_companions(node, rule));
}

NodeId Reclaim::remove_companions(NodeId node, const ReuseRules::LifeCycleRule& rule) {
    if (!rule.key.is_windowed() || rule.key.optional || rule.need <= 1) {
        return node;
    }
    find_useless_above(node, rule);
    unlink_run(rule.id);
    find_useless_below(node, rule);
    unlink_run(rule.id);
    return run_.empty() ? node : run_.back();
}

void Reclaim::find_useless_above(NodeId node, const ReuseRules::LifeCycleRule& rule) {
    run_.clear();
    for (NodeId upper = tree_->at(node).parent; tree_->at(upper).ordinal >= rule.key.sink_blocks &&
                                                tree_->coverage(upper, rule.id) == tree_->tokens_per_block();
         upper = tree_->at(upper).parent) {
        run_.push_back(upper);
        // A run that begins where sequences do, or is as long as a window sees, serves the end behind it.
        if (tree_->at(upper).ordinal == rule.key.sink_blocks || static_cast<std::int64_t>(run_.size()) == rule.need) {
            run_.clear();
            return;
        }
    }
    // Where the path forks, or a cache has something there, the run may go on elsewhere: only the part below goes.
    for (std::size_t length = 0; length < run_.size(); ++length) {
        const Node& useful = tree_->at(run_[length]);
        if (useful.num_children > 1 || useful.holders != 0 || pages_->is_owned(run_[length], rule.id)) {
            run_.resize(length);
        }
    }
}

void Reclaim::find_useless_below(NodeId node, const ReuseRules::LifeCycleRule& rule) {
    run_.clear();
    for (NodeId lower = tree_->only_child(node); lower != kNoNode; lower = tree_->only_child(lower)) {
        const std::int64_t coverage = tree_->coverage(lower, rule.id);
        if (coverage == 0) {
            return;
        }
        run_.push_back(lower);
        const Node& n = tree_->at(lower);
        if (n.holders != 0 || pages_->is_owned(lower, rule.id) || n.num_children > 1 ||
            static_cast<std::int64_t>(run_.size()) == rule.need) {
            run_.clear();
            return;
        }
        if (coverage < tree_->tokens_per_block()) {
            return;  // only an end can lie here
        }
    }
}

void Reclaim::unlink_run(LifeCycleId lc) {
    for (const NodeId node : run_) {
        pages_->unlink(node, lc);
    }
}

// ---- nodes

void Reclaim::remove_subtree(NodeId top) {
    std::vector<NodeId> nodes;
    std::vector<NodeId> waiting{top};
    while (!waiting.empty()) {
        nodes.push_back(waiting.back());
        waiting.pop_back();
        for (NodeId c = tree_->first_child(nodes.back()); c != kNoNode; c = tree_->next_sibling(c)) {
            waiting.push_back(c);
        }
    }
    const NodeId parent = tree_->at(top).parent;
    for (; !nodes.empty(); nodes.pop_back()) {
        remove_node(nodes.back());
    }
    if (parent != kNoNode) {
        prune(parent);
    }
}

void Reclaim::prune(NodeId node) {
    while (node != kNoNode && tree_->at(node).num_children == 0 && tree_->at(node).holders == 0) {
        const NodeId parent = tree_->at(node).parent;
        if (parent != kNoNode && (has_owned_page(node) || matcher_->serves_an_end(node))) {
            return;
        }
        remove_node(node);
        node = parent;
    }
}

bool Reclaim::has_owned_page(NodeId node) const noexcept {
    for (const ReuseRules::LifeCycleRule& rule : tree_->rules().life_cycles) {
        if (pages_->is_owned(node, rule.id)) {
            return true;
        }
    }
    return false;
}

void Reclaim::remove_node(NodeId node) {
    const NodeId parent = tree_->at(node).parent;
    if (parent != kNoNode) {
        retention_->clear(node);
        for (const ReuseRules::LifeCycleRule& rule : tree_->rules().life_cycles) {
            pages_->unlink(node, rule.id);
        }
    }
    if (tree_->at(node).num_children != 0 || tree_->at(node).holders != 0) {
        return;  // on the path of a cache: it only loses its pages
    }
    tree_->remove(node);
    if (parent != kNoNode && tree_->at(parent).num_children == 1) {
        retention_->unmark(parent, Mark::fork);
    }
}

}  // namespace kvpool
