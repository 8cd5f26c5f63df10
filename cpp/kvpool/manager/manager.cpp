#include "kvpool/manager/manager.hpp"

#include <algorithm>
#include <utility>

#include "kvpool/core/errors.hpp"

namespace kvpool {

Manager::Manager(const ManagerConfig& config, std::string_view device)
    : state_(std::make_unique<ManagerState>(config, device)) {}

Manager::~Manager() {
    if (!guard_.is_native_process()) {
        static_cast<void>(state_.release());  // NOLINT(bugprone-unused-return-value): leaked on purpose
    }
}

// Entries ------------------------------------------------------------------------------------------------------------------

ManagerState& Manager::open_state(const char* call) {
    if (shut_down_) {
        throw LogicError(std::string(call) + "(): the manager is shut down");
    }
    return *state_;
}

void Manager::throw_stale(const char* call, CacheHandle handle) {
    throw LogicError(std::string(call) + "(): " + describe_handle(handle) + " is closed or unknown");
}

void Manager::collect(Leftovers& leftovers) noexcept {
    leftovers.buffers.splice(leftovers.buffers.end(), state_->discarded);
    leftovers.table = std::move(state_->former_table);
}

template <class F>
decltype(auto) Manager::locked(const char* call, F&& f) {
    guard_.check_process();
    const ManagerLock lock(guard_);
    return guard_.run([&]() -> decltype(auto) { return f(open_state(call)); });
}

template <class F>
decltype(auto) Manager::inside(const char* call, CacheHandle handle, F&& f) {
    guard_.check_process();
    KvCache* const cache = state_->slab.find(handle);
    if (cache == nullptr) {
        throw_stale(call, handle);
    }
    Leftovers leftovers;
    std::optional<ManagerLock> lock;  // given back after the flag, so that a new owner of the record finds it clear
    const BusyClaim claim(cache->busy);
    lock.emplace(guard_);
    struct Collect {
        Manager* manager;
        Leftovers* leftovers;
        ~Collect() { manager->collect(*leftovers); }
    } const collect_at_end{this, &leftovers};
    return guard_.run([&]() -> decltype(auto) {
        ManagerState& state = open_state(call);
        if (state.slab.find(handle) != cache) {
            throw_stale(call, handle);
        }
        return f(state, *cache);
    });
}

void Manager::lock_for_step(std::optional<ManagerLock>& lock, std::span<const CacheHandle> handles) {
    if (guard_.mutex().try_lock()) {
        lock.emplace(guard_, std::adopt_lock);
        return;
    }
    std::vector<std::atomic<std::uint32_t>*> taken;
    taken.reserve(handles.size());
    const auto give_back = [&]() noexcept {
        for (std::atomic<std::uint32_t>* flag : taken) {
            flag->store(0, std::memory_order_release);
        }
    };
    try {
        for (const CacheHandle handle : handles) {
            KvCache* const cache = state_->slab.find(handle);
            if (cache == nullptr) {
                continue;  // the step itself refuses it
            }
            if (cache->busy.exchange(1, std::memory_order_acquire) != 0) {
                if (std::find(taken.begin(), taken.end(), &cache->busy) != taken.end()) {
                    continue;  // given twice: the step refuses that, too
                }
                throw LogicError("step(): " + describe_handle(handle) + " is in use by another thread");
            }
            taken.push_back(&cache->busy);
        }
        lock.emplace(guard_);
    } catch (...) {
        give_back();
        throw;
    }
    give_back();
}

StepOutput Manager::step(const StepInput& input) {
    guard_.check_process();
    std::optional<ManagerLock> lock;
    lock_for_step(lock, input.handles);
    return guard_.run([&] { return batch_step_.run(open_state("step"), input); });
}

// Constant for life ----------------------------------------------------------------------------------------------------------

const Layout& Manager::layout() const {
    guard_.check_process();
    return state_->layout;
}

const PoolPlan& Manager::pool_plan() const {
    guard_.check_process();
    return state_->pool_plan;
}

std::string Manager::device_name() const { return std::string(state_->device->name()); }

std::shared_ptr<Device> Manager::device() const {
    guard_.check_process();
    return state_->device;
}

// Pools ----------------------------------------------------------------------------------------------------------------------

std::vector<std::int64_t> Manager::slot_counts() {
    return locked("slot_counts", [](ManagerState& state) {
        std::vector<std::int64_t> counts;
        for (std::size_t group = 0; group < state.layout.pool_groups.size(); ++group) {
            counts.push_back(state.tier.total(make_id<PoolGroupId>(group)));
        }
        return counts;
    });
}

std::vector<std::vector<Address>> Manager::pool_addresses() {
    return locked("pool_addresses", [](ManagerState& state) {
        std::vector<std::vector<Address>> addresses(state.layout.pool_groups.size());
        for (std::size_t group = 0; group < addresses.size(); ++group) {
            for (const Pool& pool : state.tier.pools(make_id<PoolGroupId>(group))) {
                addresses[group].push_back(pool.address());
            }
        }
        return addresses;
    });
}

Pool Manager::pool(std::int64_t pool_group, std::int64_t pool) {
    return locked("pool_memory", [&](ManagerState& state) {
        const auto groups = static_cast<std::int64_t>(state.layout.pool_groups.size());
        if (pool_group >= 0 && pool_group < groups) {
            const std::span<const Pool> pools =
                state.tier.pools(make_id<PoolGroupId>(static_cast<std::size_t>(pool_group)));
            if (pool >= 0 && pool < static_cast<std::int64_t>(pools.size())) {
                return pools[static_cast<std::size_t>(pool)];
            }
        }
        throw ArgumentError("pool_memory(): there is no pool " + std::to_string(pool) + " in pool group " +
                            std::to_string(pool_group));
    });
}

std::int64_t Manager::mapped_bytes() {
    return locked("mapped_bytes", [](ManagerState& state) { return state.tier.mapped_bytes(); });
}

std::vector<SlotStatistics> Manager::statistics() {
    return locked("statistics", [](ManagerState& state) {
        std::vector<SlotStatistics> rows;
        for (std::size_t group = 0; group < state.layout.pool_groups.size(); ++group) {
            const auto id = make_id<PoolGroupId>(group);
            rows.push_back({state.tier.total(id), state.tier.free(id), state.prefix.evictable(id)});
        }
        return rows;
    });
}

std::int64_t Manager::clamp_max_seq_len(std::int64_t batch_size, std::int64_t token_num_upper_bound) {
    return locked("clamp_max_seq_len",
                  [&](ManagerState& state) { return state.clamp_max_seq_len(batch_size, token_num_upper_bound); });
}

void Manager::synchronize() {
    locked("synchronize", [](ManagerState& state) { state.device->synchronize(); });
}

ManagerSnapshot Manager::snapshot() {
    return locked("snapshot", [](ManagerState& state) { return take_snapshot(state); });
}

void Manager::audit() {
    locked("audit", [](ManagerState& state) { state.audit(); });
}

std::int64_t Manager::num_open() {
    guard_.check_process();
    const ManagerLock lock(guard_);
    return state_->slab.num_open();
}

void Manager::shutdown() {
    guard_.check_process();
    const ManagerLock lock(guard_);
    guard_.run([&] {
        if (shut_down_) {
            return;
        }
        const std::int64_t open = state_->slab.num_open();
        if (open > 0) {
            throw LogicError("shutdown(): " + std::to_string(open) + " KV cache(s) still open");
        }
        shut_down_ = true;
        state_->planned_drops.clear();
        state_->prefix_memory.reset();
        state_->tier_memory.reset();
    });
}

// Reuse ----------------------------------------------------------------------------------------------------------------------

std::int64_t Manager::probe_reuse(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests) {
    return locked("probe_reuse", [&](ManagerState& state) { return state.probe_reuse(scope, ids, digests); });
}

std::optional<BlockKey> Manager::probe_first_new_block_key(const ReuseScope& scope, TokenSpan ids,
                                                           std::span<const Digest> digests) {
    return locked("probe_first_new_block_key",
                  [&](ManagerState& state) { return state.probe_first_new_block_key(scope, ids, digests); });
}

void Manager::clear_reusable_blocks() {
    locked("clear_reusable_blocks", [](ManagerState& state) { state.clear_reusable_blocks(); });
}

bool Manager::drop_planned(std::int64_t plan) {
    return locked("drop_planned", [&](ManagerState& state) { return state.drop_planned(plan); });
}

PagesOnPath Manager::match_pages(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                                 std::int64_t life_cycle, bool partial) {
    return locked("match_pages",
                  [&](ManagerState& state) { return state.match_pages(scope, ids, digests, life_cycle, partial); });
}

bool Manager::all_tree_pages_droppable() {
    return locked("all_tree_pages_droppable", [](ManagerState& state) { return state.prefix.all_cached(); });
}

void Manager::debug_insert_block(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                                 std::span<const std::int64_t> coverage) {
    locked("debug_insert_block", [&](ManagerState& state) { state.debug_insert_block(scope, ids, digests, coverage); });
}

void Manager::debug_set_coverage(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                                 std::int64_t life_cycle, std::int64_t coverage) {
    locked("debug_set_coverage",
           [&](ManagerState& state) { state.debug_set_coverage(scope, ids, digests, life_cycle, coverage); });
}

// Caches ---------------------------------------------------------------------------------------------------------------------

CacheHandle Manager::create(CreateInput input) {
    return locked("create", [&](ManagerState& state) { return state.create(input); });
}

void Manager::extend_priorities(CacheHandle handle, const std::vector<std::vector<std::int32_t>>& priorities) {
    inside("extend_priorities", handle, [&](ManagerState& state, KvCache& cache) {
        std::vector<std::vector<std::int32_t>> extended = cache.priorities;
        extended.resize(state.context.num_life_cycles());
        for (std::size_t i = 0; i < std::min(extended.size(), priorities.size()); ++i) {
            extended[i].insert(extended[i].end(), priorities[i].begin(), priorities[i].end());
        }
        cache.priorities = std::move(extended);
    });
}

bool Manager::resume(CacheHandle handle, std::optional<StreamId> stream,
                     const std::optional<std::vector<std::int64_t>>& optional_groups) {
    return inside("resume", handle,
                  [&](ManagerState& state, KvCache& cache) { return state.resume(cache, stream, optional_groups); });
}

void Manager::commit(CacheHandle handle, TokenSpan ids, std::span<const Digest> digests, bool is_end) {
    inside("commit", handle,
           [&](ManagerState& state, KvCache& cache) { state.committer.commit(cache, ids, digests, is_end); });
}

void Manager::suspend(CacheHandle handle) {
    inside("suspend", handle, [](ManagerState& state, KvCache& cache) { state.suspend(cache); });
}

void Manager::close(CacheHandle handle) {
    inside("close", handle, [&](ManagerState& state, KvCache& cache) { state.close(handle, cache); });
}

bool Manager::resize(CacheHandle handle, std::optional<std::int64_t> capacity, std::optional<std::int64_t> history) {
    return inside("resize", handle,
                  [&](ManagerState& state, KvCache& cache) { return state.resize(cache, capacity, history); });
}

void Manager::stop_committing(CacheHandle handle) {
    inside("stop_committing", handle,
           [](ManagerState& state, KvCache& cache) { state.committer.stop_committing(cache); });
}

bool Manager::commit_allowed(CacheHandle handle) {
    return inside("commit_allowed", handle, [](ManagerState&, KvCache& cache) { return cache.commit_allowed; });
}

std::pair<std::vector<Token>, std::vector<Digest>> Manager::committed_tokens(CacheHandle handle) {
    return inside("committed_tokens", handle,
                  [](ManagerState& state, KvCache& cache) { return state.committed_tokens(cache); });
}

std::vector<BlockKey> Manager::block_keys(CacheHandle handle) {
    return inside("block_keys", handle, [](ManagerState& state, KvCache& cache) { return state.block_keys(cache); });
}

std::pair<std::int64_t, std::int64_t> Manager::match_depths(CacheHandle handle) {
    return inside("match_depths", handle, [](ManagerState&, KvCache& cache) {
        return std::pair<std::int64_t, std::int64_t>(cache.divergence, cache.hybrid);
    });
}

std::vector<ReuseStatus> Manager::reuse_status(CacheHandle handle) {
    return inside("reuse_status", handle,
                  [](ManagerState& state, KvCache& cache) { return state.reuse_status(cache); });
}

std::optional<std::int64_t> Manager::plan_drop(CacheHandle handle) {
    return inside("plan_committed_block_drop", handle,
                  [](ManagerState& state, KvCache& cache) { return state.plan_drop(cache); });
}

std::optional<bool> Manager::page_is_linked(CacheHandle handle, std::int64_t ordinal, std::int64_t life_cycle) {
    return inside("page_is_linked", handle, [&](ManagerState& state, KvCache& cache) -> std::optional<bool> {
        state.check_life_cycle(life_cycle);
        const LifeCycleId id(static_cast<std::int32_t>(life_cycle));
        const SlotId slot = state.page_of(cache, id.index(), ordinal);
        return slot == kBadSlot ? std::nullopt : std::optional<bool>(state.prefix.node_of(id, slot) != kNoNode);
    });
}

CacheLengths Manager::lengths(CacheHandle handle) {
    return inside("lengths", handle, [](ManagerState& state, KvCache& cache) {
        return CacheLengths{cache.committed, cache.history, cache.capacity, state.context.num_blocks(cache)};
    });
}

CacheStatus Manager::status(CacheHandle handle) {
    guard_.check_process();
    const ManagerLock lock(guard_);
    const KvCache* const cache = state_->slab.find(handle);
    return cache == nullptr ? CacheStatus::closed : cache->status;
}

std::optional<StreamId> Manager::stream(CacheHandle handle) {
    return inside("stream", handle, [](ManagerState&, KvCache& cache) {
        return cache.has_stream ? std::optional<StreamId>(cache.stream) : std::nullopt;
    });
}

void Manager::set_stream(CacheHandle handle, StreamId stream) {
    inside("set_stream", handle, [&](ManagerState& state, KvCache& cache) { state.set_stream(cache, stream); });
}

std::int64_t Manager::beam_width(CacheHandle handle) {
    return inside("beam_width", handle, [](ManagerState&, KvCache& cache) { return std::int64_t{cache.beam_width}; });
}

void Manager::set_beam_width(CacheHandle handle, std::int64_t width) {
    inside("set_beam_width", handle, [&](ManagerState& state, KvCache& cache) { state.set_beam_width(cache, width); });
}

bool Manager::scratch_enabled(CacheHandle handle) {
    return inside("scratch_enabled", handle, [](ManagerState&, KvCache& cache) { return cache.scratch_enabled; });
}

void Manager::set_scratch_enabled(CacheHandle handle, bool value) {
    inside("set_scratch_enabled", handle,
           [&](ManagerState& state, KvCache& cache) { state.set_scratch_enabled(cache, value); });
}

std::optional<ScratchDescription> Manager::scratch_desc(CacheHandle handle, std::int64_t life_cycle) {
    return inside("scratch_desc", handle,
                  [&](ManagerState& state, KvCache& cache) -> std::optional<ScratchDescription> {
                      state.check_place(cache, life_cycle, 0);
                      const auto i = static_cast<std::size_t>(life_cycle);
                      if (cache.scratch_count(i) == 0) {
                          return std::nullopt;
                      }
                      const BlockTable& slots = cache.scratch[i].slots;
                      return ScratchDescription{cache.scratch_range(i), {slots.data(), slots.data() + slots.size()}};
                  });
}

std::vector<std::int32_t> Manager::page_indices(CacheHandle handle, std::int64_t life_cycle, std::int64_t beam) {
    return inside("page_indices", handle, [&](ManagerState& state, KvCache& cache) {
        state.check_place(cache, life_cycle, beam);
        const std::int64_t blocks = state.context.num_blocks(cache);
        std::vector<std::int32_t> out(static_cast<std::size_t>(blocks));
        state.context.expose(cache, static_cast<std::size_t>(life_cycle), static_cast<std::int32_t>(beam), 0, blocks,
                             out.data());
        return out;
    });
}

std::vector<std::int32_t> Manager::held_page_indices(CacheHandle handle, std::int64_t life_cycle, std::int64_t beam) {
    return inside("held_page_indices", handle, [&](ManagerState& state, KvCache& cache) {
        state.check_place(cache, life_cycle, beam);
        std::vector<std::int32_t> out(static_cast<std::size_t>(state.context.num_blocks(cache)), kBadSlot.value());
        const auto i = static_cast<std::size_t>(life_cycle);
        if (!state.layout.life_cycles[i].key.is_ssm) {
            std::copy_n(cache.table(i, static_cast<std::int32_t>(beam)).data(), out.size(), out.begin());
        }
        return out;
    });
}

std::shared_ptr<void> Manager::attached_buffer(CacheHandle handle, std::int64_t life_cycle, std::int64_t beam) {
    return inside("page_indices", handle, [&](ManagerState& state, KvCache& cache) -> std::shared_ptr<void> {
        state.check_place(cache, life_cycle, beam);
        for (const AttachedBuffer& buffer : cache.attached) {
            if (buffer.life_cycle.value() == life_cycle && buffer.beam.value() == beam) {
                return buffer.keep_alive;
            }
        }
        return nullptr;
    });
}

void Manager::attach_buffer(CacheHandle handle, std::int64_t beam, std::int64_t life_cycle,
                            std::span<std::int32_t> entries, std::shared_ptr<void> keep_alive) {
    inside("attach_buffer", handle, [&](ManagerState& state, KvCache& cache) {
        state.check_place(cache, life_cycle, beam);
        const LifeCycleId life_cycle_id(static_cast<std::int32_t>(life_cycle));
        const BeamId beam_id(static_cast<std::int32_t>(beam));
        if (keep_alive == nullptr) {
            state.detach_buffer(cache, life_cycle_id, beam_id);
        } else {
            state.attach_buffer(cache, {life_cycle_id, beam_id, entries, keep_alive});
        }
    });
}

SlotId Manager::ssm_slot(CacheHandle handle, std::int64_t life_cycle, std::int64_t beam) {
    return inside("ssm_slot", handle, [&](ManagerState& state, KvCache& cache) {
        state.check_place(cache, life_cycle, beam);
        const auto i = static_cast<std::size_t>(life_cycle);
        const BlockTable& slot = cache.table(i, static_cast<std::int32_t>(beam));
        return state.layout.life_cycles[i].key.is_ssm && slot.size() > 0 ? slot[0] : kBadSlot;
    });
}

}  // namespace kvpool
