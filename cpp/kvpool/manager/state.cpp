#include "kvpool/manager/state.hpp"

#include <array>
#include <cstdio>

#include "kvpool/core/errors.hpp"
#include "kvpool/device/factory.hpp"

namespace kvpool {

ManagerState::ManagerState(const ManagerConfig& config, std::string_view device_name)
    : layout(build_layout(config)),
      context(layout, config.scratch_max_rewind_len, config.commit_min_snapshot),
      max_util_for_resume(Decimal::from_double(config.max_util_for_resume)),
      device(make_device(device_name)),
      pool_plan(plan_pools(layout, config, device->granularity())),
      tier_memory(std::make_unique<Tier>(*device, journal, layout, pool_plan.counts, pool_plan.grain)),
      tier(*tier_memory),
      prefix_memory(std::make_unique<PrefixCache>(layout, ReuseRules::make(layout, config), tier, journal)),
      prefix(*prefix_memory),
      transaction(*device, layout, tier, prefix, journal),
      committer(*this),
      first_resume(*this) {
    context.prefix = &prefix;
    for (std::size_t group = 0; group < layout.pool_groups.size(); ++group) {
        const auto life_cycles = static_cast<std::int64_t>(layout.pool_groups[group].life_cycles.size());
        most_blocks_that_always_fit =
            std::min(most_blocks_that_always_fit, tier.total(make_id<PoolGroupId>(group)) / life_cycles);
    }
}

std::string describe_handle(CacheHandle handle) {
    std::array<char, 20> text{};
    std::snprintf(text.data(), text.size(), "%llx", static_cast<unsigned long long>(handle));
    return std::string("handle 0x") + text.data();
}

void ManagerState::require(const KvCache& cache, CacheStatus status, const char* call) {
    if (cache.status != status) {
        throw LogicError(std::string(call) + "() needs " +
                         (status == CacheStatus::active ? "an ACTIVE" : "a SUSPENDED") + " KV cache; this one is " +
                         (cache.is_active() ? "ACTIVE" : "SUSPENDED"));
    }
}

void ManagerState::check_life_cycle(std::int64_t life_cycle) const {
    if (life_cycle < 0 || life_cycle >= static_cast<std::int64_t>(context.num_life_cycles())) {
        throw UnknownBufferError("layer group " + std::to_string(life_cycle) + " is unknown; there are " +
                                 std::to_string(context.num_life_cycles()));
    }
}

void ManagerState::check_place(const KvCache& cache, std::int64_t life_cycle, std::int64_t beam) const {
    check_life_cycle(life_cycle);
    if (beam < 0 || beam >= cache.beam_width) {
        throw ArgumentError("beam " + std::to_string(beam) + ": must be from 0 to " +
                            std::to_string(cache.beam_width - 1));
    }
}

std::string ManagerState::describe_group(std::size_t group) const {
    std::string text = "pool group " + std::to_string(group) + " (";
    const char* separator = "";
    for (const LifeCycleId life_cycle : layout.pool_groups[group].life_cycles) {
        text += separator + describe(layout.life_cycle(life_cycle).key);
        separator = "; ";
    }
    return text + ")";
}

SlotId ManagerState::page_of(const KvCache& cache, std::size_t life_cycle, std::int64_t ordinal) const noexcept {
    if (ordinal < 0 || ordinal >= context.num_blocks(cache)) {
        return kBadSlot;
    }
    const BlockTable& table = cache.table(life_cycle, 0);
    if (!layout.life_cycles[life_cycle].key.is_ssm) {
        return table[ordinal];
    }
    return cache.was_resumed ? table[0] : cache.state_source;
}

void ManagerState::release_pages(std::size_t life_cycle, BlockTable& pages, HalfOpenRange blocks) {
    for (std::int64_t ordinal = blocks.beg; ordinal < blocks.end; ++ordinal) {
        if (pages[ordinal] != kBadSlot) {
            transaction.release(make_id<LifeCycleId>(life_cycle), pages, ordinal);
        }
    }
}

void ManagerState::settle(const KvCache& cache) {
    if (cache.was_resumed) {
        transaction.settle(cache.stream);
    } else {
        transaction.settle_unused();
    }
}

void ManagerState::release_scratch(KvCache& cache, std::size_t life_cycle, std::int64_t keep) {
    if (cache.scratch_count(life_cycle) <= keep) {
        return;
    }
    BlockTable& slots = cache.scratch[life_cycle].slots;
    for (std::int64_t i = slots.size(); i-- > keep;) {
        transaction.release(make_id<LifeCycleId>(life_cycle), slots, i);
    }
    transaction.resize(slots, keep);
}

void ManagerState::detach(KvCache& cache, std::int32_t first_beam) noexcept {
    for (auto next = cache.attached.begin(); next != cache.attached.end();) {
        const auto buffer = next++;
        if (buffer->beam.value() >= first_beam) {
            std::fill(buffer->entries.begin(), buffer->entries.end(), kBadSlot.value());
            discarded.splice(discarded.end(), cache.attached, buffer);
        }
    }
}

void ManagerState::attach_buffer(KvCache& cache, AttachedBuffer buffer) {
    const std::int64_t blocks = context.num_blocks(cache);
    if (static_cast<std::int64_t>(buffer.entries.size()) < blocks) {
        throw ArgumentError("buffer: " + std::to_string(buffer.entries.size()) + " entries are below the " +
                            std::to_string(blocks) + " blocks of the KV cache");
    }
    std::list<AttachedBuffer> one;
    one.push_back(std::move(buffer));
    detach_buffer(cache, one.front().life_cycle, one.front().beam);
    context.refresh(cache, one.front());
    cache.attached.splice(cache.attached.end(), one);
}

void ManagerState::detach_buffer(KvCache& cache, LifeCycleId life_cycle, BeamId beam) noexcept {
    const auto found = std::find_if(cache.attached.begin(), cache.attached.end(), [&](const AttachedBuffer& buffer) {
        return buffer.life_cycle == life_cycle && buffer.beam == beam;
    });
    if (found != cache.attached.end()) {
        discarded.splice(discarded.end(), cache.attached, found);
    }
}

void ManagerState::set_scratch_enabled(KvCache& cache, bool value) {
    if (!value && context.has_scratch(cache)) {
        throw ArgumentError("enable_swa_scratch_reuse: can not be switched off while scratch blocks are in use");
    }
    if (value && !cache.scratch_enabled) {
        if (!context.scratch_rewind.has_value()) {
            throw ArgumentError("enable_swa_scratch_reuse: the manager's swa_scratch_reuse is not configured");
        }
        const LengthRules rules{layout.tokens_per_block, context.scratch_rewind};
        for (const LifeCycle& life_cycle : layout.life_cycles) {
            if (!scratch_blocks(life_cycle, rules, cache.lengths()).empty()) {
                throw ArgumentError("enable_swa_scratch_reuse: history " + std::to_string(cache.history) +
                                    ", capacity " + std::to_string(cache.capacity) + " would need scratch blocks now");
            }
        }
    }
    cache.scratch_enabled = value;
    context.refresh_box(cache);
}

}  // namespace kvpool
