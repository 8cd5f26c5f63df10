#include "kvpool/manager/snapshot.hpp"

namespace kvpool {
namespace {

std::vector<std::int32_t> entries(const BlockTable& table) { return {table.data(), table.data() + table.size()}; }

std::vector<TokenValue> values_of(const PrefixCache& prefix, TokenSpan tokens) {
    std::vector<TokenValue> values;
    values.reserve(tokens.size());
    for (const Token token : tokens) {
        values.push_back(is_digest(token) ? TokenValue(prefix.digests().bytes(token)) : TokenValue(token));
    }
    return values;
}

NodeSnapshot snapshot_of(const ManagerState& state, NodeId node) {
    const PrefixCache& prefix = state.prefix;
    NodeSnapshot out;
    out.scope = prefix.scope_of(node);
    out.ordinal = prefix.ordinal(node);
    out.tokens = values_of(prefix, prefix.tokens(node));
    out.marks = prefix.marks(node);
    for (std::size_t i = 0; i < state.context.num_life_cycles(); ++i) {
        const auto id = make_id<LifeCycleId>(i);
        const SlotId slot = prefix.page(node, id);
        std::optional<NodeSnapshot::Page>& page = out.pages.emplace_back();
        if (slot != kBadSlot) {
            page = {slot.value(), prefix.coverage(node, id), prefix.refs(id, slot), prefix.priority(id, slot),
                    prefix.plans(id, slot)};
        }
        out.tails.push_back(prefix.tails(node, id));
    }
    return out;
}

CacheSnapshot snapshot_of(const ManagerState& state, CacheHandle handle, const KvCache& cache) {
    CacheSnapshot out;
    out.handle = handle;
    out.status = cache.status;
    out.committed = cache.committed;
    out.history = cache.history;
    out.capacity = cache.capacity;
    out.beam_width = cache.beam_width;
    out.commit_allowed = cache.commit_allowed;
    out.scope = cache.scope;
    out.tail = values_of(state.prefix, cache.tail.tokens());
    out.divergence = cache.divergence;
    out.hybrid = cache.hybrid;
    for (std::size_t i = 0; i < state.context.num_life_cycles(); ++i) {
        out.slots.emplace_back();
        out.scratch.push_back(cache.scratch.empty() ? std::vector<std::int32_t>{} : entries(cache.scratch[i].slots));
        if (!state.layout.life_cycles[i].key.is_ssm) {
            for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
                out.slots.back().push_back(entries(cache.table(i, beam)));
            }
            continue;
        }
        out.ssm.emplace_back();
        out.ssm_source.push_back(cache.state_source.value());
        for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
            const BlockTable& state_slot = cache.table(i, beam);
            out.ssm.back().push_back((state_slot.size() > 0 ? state_slot[0] : kBadSlot).value());
        }
    }
    return out;
}

}  // namespace

ManagerSnapshot take_snapshot(const ManagerState& state) {
    ManagerSnapshot out;
    for (std::size_t group = 0; group < state.layout.pool_groups.size(); ++group) {
        const auto id = make_id<PoolGroupId>(group);
        PoolGroupSnapshot& pool_group = out.pool_groups.emplace_back();
        pool_group.total = state.tier.total(id);
        pool_group.free = state.tier.free(id);
        for (const SlotId slot : state.tier.allocator(id).occupied_ids()) {
            pool_group.used.push_back(slot.value());
        }
    }
    state.slab.for_each(
        [&](CacheHandle handle, const KvCache& cache) { out.caches.push_back(snapshot_of(state, handle, cache)); });
    for (const NodeId node : state.prefix.nodes_in_order()) {
        out.tree.push_back(snapshot_of(state, node));
    }
    for (std::size_t group = 0; group < state.layout.pool_groups.size(); ++group) {
        std::vector<QueuedSnapshot>& queue = out.queues.emplace_back();
        for (const PrefixCache::Queued& page : state.prefix.queue_in_order(make_id<PoolGroupId>(group))) {
            queue.push_back({page.priority, page.victim_class, page.slot.value()});
        }
    }
    return out;
}

}  // namespace kvpool
