// resize(): one change of lengths, all or nothing.
#include <limits>

#include "kvpool/core/errors.hpp"
#include "kvpool/manager/state.hpp"

namespace kvpool {

void ManagerState::check_lengths(const KvCache& cache, Lengths lengths, Where where, std::int64_t committed) const {
    if (lengths.history < cache.history) {
        throw ArgumentError(where.text() + ": History length cannot be decreased: " + std::to_string(lengths.history) +
                            " is below " + std::to_string(cache.history));
    }
    if (lengths.history < committed) {
        throw ArgumentError(where.text() + ": history " + std::to_string(lengths.history) + ": must be at least the " +
                            std::to_string(committed) + " committed tokens");
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
        const auto id = make_id<PoolGroupId>(group);
        const std::int64_t lacking = count.wanted - tier.free(id) - count.leaving;
        if (lacking > 0 && lacking > prefix.evictable(id)) {
            return false;
        }
    }
    return true;
}

void ManagerState::apply_plan(KvCache& cache, const RequestPlan& to) {
    for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
        const LifeCyclePlan& part = to.life_cycle(i);
        for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
            BlockTable& pages = cache.table(i, beam);
            release_pages(i, pages, part.retired);
            transaction.add_held(pages, pages.count_in(part.held.beg, part.held.end));
            release_pages(i, pages, part.into_scratch);
            release_pages(i, pages, part.cut);
        }
        if (!cache.scratch.empty()) {
            release_scratch(cache, i, part.scratch_slots);
            transaction.set_scratch(cache.scratch[i], part.scratch);
        }
    }
    for (std::size_t group = 0; group < to.groups().size(); ++group) {
        transaction.make_room(make_id<PoolGroupId>(group), to.groups()[group].wanted);
    }
    for (const std::size_t i : context.attention) {
        const auto id = make_id<LifeCycleId>(i);
        const LifeCyclePlan& part = to.life_cycle(i);
        if (part.scratch_slots > cache.scratch_count(i)) {
            std::int64_t next = cache.scratch_count(i);
            transaction.resize(cache.scratch[i].slots, part.scratch_slots);
            for (; next < part.scratch_slots; ++next) {
                transaction.allocate(id, cache.scratch[i].slots, next, kDefaultPriority);
            }
        }
        for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
            transaction.resize(cache.table(i, beam), to.blocks_after());
        }
        for (const HalfOpenRange& range : part.allocate) {
            for (std::int64_t ordinal = range.beg; ordinal < range.end; ++ordinal) {
                const std::int32_t priority = cache.priority(i, ordinal);
                for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
                    transaction.allocate(id, cache.table(i, beam), ordinal, priority);
                }
            }
        }
    }
    transaction.set_lengths(cache, to.after(), context.box_around(cache, to.after()));
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

std::span<const ChangedBlocks> ManagerState::changes_of(const RequestPlan& of) {
    changed.clear();
    for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
        changed.push_back(of.changed(i));
    }
    return changed;
}

bool ManagerState::resize(KvCache& cache, std::optional<std::int64_t> capacity, std::optional<std::int64_t> history) {
    if (!capacity.has_value() && !history.has_value()) {
        return true;
    }
    require(cache, CacheStatus::active, "resize");
    const Lengths after{capacity.value_or(cache.capacity), history.value_or(cache.history)};
    check_lengths(cache, after, {"resize"});
    plan.make(context, cache, after);
    check_ever_fits({"resize"});
    if (!fits_now()) {
        return false;
    }
    changed.reserve(context.num_life_cycles());
    transact([&] {
        apply_plan(cache, plan);
        settle(cache);
    });
    publish(cache, changes_of(plan));
    cache.unbind();
    return true;
}

}  // namespace kvpool
