#include "kvpool/sequence/resize_plan.hpp"

#include <algorithm>
#include <limits>

#include "kvpool/core/math.hpp"

namespace kvpool {
namespace {

constexpr std::int64_t kMaxLength = std::numeric_limits<std::int32_t>::max();

// First length x at which the window has left one more block than at `length`, minus 1: stale(x).end is constant up to it.
std::int64_t last_with_same_stale_end(const LifeCycleKey& key, std::int64_t tpb, std::int64_t stale_end) noexcept {
    return (std::max(key.sink_blocks, stale_end) + 1) * tpb + key.window - 2;
}

// Narrows the capacities to those whose scratch blocks end where they end now.
void narrow_to_scratch(const LifeCycleKey& key, std::int64_t tpb, std::int64_t rewind, Lengths lengths,
                       std::int64_t& floor, std::int64_t& limit) noexcept {
    const std::int64_t done = std::max(std::int64_t{0}, lengths.capacity - rewind);
    const std::int64_t end = std::max(key.sink_blocks, stale_range(key, tpb, done).end);
    limit = std::min(limit, last_with_same_stale_end(key, tpb, end) + rewind);
    if (end > key.sink_blocks) {
        floor = std::max(floor, end * tpb + key.window - 2 + rewind);
    }
}

void set_newly_stale(const LifeCycle& life_cycle, const LengthRules& rules, const LengthState& before,
                     HalfOpenRange stale, LifeCyclePlan& plan) noexcept {
    const std::int64_t tpb = rules.tokens_per_block;
    const HalfOpenRange stale_before = stale_range(life_cycle.key, tpb, before.lengths.history);
    const HalfOpenRange newly{std::max(stale_before.end, stale.beg),
                              std::min(div_up(before.lengths.capacity, tpb), stale.end)};
    plan.retired = {newly.beg, std::min(newly.end, before.first_held)};
    plan.held = {std::max(newly.beg, before.first_held), newly.end};
}

}  // namespace

void RangeList::append_without(HalfOpenRange range, HalfOpenRange first, HalfOpenRange second) noexcept {
    if (!first.empty()) {
        append({range.beg, std::min(range.end, first.beg)});
        range.beg = std::max(range.beg, first.end);
    }
    if (!second.empty()) {
        append({range.beg, std::min(range.end, second.beg)});
        range.beg = std::max(range.beg, second.end);
    }
    append(range);
}

std::int64_t RangeList::total() const noexcept {
    std::int64_t sum = 0;
    for (const HalfOpenRange& range : *this) {
        sum += range.size();
    }
    return sum;
}

HalfOpenRange scratch_blocks(const LifeCycle& life_cycle, const LengthRules& rules, Lengths lengths) noexcept {
    if (!rules.scratch_rewind.has_value()) {
        return {};
    }
    return scratch_range(life_cycle.key, rules.tokens_per_block, lengths.history, lengths.capacity,
                         *rules.scratch_rewind);
}

LifeCyclePlan plan_life_cycle(const LifeCycle& life_cycle, const LengthRules& rules, const LengthState& before,
                              Lengths after) noexcept {
    const std::int64_t tpb = rules.tokens_per_block;
    const std::int64_t old_blocks = div_up(before.lengths.capacity, tpb);
    const std::int64_t new_blocks = div_up(after.capacity, tpb);
    LifeCyclePlan plan;
    if (life_cycle.key.is_ssm) {
        return plan;
    }
    plan.cut = {new_blocks, old_blocks};
    const HalfOpenRange added{old_blocks, new_blocks};
    if (!life_cycle.key.is_windowed()) {
        plan.allocate.append(added);
        return plan;
    }
    const HalfOpenRange stale = stale_range(life_cycle.key, tpb, after.history);
    set_newly_stale(life_cycle, rules, before, stale, plan);
    const HalfOpenRange scratch = scratch_blocks(life_cycle, rules, after);
    plan.scratch = scratch;
    plan.scratch_slots = scratch.empty() ? 0 : ceil_times(scratch.size(), life_cycle.scratch_fraction);
    if (scratch != before.scratch) {
        plan.into_scratch = intersect(scratch, {0, old_blocks});
        plan.allocate.append_without(intersect(before.scratch, {0, new_blocks}), stale, scratch);
    }
    plan.allocate.append_without(added, stale, scratch);
    return plan;
}

LifeCyclePlan plan_history(const LifeCycle& life_cycle, const LengthRules& rules, const LengthState& before,
                           std::int64_t history) noexcept {
    LifeCyclePlan plan;
    if (!life_cycle.key.is_windowed()) {
        return plan;
    }
    const HalfOpenRange stale = stale_range(life_cycle.key, rules.tokens_per_block, history);
    set_newly_stale(life_cycle, rules, before, stale, plan);
    plan.scratch = {std::max(before.scratch.beg, stale.end), before.scratch.end};
    if (plan.scratch.empty()) {
        plan.scratch = {};
    } else {
        plan.scratch_slots = ceil_times(plan.scratch.size(), life_cycle.scratch_fraction);
    }
    return plan;
}

LengthBox length_box(const Layout& layout, const LengthRules& rules, Lengths lengths) noexcept {
    const std::int64_t tpb = rules.tokens_per_block;
    const std::int64_t blocks = div_up(lengths.capacity, tpb);
    std::int64_t floor = blocks == 0 ? -1 : (blocks - 1) * tpb;
    std::int64_t limit = blocks * tpb;
    std::int64_t history = kMaxLength;
    for (const LifeCycle& life_cycle : layout.life_cycles) {
        const LifeCycleKey& key = life_cycle.key;
        if (!key.is_windowed()) {
            continue;
        }
        history = std::min(history, last_with_same_stale_end(key, tpb, stale_range(key, tpb, lengths.history).end));
        if (rules.scratch_rewind.has_value()) {
            history = std::min(history, div_up(lengths.history, tpb) * tpb);  // where scratch may begin
            narrow_to_scratch(key, tpb, *rules.scratch_rewind, lengths, floor, limit);
        }
    }
    return {static_cast<std::int32_t>(floor), static_cast<std::int32_t>(std::min(limit, kMaxLength)),
            static_cast<std::int32_t>(std::min(history, kMaxLength))};
}

}  // namespace kvpool
