#include "kvpool/manager/first_resume.hpp"

#include <algorithm>

#include "kvpool/core/errors.hpp"
#include "kvpool/manager/state.hpp"

namespace kvpool {
namespace {

bool names(const std::vector<std::int64_t>& groups, LifeCycleId life_cycle) {
    return std::find(groups.begin(), groups.end(), life_cycle.value()) != groups.end();
}

OptionalReuse* find_group(KvCache& cache, std::int64_t group) {
    const auto found = std::find_if(cache.optional.begin(), cache.optional.end(),
                                    [&](const OptionalReuse& reuse) { return reuse.life_cycle.value() == group; });
    return found == cache.optional.end() ? nullptr : &*found;
}

// Whether these are the groups chosen before.
bool are_chosen(KvCache& cache, const std::vector<std::int64_t>& groups) {
    return std::all_of(cache.optional.begin(), cache.optional.end(),
                       [&](const OptionalReuse& reuse) { return reuse.selected == names(groups, reuse.life_cycle); }) &&
           std::all_of(groups.begin(), groups.end(),
                       [&](std::int64_t group) { return find_group(cache, group) != nullptr; });
}

}  // namespace

void FirstResume::choose_groups(KvCache& cache, const std::optional<std::vector<std::int64_t>>& groups) {
    if (cache.was_resumed) {
        if (groups.has_value() && !are_chosen(cache, *groups)) {
            throw ArgumentError("optional_reuse_groups: chosen at the first resume already");
        }
        return;
    }
    if (!groups.has_value()) {
        for (OptionalReuse& reuse : cache.optional) {
            reuse.selected = reuse.complete;
        }
        return;
    }
    for (const std::int64_t group : *groups) {
        const OptionalReuse* const found = find_group(cache, group);
        if (found == nullptr) {
            throw ArgumentError("optional_reuse_groups: " + std::to_string(group) + " is not an optional layer group");
        }
        if (!found->complete) {
            throw ArgumentError("optional_reuse_groups: layer group " + std::to_string(group) + " is not complete");
        }
    }
    for (OptionalReuse& reuse : cache.optional) {
        reuse.selected = names(*groups, reuse.life_cycle);
    }
}

SlotId FirstResume::source_of(const KvCache& cache, std::size_t life_cycle) const noexcept {
    if (state_.layout.life_cycles[life_cycle].key.is_ssm) {
        return cache.state_source;
    }
    return cache.tail.empty() ? kBadSlot : cache.table(life_cycle, 0)[cache.committed_blocks];
}

bool FirstResume::take_sources_over(KvCache& cache, RequestPlan& plan) {
    for (std::size_t group = 0; group < state_.layout.pool_groups.size(); ++group) {
        const auto id = make_id<PoolGroupId>(group);
        std::int64_t lacking = plan.groups()[group].wanted - state_.tier.free(id) - state_.prefix.evictable(id);
        for (const LifeCycleId life_cycle : state_.layout.pool_groups[group].life_cycles) {
            const std::size_t i = life_cycle.index();
            const SlotId source = source_of(cache, i);
            if (lacking <= 0 || source == kBadSlot || state_.prefix.refs(life_cycle, source) != 1) {
                continue;
            }
            state_.prefix.take_over(life_cycle, source);
            is_taken_over_[i] = true;
            plan.forgo_slot(id);
            --lacking;
        }
        if (lacking > 0) {
            return false;
        }
    }
    return true;
}

void FirstResume::allocate(KvCache& cache, std::size_t life_cycle) {
    const auto id = make_id<LifeCycleId>(life_cycle);
    BlockTable& table = cache.table(life_cycle, 0);
    if (table.count() == 0) {  // an OPTIONAL group that shares nothing; or nothing is live
        const HalfOpenRange stale = state_.stale_blocks(cache, life_cycle);
        for (std::int64_t ordinal = 0; ordinal < table.size(); ++ordinal) {
            if (!stale.contains(ordinal)) {
                state_.transaction.allocate(id, table, ordinal, cache.priority(life_cycle, ordinal));
            }
        }
        return;
    }
    const SlotId source = source_of(cache, life_cycle);
    if (source != kBadSlot && !is_taken_over_[life_cycle]) {
        copies_[life_cycle] = state_.transaction.allocate(id, cache.priority(life_cycle, cache.committed_blocks));
        state_.transaction.copy(id, copies_[life_cycle], source);
    }
}

void FirstResume::allocate_state(KvCache& cache, std::size_t life_cycle) {
    const auto id = make_id<LifeCycleId>(life_cycle);
    BlockTable& table = cache.table(life_cycle, 0);
    state_.transaction.resize(table, 1);
    if (is_taken_over_[life_cycle]) {
        state_.transaction.put(table, 0, cache.state_source);
        return;
    }
    const std::int32_t priority = cache.priority(life_cycle, cache.committed_blocks);
    const SlotId slot = state_.transaction.allocate(id, table, 0, priority);
    if (cache.state_source != kBadSlot) {
        state_.transaction.copy(id, slot, cache.state_source);
    }
}

void FirstResume::release_sources(KvCache& cache) {
    for (std::size_t i = 0; i < state_.context.num_life_cycles(); ++i) {
        const auto id = make_id<LifeCycleId>(i);
        if (copies_[i] != kBadSlot) {
            state_.transaction.release(id, cache.table(i, 0), cache.committed_blocks);
            state_.transaction.put(cache.table(i, 0), cache.committed_blocks, copies_[i]);
        } else if (state_.context.state == i && cache.state_source != kBadSlot) {
            if (!is_taken_over_[i]) {
                state_.prefix.release(id, cache.state_source);
            }
            state_.journal.set(cache.state_source, kBadSlot);
        }
    }
}

bool FirstResume::run(KvCache& cache, StreamId stream, RequestPlan& plan) {
    const SequenceContext& context = state_.context;
    copies_.assign(context.num_life_cycles(), kBadSlot);
    is_taken_over_.assign(context.num_life_cycles(), false);
    return state_.transact([&] {
        for (const OptionalReuse& reuse : cache.optional) {
            if (!reuse.selected) {
                const std::size_t i = reuse.life_cycle.index();
                state_.release_pages(i, cache.table(i, 0), {0, cache.table(i, 0).size()});
            }
        }
        if (!take_sources_over(cache, plan)) {
            return false;
        }
        context.for_each_slot(cache,
                              [&](LifeCycleId life_cycle, SlotId slot) { state_.transaction.use(life_cycle, slot); });
        for (std::size_t group = 0; group < plan.groups().size(); ++group) {
            state_.transaction.make_room(make_id<PoolGroupId>(group), plan.groups()[group].wanted);
        }
        for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
            if (context.state == i) {
                allocate_state(cache, i);
            } else {
                allocate(cache, i);
            }
        }
        release_sources(cache);
        state_.transaction.set_lengths(cache, cache.lengths(), context.box_around(cache, cache.lengths()));
        state_.transaction.rebind(cache, stream);
        state_.journal.set(cache.was_resumed, true);
        state_.settle(cache);
        return true;
    });
}

}  // namespace kvpool
