// Making room: which page goes next, and what goes with it because it serves nobody without it.
//
// A page that every prefix through its block needs takes the whole subtree along.  A window page may leave runs of pages behind
// that are too short for any end point, its companions.  A node that no prompt can end at and that leads nowhere is pruned.  Nodes
// that caches hold, and those with children, never go.  The order of all steps is fixed: it decides the order of the queues.
// Costs: a run is looked at over at most `need` nodes each way; a node is removed once.  Changes go through the journal.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/page/page_store.hpp"
#include "kvpool/reuse/match.hpp"
#include "kvpool/reuse/radix_tree.hpp"
#include "kvpool/reuse/retention.hpp"
#include "kvpool/storage/tier.hpp"

namespace kvpool {

class Reclaim {
public:
    // All of them outlive it.
    Reclaim(RadixTree& tree, const Matcher& matcher, PageStore& pages, Retention& retention, Tier& tier) noexcept
        : tree_(&tree), matcher_(&matcher), pages_(&pages), retention_(&retention), tier_(&tier) {}

    // Takes victims until `wanted` slots of a pool group are free.  CorruptedError when nothing is left.
    void make_room(PoolGroupId group, std::int64_t wanted);
    // A linked page leaves the tree, with what is useless without it; a cached one's slot is free.
    void remove_page(NodeId node, LifeCycleId lc);
    // Removes a node and all below it, children before parents, then prunes from its parent upward.
    void remove_subtree(NodeId top);
    // Removes `node` and then its ancestors, as far as they lead nowhere and serve nobody.
    void prune(NodeId node);

private:
    // Removes window pages around `node` that no end point can use now; the lowest node that lost its page.
    NodeId remove_companions(NodeId node, const ReuseRules::LifeCycleRule& rule);
    // The run of pages that ends above `node`, or begins below it, nearest first, if it is too short for any end point; into run_.
    void find_useless_above(NodeId node, const ReuseRules::LifeCycleRule& rule);
    void find_useless_below(NodeId node, const ReuseRules::LifeCycleRule& rule);
    void unlink_run(LifeCycleId lc);
    [[nodiscard]] bool has_owned_page(NodeId node) const noexcept;
    // Removes a node without children; cached pages are gone, those that caches own lose their node.
    void remove_node(NodeId node);

    RadixTree* tree_;
    const Matcher* matcher_;
    PageStore* pages_;
    Retention* retention_;
    Tier* tier_;
    std::vector<NodeId> run_;  // keeps its capacity
};

}  // namespace kvpool
