#include "kvpool/page/prefix_cache.hpp"

#include <algorithm>
#include <map>
#include <string>
#include <utility>

#include "kvpool/core/errors.hpp"

namespace kvpool {

namespace {

// A node has a page of some pool group, as a rule.
std::int64_t most_slots(const Tier& tier) {
    std::int64_t most = 0;
    for (std::size_t g = 0; g < tier.num_pool_groups(); ++g) {
        most = std::max(most, tier.total(make_id<PoolGroupId>(g)));
    }
    return most;
}

}  // namespace

PrefixCache::PrefixCache(const Layout& layout, ReuseRules rules, Tier& tier, Journal& journal)
    : tier_(&tier),
      rules_(std::move(rules)),
      digests_(journal),
      tree_(rules_, digests_, journal, most_slots(tier)),
      pages_(layout, tree_, tier, journal),
      retention_(tree_, pages_),
      matcher_(tree_),
      reclaim_(tree_, matcher_, pages_, retention_, tier) {}

BlockKey PrefixCache::key_on_top(const ReuseScope& scope, NodeId parent, const Query& query, std::int64_t ordinal) {
    const BlockKey above = parent == kNoNode ? root_key(scope) : tree_.key(parent);
    return block_key(
        above, query.block(static_cast<std::size_t>(ordinal), static_cast<std::size_t>(tokens_per_block())), digests_);
}

// ---- nodes

Inserted PrefixCache::insert_full(NodeId parent, TokenSpan tokens) {
    const NodeId child = tree_.child(parent, tokens);
    return child != kNoNode ? Inserted{child, true} : Inserted{insert(parent, tokens), false};
}

Inserted PrefixCache::insert_tail(NodeId parent, TokenSpan tokens) {
    const NodeId child = tree_.covering_child(parent, tokens);
    return child != kNoNode ? Inserted{child, true} : Inserted{insert(parent, tokens), false};
}

// A new child; one that it begins with makes way for it and hands its pages over.
NodeId PrefixCache::insert(NodeId parent, TokenSpan tokens) {
    const NodeId shorter = tree_.at(parent).num_children == 0 ? kNoNode : tree_.covered_child(parent, tokens);
    if (shorter == kNoNode) {
        const NodeId node = tree_.add(parent, tokens);
        if (tree_.at(parent).num_children == 2) {
            retention_.mark(parent, Mark::fork);
        }
        return node;
    }
    struct Handed {
        LifeCycleId life_cycle;
        SlotId slot;
        std::int64_t coverage;
    };
    std::vector<Handed> handed;
    retention_.clear(shorter);
    for (const ReuseRules::LifeCycleRule& rule : rules_.life_cycles) {
        if (const SlotId slot = tree_.page(shorter, rule.id); slot != kBadSlot) {
            handed.push_back({rule.id, slot, tree_.coverage(shorter, rule.id)});
            tree_.set_page(shorter, rule.id, kBadSlot, 0);
        }
    }
    tree_.remove(shorter);
    const NodeId node = tree_.add(parent, tokens);
    for (const Handed& page : handed) {
        pages_.hand_over(node, page.life_cycle, page.slot, page.coverage);
    }
    return node;
}

// ---- pages

bool PrefixCache::install(NodeId node, LifeCycleId lc, SlotId slot, std::int64_t coverage) {
    if (!can_install(node, lc, coverage)) {
        return false;
    }
    if (tree_.page(node, lc) != kBadSlot) {
        pages_.unlink(node, lc);
    }
    tier_->finish(pages_.group_of(lc), slot);
    pages_.link(lc, slot, node, coverage);
    return true;
}

void PrefixCache::remove_page(NodeId node, LifeCycleId lc) {
    if (tree_.page(node, lc) != kBadSlot) {
        reclaim_.remove_page(node, lc);
    }
}

// ---- planned drops

PlannedPage PrefixCache::plan_page(NodeId node, LifeCycleId lc) {
    const SlotId slot = tree_.page(node, lc);
    pages_.add_plan(lc, slot, 1);
    return {lc, slot, pages_.at(lc, slot).serial};
}

void PrefixCache::drop_page(const PlannedPage& planned) {
    const Page& page = pages_.at(planned.life_cycle, planned.slot);
    if (!page.exists() || page.serial != planned.serial) {
        return;
    }
    pages_.add_plan(planned.life_cycle, planned.slot, -1);
    if (page.plans == 0 && page.head.is_queued) {
        reclaim_.remove_page(page.node(), planned.life_cycle);
    }
}

// ---- the whole

void PrefixCache::clear() {
    for (const NodeId root : tree_.roots_in_order()) {
        reclaim_.remove_subtree(root);
    }
}

bool PrefixCache::all_cached() const {
    const std::vector<NodeId> nodes = tree_.nodes_in_order();
    return std::none_of(nodes.begin(), nodes.end(), [&](NodeId node) {
        return std::any_of(rules_.life_cycles.begin(), rules_.life_cycles.end(),
                           [&](const ReuseRules::LifeCycleRule& rule) { return pages_.is_owned(node, rule.id); });
    });
}

std::vector<PrefixCache::Queued> PrefixCache::queue_in_order(PoolGroupId group) const {
    std::vector<Queued> queue;
    for (const SlotId slot : pages_.queue(group).in_order()) {
        const Page::Head& head = pages_.at(group, slot).head;
        queue.push_back({head.priority, head.is_class_b ? 1 : 0, slot});
    }
    return queue;
}

void PrefixCache::audit(const Owners& owners) const {
    tree_.audit();
    retention_.audit();
    pages_.audit(owners.refs);
    std::map<NodeId, std::int32_t> holders;
    for (const NodeId node : owners.last_nodes) {
        ++holders[node];
    }
    std::map<Token, std::int64_t> digests;
    const auto count = [&](TokenSpan tokens) {
        for (const Token token : tokens) {
            digests[token] += is_digest(token) ? 1 : 0;
        }
    };
    for (const NodeId node : tree_.nodes_in_order()) {
        const auto it = holders.find(node);
        if (tree_.at(node).holders != (it == holders.end() ? 0 : it->second)) {
            throw CorruptedError("node " + std::to_string(node.value()) + ": " +
                                 std::to_string(tree_.at(node).holders) + " holders counted");
        }
        count(tree_.tokens(node));
        if (it != holders.end()) {
            holders.erase(it);
        }
    }
    if (!holders.empty()) {
        throw CorruptedError("a KV cache holds a node that is not in the tree");
    }
    for (const TokenSpan tail : owners.tails) {
        count(tail);
    }
    std::vector<std::pair<Token, std::int64_t>> expected;
    for (const auto& [token, references] : digests) {
        if (is_digest(token)) {
            expected.emplace_back(token, references);
        }
    }
    digests_.audit(expected);
}

}  // namespace kvpool
