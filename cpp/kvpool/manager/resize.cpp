// resize(): one change of lengths, all or nothing.
#include <limits>

#include "kvpool/core/errors.hpp"
#include "kvpool/manager/state.hpp"

namespace kvpool {

void ManagerState::check_lengths(const KvCache& cache, Lengths lengths, Where where) const {
    if (lengths.history < cache.history) {
        throw ArgumentError(where.text() + ": History length cannot be decreased: " + std::to_string(lengths.history) +
                            " is below " + std::to_string(cache.history));
    }
    if (lengths.capacity < lengths.history) {
        throw ArgumentError(where.text() + ": capacity " + std::to_string(lengths.capacity) +
                            ": must be at least the history length " + std::to_string(lengths.history));
    }
    if (lengths.capacity > std::numeric_limits<std::int32_t>::max()) {
        throw ArgumentError(where.text() + ": capacity " + std::to_string(lengths.capacity) +
                            ": must be at most 2147483647");
    }
    const std::int64_t blocks = div_up(lengths.capacity, layout.tokens_per_block);
    for (const AttachedBuffer& buffer : cache.attached) {
        if (static_cast<std::int64_t>(buffer.entries.size()) < blocks) {
            throw ArgumentError(where.text() + ": capacity " + std::to_string(lengths.capacity) + " needs " +
                                std::to_string(blocks) + " blocks; the buffer attached for layer group " +
                                std::to_string(buffer.life_cycle.value()) + ", beam " +
                                std::to_string(buffer.beam.value()) + " has only " +
                                std::to_string(buffer.entries.size()) + " entries");
        }
    }
}

void ManagerState::check_ever_fits(Where where) const {
    for (std::size_t group = 0; group < plan.groups().size(); ++group) {
        const std::int64_t total = tier.total(make_id<PoolGroupId>(group));
        if (plan.groups()[group].total > total) {
            throw NeverFitsError(where.text() + ": capacity " + std::to_string(plan.after().capacity) + " needs " +
                                 std::to_string(plan.groups()[group].total) + " slots of pool group " +
                                 std::to_string(group) + ", which has " + std::to_string(total) + " in all");
        }
    }
}

bool ManagerState::fits_now() const noexcept {
    for (std::size_t group = 0; group < plan.groups().size(); ++group) {
        const RequestPlan::GroupCount& count = plan.groups()[group];
        if (count.wanted > tier.free(make_id<PoolGroupId>(group)) + count.leaving) {
            return false;
        }
    }
    return true;
}

void ManagerState::apply_plan(KvCache& cache) {
    for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
        const LifeCyclePlan& part = plan.life_cycle(i);
        for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
            BlockTable& pages = cache.table(i, beam);
            if (plan.keeps_stale()) {
                transaction.add_held(pages, pages.count_in(part.newly_stale.beg, part.newly_stale.end));
            } else {
                release_pages(group_of(i), pages, part.newly_stale);
            }
            release_pages(group_of(i), pages, part.into_scratch);
            release_pages(group_of(i), pages, part.cut);
        }
        if (!cache.scratch.empty()) {
            release_scratch(cache, i, part.scratch_slots);
            transaction.set_scratch(cache.scratch[i], part.scratch);
        }
    }
    for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
        const LifeCyclePlan& part = plan.life_cycle(i);
        if (layout.life_cycles[i].key.is_ssm) {
            continue;
        }
        if (part.scratch_slots > cache.scratch_count(i)) {
            std::int64_t next = cache.scratch_count(i);
            transaction.resize(cache.scratch[i].slots, part.scratch_slots);
            for (; next < part.scratch_slots; ++next) {
                transaction.allocate(group_of(i), cache.scratch[i].slots, next);
            }
        }
        for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
            transaction.resize(cache.table(i, beam), plan.blocks_after());
        }
        for (const HalfOpenRange& range : part.allocate) {
            for (std::int64_t ordinal = range.beg; ordinal < range.end; ++ordinal) {
                for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
                    transaction.allocate(group_of(i), cache.table(i, beam), ordinal);
                }
            }
        }
    }
    transaction.set_lengths(cache, plan.after(), length_box(layout, context.rules(cache), plan.after()));
}

void ManagerState::publish(KvCache& cache, std::span<const ChangedBlocks> changed_blocks) const noexcept {
    for (const AttachedBuffer& buffer : cache.attached) {
        const std::size_t life_cycle = buffer.life_cycle.index();
        for (const HalfOpenRange& range : {changed_blocks[life_cycle].first, changed_blocks[life_cycle].second}) {
            if (!range.empty()) {
                context.expose(cache, life_cycle, buffer.beam.value(), range.beg, range.end, buffer.entries.data());
            }
        }
    }
    for (BlockTable& pages : cache.tables) {
        pages.trim();
    }
}

bool ManagerState::resize(KvCache& cache, std::optional<std::int64_t> capacity, std::optional<std::int64_t> history) {
    if (!capacity.has_value() && !history.has_value()) {
        return true;
    }
    require(cache, CacheStatus::active, "resize");
    const Lengths after{capacity.value_or(cache.capacity), history.value_or(cache.history)};
    check_lengths(cache, after, {"resize"});
    plan.make(context, cache, after, false);
    check_ever_fits({"resize"});
    if (!fits_now()) {
        return false;
    }
    changed.reserve(context.num_life_cycles());
    transact([&] {
        apply_plan(cache);
        transaction.settle(cache.stream);
    });
    changed.clear();
    for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
        changed.push_back(plan.changed(i));
    }
    publish(cache, changed);
    cache.unbind();
    return true;
}

}  // namespace kvpool
