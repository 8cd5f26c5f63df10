// suspend, resume after that, and what else ends or starts the use of pages. The first resume: first_resume.cpp; close: close.cpp.
#include "kvpool/core/errors.hpp"
#include "kvpool/manager/state.hpp"

namespace kvpool {

bool ManagerState::gate_is_open(const KvCache& cache) const noexcept {
    if (num_active == 0) {
        return true;  // else a suspended cache could lock itself out
    }
    for (std::size_t group = 0; group < layout.pool_groups.size(); ++group) {
        const auto id = make_id<PoolGroupId>(group);
        const std::int64_t owned = tier.used(id) - prefix.evictable(id);
        const auto is_shut = [&](std::int64_t others) {
            return exceeds_limit(others, tier.total(id), max_util_for_resume);
        };
        if (!layout.pool_groups[group].ssm_only && is_shut(owned) && is_shut(owned - context.owned_alone(cache, id))) {
            return false;
        }
    }
    return true;
}

bool ManagerState::resume(KvCache& cache, std::optional<StreamId> stream,
                          const std::optional<std::vector<std::int64_t>>& optional_groups) {
    require(cache, CacheStatus::suspended, "resume");
    FirstResume::choose_groups(cache, optional_groups);
    const StreamId target = stream.value_or(cache.has_stream ? cache.stream : device->own_stream());
    if (cache.was_resumed) {
        plan.make(context, cache, cache.lengths());
    } else {
        plan.make_first_resume(context, cache);
    }
    check_ever_fits({"resume"});
    if (!gate_is_open(cache)) {
        return false;
    }
    if (!cache.was_resumed) {
        if (!first_resume.run(cache, target, plan)) {
            return false;
        }
    } else {
        if (!fits_now()) {
            return false;
        }
        transact([&] {
            transaction.rebind(cache, target);
            apply_plan(cache, plan);
            settle(cache);
        });
    }
    cache.status = CacheStatus::active;
    ++num_active;
    cache.unbind();
    context.refresh_attached(cache);
    return true;
}

void ManagerState::suspend(KvCache& cache) {
    require(cache, CacheStatus::active, "suspend");
    transact([&] {
        for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
            release_scratch(cache, i, 0);
        }
        settle(cache);
    });
    cache.status = CacheStatus::suspended;
    --num_active;
    cache.unbind();
    detach(cache, 0);
}

void ManagerState::set_stream(KvCache& cache, StreamId stream) {
    transact([&] { transaction.rebind(cache, stream); });
}

}  // namespace kvpool
