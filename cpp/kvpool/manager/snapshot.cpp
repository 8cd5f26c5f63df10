#include "kvpool/manager/snapshot.hpp"

namespace kvpool {
namespace {

std::vector<std::int32_t> entries(const BlockTable& table) { return {table.data(), table.data() + table.size()}; }

CacheSnapshot snapshot_of(const ManagerState& state, CacheHandle handle, const KvCache& cache) {
    CacheSnapshot out;
    out.handle = handle;
    out.status = cache.status;
    out.history = cache.history;
    out.capacity = cache.capacity;
    out.beam_width = cache.beam_width;
    out.commit_allowed = cache.commit_allowed;
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
    return out;
}

}  // namespace kvpool
