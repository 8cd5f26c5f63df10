// Records of occupied slots, and the queues in which cached pages wait.
//
// Invariants: as Page says; a page that is neither owned nor linked does not exist, and its slot is free.  Every page that a node
// names is linked to that node.  Records lie in arrays by slot, made at the start, zero pages of memory until used.
// CorruptedError where a caller names a slot that has no page.  Changes go through the journal.
#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/core/journal.hpp"
#include "kvpool/page/eviction_queue.hpp"
#include "kvpool/reuse/radix_tree.hpp"
#include "kvpool/reuse/retention.hpp"
#include "kvpool/storage/layout.hpp"
#include "kvpool/storage/tier.hpp"

namespace kvpool {

class PageStore final : public TailListener {
public:
    // All of them outlive the store.
    PageStore(const Layout& layout, RadixTree& tree, Tier& tier, Journal& journal);

    [[nodiscard]] PoolGroupId group_of(LifeCycleId lc) const noexcept { return places_[lc.index()].group; }
    [[nodiscard]] const Page& at(LifeCycleId lc, SlotId slot) const noexcept {
        return places_[lc.index()].pages[slot.index()];
    }
    [[nodiscard]] const EvictionQueue& queue(PoolGroupId group) const noexcept { return groups_[group.index()].queue; }
    // Record of a slot, of whatever life cycle.
    [[nodiscard]] const Page& at(PoolGroupId group, SlotId slot) const noexcept {
        return groups_[group.index()].pages[slot.index()];
    }

    // ---- owners

    // A record of a slot just handed out, with one owner.
    void add(LifeCycleId lc, SlotId slot, std::int32_t priority);
    // One more owner of a linked page; it leaves the queue and its priority rises.
    void own(LifeCycleId lc, SlotId slot, std::int32_t priority);
    // One owner less; without any a linked page waits in the queue, another one is gone and its slot free.
    void disown(LifeCycleId lc, SlotId slot);

    // ---- links

    // The node, which names no page there, names this one from now on; the page has no node.
    void link(LifeCycleId lc, SlotId slot, NodeId node, std::int64_t coverage);
    // The node names its page of the life cycle no longer; a cached one is gone and its slot free.  Nothing without a page.
    void unlink(NodeId node, LifeCycleId lc);
    // The node, which names no page there, names a page that another node has let go of; its place in the queue stays.
    void hand_over(NodeId node, LifeCycleId lc, SlotId slot, std::int64_t coverage);
    [[nodiscard]] bool is_owned(NodeId node, LifeCycleId lc) const noexcept {
        const SlotId slot = tree_->page(node, lc);
        return slot != kBadSlot && at(lc, slot).head.refs > 0;
    }

    // ---- queues

    // If the node's page waits, it waits as the newest of its class from now on.
    void requeue(NodeId node, LifeCycleId lc);
    // Marks have come or gone: a waiting page moves if it waits in the wrong class now.
    void tail_changed(NodeId node, LifeCycleId lc) override;

    // ---- planned drops

    // Counts n more plans on a page.
    void add_plan(LifeCycleId lc, SlotId slot, std::int32_t n) { journal_->add(edit(lc, slot).plans, n); }

    // CorruptedError unless records, queues, nodes and slots fit together; refs[pool group][slot]: owners.
    void audit(const std::vector<std::vector<std::int32_t>>& refs) const;

private:
    struct Group {
        Group(std::int64_t slots, Journal& journal)
            : pages(make_lazy_array<Page>(static_cast<std::size_t>(slots))), queue(pages, journal) {}
        LazyArray<Page> pages;  // by slot
        EvictionQueue queue;
    };
    // Where the pages of a life cycle are.
    struct Place {
        PoolGroupId group;
        Page* pages;
        EvictionQueue* queue;
    };

    [[nodiscard]] Page& edit(LifeCycleId lc, SlotId slot) noexcept { return places_[lc.index()].pages[slot.index()]; }
    [[nodiscard]] EvictionQueue& queue_of(LifeCycleId lc) noexcept { return *places_[lc.index()].queue; }
    [[nodiscard]] bool is_class_b(NodeId node, LifeCycleId lc) const noexcept;
    void free(LifeCycleId lc, SlotId slot);
    void audit_page(PoolGroupId group, SlotId slot, std::int32_t refs) const;

    RadixTree* tree_;
    Tier* tier_;
    Journal* journal_;
    std::deque<Group> groups_;   // by pool group; they do not move
    std::vector<Place> places_;  // by life cycle
    std::uint64_t last_serial_ = 0;
};

}  // namespace kvpool
