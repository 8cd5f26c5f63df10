// resume, suspend, close, and what else ends or starts the use of pages.
#include "kvpool/core/errors.hpp"
#include "kvpool/manager/state.hpp"

namespace kvpool {

bool ManagerState::gate_is_open(const KvCache& cache) const noexcept {
    if (num_active == 0) {
        return true;  // else a suspended cache could lock itself out
    }
    for (std::size_t group = 0; group < layout.pool_groups.size(); ++group) {
        const auto id = make_id<PoolGroupId>(group);
        const std::int64_t others = tier.used(id) - context.owned(cache, id);
        if (!layout.pool_groups[group].ssm_only && exceeds_limit(others, tier.total(id), max_util_for_resume)) {
            return false;
        }
    }
    return true;
}

bool ManagerState::resume(KvCache& cache, std::optional<StreamId> stream) {
    require(cache, CacheStatus::suspended, "resume");
    plan.make(context, cache, cache.lengths(), true);
    check_ever_fits({"resume"});
    if (!gate_is_open(cache) || !fits_now()) {
        return false;
    }
    transact([&] {
        transaction.rebind(cache, stream.value_or(cache.has_stream ? cache.stream : device->own_stream()));
        apply_plan(cache);
        for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
            for (std::int32_t beam = 0; !cache.has_state && layout.life_cycles[i].key.is_ssm && beam < cache.beam_width;
                 ++beam) {
                transaction.resize(cache.table(i, beam), 1);
                transaction.allocate(group_of(i), cache.table(i, beam), 0);
            }
        }
        transaction.settle(cache.stream);
    });
    cache.has_state = true;
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
        transaction.settle(cache.stream);
    });
    cache.status = CacheStatus::suspended;
    --num_active;
    cache.unbind();
    detach(cache, 0);
}

void ManagerState::close(CacheHandle handle, KvCache& cache) {
    transact([&] {
        for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
            for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
                BlockTable& pages = cache.table(i, beam);
                for (std::int64_t ordinal = pages.size(); ordinal-- > 0;) {
                    release_pages(group_of(i), pages, {ordinal, ordinal + 1});
                }
            }
            release_scratch(cache, i, 0);
        }
        transaction.settle(cache.stream);
    });
    num_active -= cache.is_active() ? 1 : 0;
    detach(cache, 0);
    slab.close(handle);
}

void ManagerState::stop_committing(KvCache& cache) {
    if (!cache.commit_allowed) {
        return;
    }
    transact([&] {
        for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
            const LifeCycleKey& key = layout.life_cycles[i].key;
            for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
                BlockTable& pages = cache.table(i, beam);
                if (pages.held() > 0) {
                    release_pages(group_of(i), pages, stale_range(key, layout.tokens_per_block, cache.history));
                    transaction.add_held(pages, -std::int64_t{pages.held()});
                }
            }
        }
        transaction.settle(cache.stream);
    });
    cache.commit_allowed = false;
}

void ManagerState::set_stream(KvCache& cache, StreamId stream) {
    transact([&] { transaction.rebind(cache, stream); });
}

}  // namespace kvpool
