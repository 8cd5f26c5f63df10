#include "kvpool/sequence/request_plan.hpp"

#include <algorithm>

#include "kvpool/core/math.hpp"

namespace kvpool {
namespace {

void extend(HalfOpenRange& hull, HalfOpenRange range) noexcept {
    if (range.empty()) {
        return;
    }
    hull = hull.empty() ? range : HalfOpenRange{std::min(hull.beg, range.beg), std::max(hull.end, range.end)};
}

// The part of `range` from its first to its last block that has a page.
HalfOpenRange with_pages(const BlockTable& table, HalfOpenRange range) noexcept {
    while (!range.empty() && table[range.beg] == kBadSlot) {
        ++range.beg;
    }
    while (!range.empty() && table[range.end - 1] == kBadSlot) {
        --range.end;
    }
    return range;
}

}  // namespace

void RequestPlan::make(const SequenceContext& context, const KvCache& cache, Lengths after, bool resuming) {
    const std::vector<LifeCycle>& life_cycles = context.layout->life_cycles;
    const LengthRules rules = context.rules(cache);
    parts_.resize(life_cycles.size());
    is_ssm_.resize(life_cycles.size());
    changed_.assign(life_cycles.size(), {});
    groups_.assign(context.layout->pool_groups.size(), {});
    after_ = after;
    blocks_before_ = context.num_blocks(cache);
    blocks_after_ = div_up(after.capacity, rules.tokens_per_block);
    keeps_stale_ = context.keeps_stale(cache);
    for (std::size_t i = 0; i < life_cycles.size(); ++i) {
        GroupCount& count = groups_[life_cycles[i].pool_group.index()];
        is_ssm_[i] = life_cycles[i].key.is_ssm;
        parts_[i] = plan_life_cycle(life_cycles[i], rules, cache.lengths(), cache.scratch_range(i), after);
        if (life_cycles[i].key.is_ssm) {
            count.total += cache.beam_width;
            count.wanted += resuming && !cache.has_state ? cache.beam_width : 0;
        } else {
            count_life_cycle(cache, i, count);
        }
    }
}

void RequestPlan::count_life_cycle(const KvCache& cache, std::size_t i, GroupCount& count) {
    const LifeCyclePlan& plan = parts_[i];
    const std::int64_t common = std::min(blocks_before_, blocks_after_);
    for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
        const BlockTable& table = cache.table(i, beam);
        const std::int64_t stale = table.count_in(plan.newly_stale.beg, plan.newly_stale.end);
        const std::int64_t gone =
            table.count_in(plan.into_scratch.beg, plan.into_scratch.end) + table.count_in(plan.cut.beg, plan.cut.end);
        const std::int64_t added = plan.allocate.total();
        count.leaving += gone + (keeps_stale_ ? 0 : stale);
        count.wanted += added;
        count.total += table.count() - table.held() - stale - gone + added;
    }
    const std::int64_t scratch = cache.scratch_count(i);
    count.leaving += std::max(std::int64_t{0}, scratch - plan.scratch_slots);
    count.wanted += std::max(std::int64_t{0}, plan.scratch_slots - scratch);
    count.total += plan.scratch_slots;

    const BlockTable& first = cache.table(i, 0);  // beam 0 has every page that a beam has
    extend(changed_[i], keeps_stale_ ? plan.newly_stale : with_pages(first, plan.newly_stale));
    extend(changed_[i], with_pages(first, intersect(plan.into_scratch, {0, common})));
    for (const HalfOpenRange& range : plan.allocate) {
        extend(changed_[i], intersect(range, {0, common}));
    }
}

ChangedBlocks RequestPlan::changed(std::size_t life_cycle) const noexcept {
    if (is_ssm_[life_cycle]) {
        return {};  // no exposed ids at all
    }
    const HalfOpenRange inner = changed_[life_cycle];
    const HalfOpenRange tail{std::min(blocks_before_, blocks_after_), std::max(blocks_before_, blocks_after_)};
    if (inner.empty()) {
        return {tail, {}};
    }
    if (!tail.empty() && inner.end >= tail.beg) {
        return {{inner.beg, tail.end}, {}};
    }
    return {inner, tail};
}

}  // namespace kvpool
