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

// Pages of these blocks that nobody else owns.
std::int64_t count_owned_alone(const SequenceContext& context, const BlockTable& table, std::size_t life_cycle,
                               HalfOpenRange blocks) noexcept {
    const auto id = make_id<LifeCycleId>(life_cycle);
    std::int64_t count = 0;
    for (std::int64_t ordinal = blocks.beg; ordinal < blocks.end; ++ordinal) {
        if (table[ordinal] != kBadSlot && context.prefix->refs(id, table[ordinal]) == 1) {
            ++count;
        }
    }
    return count;
}

}  // namespace

void RequestPlan::reset(const SequenceContext& context, const KvCache& cache, Lengths after) {
    if (context_ != &context) {
        context_ = &context;
        parts_.resize(context.layout->life_cycles.size());
        changed_.resize(parts_.size());
        groups_.resize(context.layout->pool_groups.size());
    }
    std::fill(changed_.begin(), changed_.end(), HalfOpenRange{});
    std::fill(groups_.begin(), groups_.end(), GroupCount{});
    after_ = after;
    blocks_before_ = context.num_blocks(cache);
    blocks_after_ = div_up(after.capacity, context.tokens_per_block());
}

void RequestPlan::make(const SequenceContext& context, const KvCache& cache, Lengths after) {
    reset(context, cache, after);
    const LengthRules rules = context.rules(cache);
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        const LengthState before{cache.lengths(), cache.scratch_range(i), context.first_held(cache)};
        parts_[i] = plan_life_cycle(context.layout->life_cycles[i], rules, before, after);
        if (context.is_state(i)) {
            count_of(i).total += cache.beam_width;
        } else {
            count_life_cycle(cache, i);
            note_changes(cache, i);
        }
    }
}

bool RequestPlan::make_commit(const SequenceContext& context, const KvCache& cache, std::int64_t history) {
    reset(context, cache, {cache.capacity, history});
    if (history <= cache.box.history_limit) {
        return false;
    }
    const LengthRules rules = context.rules(cache);
    for (const std::size_t i : context.attention) {
        const LengthState before{cache.lengths(), cache.scratch_range(i), context.first_held(cache)};
        parts_[i] = plan_history(context.layout->life_cycles[i], rules, before, history);
        note_changes(cache, i);
    }
    if (context.state.has_value()) {
        parts_[*context.state] = {};
    }
    return true;
}

void RequestPlan::make_first_resume(const SequenceContext& context, const KvCache& cache) {
    reset(context, cache, cache.lengths());
    const std::int64_t tpb = context.tokens_per_block();
    auto optional = cache.optional.begin();
    for (std::size_t i = 0; i < parts_.size(); ++i) {
        GroupCount& count = count_of(i);
        parts_[i] = {};
        if (context.is_state(i)) {
            count.wanted += cache.beam_width;
            count.total += cache.beam_width;
            continue;
        }
        const LifeCycleKey& key = context.layout->life_cycles[i].key;
        const std::int64_t live = blocks_after_ - stale_range(key, tpb, after_.history).size();
        count.total += live;
        if (!key.optional || (optional++)->selected) {
            count.wanted += cache.committed % tpb != 0 ? 1 : 0;
            continue;
        }
        count.wanted += live;
        const BlockTable& table = cache.table(i, 0);
        count.leaving += count_owned_alone(context, table, i, {0, table.size()});
    }
}

void RequestPlan::count_life_cycle(const KvCache& cache, std::size_t i) {
    const LifeCyclePlan& plan = parts_[i];
    GroupCount& count = count_of(i);
    const std::int64_t added = plan.allocate.total();
    for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
        const BlockTable& table = cache.table(i, beam);
        const std::int64_t stale =
            table.count_in(plan.retired.beg, plan.retired.end) + table.count_in(plan.held.beg, plan.held.end);
        const std::int64_t gone =
            table.count_in(plan.into_scratch.beg, plan.into_scratch.end) + table.count_in(plan.cut.beg, plan.cut.end);
        count.leaving += gone + count_owned_alone(*context_, table, i, plan.retired);
        count.wanted += added;
        count.total += table.count() - table.held() - stale - gone + added;
    }
    const std::int64_t scratch = cache.scratch_count(i);
    count.leaving += std::max(std::int64_t{0}, scratch - plan.scratch_slots);
    count.wanted += std::max(std::int64_t{0}, plan.scratch_slots - scratch);
    count.total += plan.scratch_slots;
}

void RequestPlan::note_changes(const KvCache& cache, std::size_t i) {
    const LifeCyclePlan& plan = parts_[i];
    const std::int64_t common = std::min(blocks_before_, blocks_after_);
    const BlockTable& first = cache.table(i, 0);  // beam 0 has every page that a beam has
    extend(changed_[i], with_pages(first, plan.retired));
    extend(changed_[i], plan.held);
    extend(changed_[i], with_pages(first, intersect(plan.into_scratch, {0, common})));
    for (const HalfOpenRange& range : plan.allocate) {
        extend(changed_[i], intersect(range, {0, common}));
    }
}

void RequestPlan::add_change(std::size_t life_cycle, std::int64_t ordinal) noexcept {
    extend(changed_[life_cycle], {ordinal, ordinal + 1});
}

void RequestPlan::add_changes_of(const RequestPlan& earlier) noexcept {
    for (std::size_t i = 0; i < changed_.size(); ++i) {
        extend(changed_[i], earlier.changed_[i]);
    }
}

bool RequestPlan::changes_nothing() const noexcept {
    return blocks_before_ == blocks_after_ &&
           std::all_of(changed_.begin(), changed_.end(), [](const HalfOpenRange& range) { return range.empty(); });
}

ChangedBlocks RequestPlan::changed(std::size_t life_cycle) const noexcept {
    if (context_->is_state(life_cycle)) {
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
