#include "kvpool/page/page_store.hpp"

#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool {
namespace {

[[noreturn]] void fail(LifeCycleId lc, SlotId slot, const std::string& what) {
    throw CorruptedError("layer group " + std::to_string(lc.value()) + ", slot " + std::to_string(slot.value()) + ": " +
                         what);
}

}  // namespace

PageStore::PageStore(const Layout& layout, RadixTree& tree, Tier& tier, Journal& journal)
    : tree_(&tree), tier_(&tier), journal_(&journal) {
    for (std::size_t g = 0; g < layout.pool_groups.size(); ++g) {
        groups_.emplace_back(tier.total(make_id<PoolGroupId>(g)), journal);
    }
    for (const LifeCycle& life_cycle : layout.life_cycles) {
        Group& group = groups_[life_cycle.pool_group.index()];
        places_.push_back({life_cycle.pool_group, group.pages.get(), &group.queue});
    }
}

// ---- owners

void PageStore::add(LifeCycleId lc, SlotId slot, std::int32_t priority) {
    Page& page = edit(lc, slot);
    if (page.exists()) {
        fail(lc, slot, "there is a page already");
    }
    journal_->save(page.head);
    journal_->set(page.serial, ++last_serial_);
    if (page.plans != 0) {
        journal_->set(page.plans, 0);
    }
    page.head = {.refs = 1,
                 .life_cycle = static_cast<std::uint16_t>(lc.value()),
                 .priority = static_cast<std::uint8_t>(priority),
                 .is_queued = false,
                 .is_class_b = false};
}

void PageStore::own(LifeCycleId lc, SlotId slot, std::int32_t priority) {
    Page& page = edit(lc, slot);
    if (page.node_plus_one == 0) {
        fail(lc, slot, "no node has the page");
    }
    if (page.head.is_queued) {
        queue_of(lc).erase(slot);
    }
    journal_->save(page.head);
    ++page.head.refs;
    if (priority > page.head.priority) {
        page.head.priority = static_cast<std::uint8_t>(priority);
    }
}

void PageStore::disown(LifeCycleId lc, SlotId slot) {
    Page& page = edit(lc, slot);
    if (page.head.refs <= 0) {
        fail(lc, slot, "nobody owns the page");
    }
    journal_->save(page.head);
    if (--page.head.refs > 0) {
        return;
    }
    if (page.node_plus_one != 0) {
        queue_of(lc).push(slot, is_class_b(page.node(), lc));
    } else {
        free(lc, slot);
    }
}

void PageStore::free(LifeCycleId lc, SlotId slot) {
    try {
        tier_->free_slot(group_of(lc), slot);
    } catch (const LogicError& error) {
        throw CorruptedError(error.what());  // a page in a slot that is not occupied
    }
}

// ---- links

void PageStore::link(LifeCycleId lc, SlotId slot, NodeId node, std::int64_t coverage) {
    Page& page = edit(lc, slot);
    if (page.head.refs <= 0 || page.node_plus_one != 0) {
        fail(lc, slot, "not a page that can be linked");
    }
    journal_->set(page.node_plus_one, node.value() + 1);
    tree_->set_page(node, lc, slot, coverage);
}

void PageStore::unlink(NodeId node, LifeCycleId lc) {
    const SlotId slot = tree_->page(node, lc);
    if (slot == kBadSlot) {
        return;
    }
    Page& page = edit(lc, slot);
    tree_->set_page(node, lc, kBadSlot, 0);
    if (page.head.is_queued) {
        queue_of(lc).erase(slot);
        journal_->set(page.node_plus_one, 0);
        free(lc, slot);
    } else {
        journal_->set(page.node_plus_one, 0);
    }
}

void PageStore::hand_over(NodeId node, LifeCycleId lc, SlotId slot, std::int64_t coverage) {
    journal_->set(edit(lc, slot).node_plus_one, node.value() + 1);
    tree_->set_page(node, lc, slot, coverage);
}

// ---- queues

void PageStore::requeue(NodeId node, LifeCycleId lc) {
    const SlotId slot = tree_->page(node, lc);
    if (slot == kBadSlot || !at(lc, slot).head.is_queued) {
        return;
    }
    queue_of(lc).erase(slot);
    journal_->save(edit(lc, slot).head);
    queue_of(lc).push(slot, is_class_b(node, lc));
}

void PageStore::tail_changed(NodeId node, LifeCycleId lc) {
    const SlotId slot = tree_->page(node, lc);
    if (slot != kBadSlot && at(lc, slot).head.is_queued && at(lc, slot).head.is_class_b != is_class_b(node, lc)) {
        requeue(node, lc);
    }
}

bool PageStore::is_class_b(NodeId node, LifeCycleId lc) const noexcept {
    const ReuseRules& rules = tree_->rules();
    const ReuseRules::LifeCycleRule& rule = rules.of(lc);
    if (!rule.key.is_windowed() || !rules.retain_window_tails) {
        return true;
    }
    const std::int64_t ordinal = tree_->at(node).ordinal;
    return rule.is_full_like(ordinal) || tree_->tails(node, lc) > 0 || rules.is_at_interval(rule, ordinal);
}

// ---- audit

void PageStore::audit(const std::vector<std::vector<std::int32_t>>& refs) const {
    std::int64_t linked = 0;
    for (std::size_t g = 0; g < groups_.size(); ++g) {
        const auto group = make_id<PoolGroupId>(g);
        groups_[g].queue.audit();
        for (std::int64_t i = 0; i < tier_->allocator(group).num_active(); ++i) {
            const SlotId slot(static_cast<std::int32_t>(i));
            audit_page(group, slot, refs[g][static_cast<std::size_t>(i)]);
            linked += at(group, slot).node_plus_one != 0 ? 1 : 0;
        }
    }
    for (const NodeId node : tree_->nodes_in_order()) {
        for (const ReuseRules::LifeCycleRule& rule : tree_->rules().life_cycles) {
            if (const SlotId slot = tree_->page(node, rule.id); slot != kBadSlot) {
                --linked;
                if (at(rule.id, slot).node() != node || at(rule.id, slot).life_cycle() != rule.id) {
                    fail(rule.id, slot, "node " + std::to_string(node.value()) + " names the page of another");
                }
            }
        }
    }
    if (linked != 0) {
        throw CorruptedError(std::to_string(linked) + " pages name a node that does not name them");
    }
}

void PageStore::audit_page(PoolGroupId group, SlotId slot, std::int32_t refs) const {
    const Page& page = at(group, slot);
    const LifeCycleId lc = page.life_cycle();
    if (page.exists() != tier_->allocator(group).is_occupied(slot)) {
        fail(lc, slot, page.exists() ? "a page in a free slot" : "an occupied slot without a page");
    }
    if (!page.exists()) {
        return;
    }
    if (group_of(lc) != group || page.head.refs != refs) {
        fail(lc, slot, std::to_string(page.head.refs) + " owners counted, " + std::to_string(refs) + " found");
    }
    if (page.head.is_queued != (page.head.refs == 0)) {
        fail(lc, slot, "wrongly in the eviction queue, or missing there");
    }
    if (page.head.is_queued && page.head.is_class_b != is_class_b(page.node(), lc)) {
        fail(lc, slot, "waits in the wrong class");
    }
    if (page.plans < 0) {
        fail(lc, slot, "planned drops are negative");
    }
}

}  // namespace kvpool
