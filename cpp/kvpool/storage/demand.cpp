#include "kvpool/storage/demand.hpp"

#include <algorithm>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"

namespace kvpool {

namespace {

void check_batch(const Batch& batch) {
    bool legal = batch.system_prompt_length >= 0 && batch.system_prompt_length <= kHuge;
    for (const Request& r : batch.requests) {
        legal = legal && 0 <= r.history && r.history <= r.capacity && r.capacity <= kHuge;
    }
    if (!legal) {
        throw ConfigError(
            "batch: 0 <= history_length <= capacity <= 2^62 and 0 <= system_prompt_length <= 2^62 are required");
    }
}

// Blocks of the system prompt that are live for any request.
std::int64_t shared_blocks(const LifeCycleKey& key, std::int64_t tpb, const Batch& batch) {
    const HalfOpenRange system{0, batch.system_prompt_length / tpb};
    HalfOpenRange stale_for_all = system;
    for (const Request& r : batch.requests) {
        stale_for_all = intersect(stale_for_all, stale_range(key, tpb, r.history));
    }
    return system.size() - stale_for_all.size();
}

std::int64_t attention_demand(const Layout& layout, const LifeCycle& life_cycle, const Batch& batch,
                              std::optional<std::int64_t> rewind) {
    const LifeCycleKey& key = life_cycle.key;
    const std::int64_t tpb = layout.tokens_per_block;
    const HalfOpenRange system{0, batch.system_prompt_length / tpb};
    Int128 demand = shared_blocks(key, tpb, batch);
    for (const Request& r : batch.requests) {
        const HalfOpenRange stale = stale_range(key, tpb, r.history);
        const std::int64_t live = div_up(r.capacity, tpb) - stale.size();
        const std::int64_t live_system = system.size() - intersect(stale, system).size();
        const std::int64_t unique = std::max<std::int64_t>(0, live - live_system);
        const std::int64_t in_range = rewind ? scratch_range(key, tpb, r.history, r.capacity, *rewind).size() : 0;
        const std::int64_t scratch = std::min(in_range, unique);  // shared blocks of the range are counted once, above
        demand += Int128{unique} - scratch + ceil_times(scratch, life_cycle.scratch_fraction);
    }
    return saturate(demand);
}

std::int64_t window_floor(const LifeCycleKey& key, std::int64_t tpb) {
    return saturate(Int128{key.sink_blocks} + (Int128{key.window} + tpb - 2) / tpb + 1);
}

}  // namespace

std::vector<std::int64_t> batch_demand(const Layout& layout, const Batch& batch,
                                       std::optional<std::int64_t> scratch_max_rewind_len) {
    check_batch(batch);
    std::vector<std::int64_t> demand;
    demand.reserve(layout.life_cycles.size());
    for (const LifeCycle& life_cycle : layout.life_cycles) {
        demand.push_back(life_cycle.key.is_ssm ? static_cast<std::int64_t>(batch.requests.size())
                                               : attention_demand(layout, life_cycle, batch, scratch_max_rewind_len));
    }
    return demand;
}

std::vector<std::int64_t> structural_floors(const Layout& layout) {
    std::int64_t largest_window = 1;
    for (const LifeCycle& life_cycle : layout.life_cycles) {
        if (life_cycle.key.is_windowed()) {
            largest_window = std::max(largest_window, window_floor(life_cycle.key, layout.tokens_per_block));
        }
    }
    std::vector<std::int64_t> floors;
    floors.reserve(layout.life_cycles.size());
    for (const LifeCycle& life_cycle : layout.life_cycles) {
        const LifeCycleKey& key = life_cycle.key;
        floors.push_back(key.is_ssm          ? 1
                         : key.is_windowed() ? window_floor(key, layout.tokens_per_block)
                                             : largest_window);
    }
    return floors;
}

std::vector<std::int64_t> sum_by_pool_group(const Layout& layout, const std::vector<std::int64_t>& per_life_cycle) {
    std::vector<std::int64_t> sums(layout.pool_groups.size(), 0);
    for (std::size_t i = 0; i < layout.life_cycles.size(); ++i) {
        std::int64_t& sum = sums[layout.life_cycles[i].pool_group.index()];
        sum = add_saturated(sum, per_life_cycle[i]);
    }
    return sums;
}

std::vector<std::int64_t> pool_group_floors(const Layout& layout, const ManagerConfig& config) {
    if (!(config.max_util_for_resume > 0.0 && config.max_util_for_resume <= 1.0)) {
        throw ConfigError("max_util_for_resume must be in (0, 1], got " + std::to_string(config.max_util_for_resume));
    }
    const Decimal limit = Decimal::from_double(config.max_util_for_resume);
    std::vector<std::int64_t> floors = sum_by_pool_group(layout, structural_floors(layout));
    for (const Batch& batch : config.constraints) {
        const std::vector<std::int64_t> demand =
            sum_by_pool_group(layout, batch_demand(layout, batch, config.scratch_max_rewind_len));
        for (std::size_t g = 0; g < floors.size(); ++g) {
            const Decimal& share = layout.pool_groups[g].ssm_only ? Decimal{1, 1} : limit;
            floors[g] = std::max(floors[g], ceil_div_by_limit(demand[g], share));
        }
    }
    return floors;
}

}  // namespace kvpool
