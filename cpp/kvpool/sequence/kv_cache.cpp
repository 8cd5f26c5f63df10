#include "kvpool/sequence/kv_cache.hpp"

#include <algorithm>

#include "kvpool/core/math.hpp"

namespace kvpool {

void KvCache::open(std::size_t num_life_cycles, bool scratch_on, std::uint32_t new_generation) {
    tables.resize(num_life_cycles);
    scratch.resize(scratch_on ? num_life_cycles : 0);
    capacity = history = 0;
    row = -1;
    table_serial = 0;
    stream = kOwnStream;
    beam_width = 1;
    status = CacheStatus::suspended;
    has_stream = false;
    commit_allowed = true;
    scratch_enabled = scratch_on;
    has_state = false;
    last_generation = new_generation;
    generation.store(new_generation, std::memory_order_release);
}

void KvCache::end() noexcept {
    generation.store(0, std::memory_order_release);
    status = CacheStatus::closed;
    unbind();
    tables.clear();
    tables.shrink_to_fit();
    scratch.clear();
    scratch.shrink_to_fit();
}

std::int64_t SequenceContext::num_blocks(const KvCache& cache) const noexcept {
    return div_up(std::int64_t{cache.capacity}, layout->tokens_per_block);
}

void SequenceContext::refresh_box(KvCache& cache) const noexcept {
    cache.box = length_box(*layout, rules(cache), cache.lengths());
    for (std::size_t i = 0; i < num_life_cycles(); ++i) {
        if (scratch_blocks(layout->life_cycles[i], rules(cache), cache.lengths()) != cache.scratch_range(i)) {
            cache.box =
                LengthBox::nothing();  // scratch was switched off meanwhile: the next change of lengths plans anew
        }
    }
}

std::int64_t SequenceContext::owned(const KvCache& cache, PoolGroupId group) const noexcept {
    std::int64_t sum = 0;
    for (const LifeCycleId life_cycle : layout->pool_group(group).life_cycles) {
        for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
            sum += cache.table(life_cycle.index(), beam).count();
        }
        sum += cache.scratch_count(life_cycle.index());
    }
    return sum;
}

bool SequenceContext::has_scratch(const KvCache& cache) const noexcept {
    return std::any_of(cache.scratch.begin(), cache.scratch.end(),
                       [](const ScratchBlocks& s) { return s.slots.size() > 0; });
}

void SequenceContext::expose(const KvCache& cache, std::size_t life_cycle, std::int32_t beam, std::int64_t begin,
                             std::int64_t end, std::int32_t* out) const noexcept {
    const LifeCycleKey& key = layout->life_cycles[life_cycle].key;
    const std::int64_t blocks = cache.is_active() && !key.is_ssm ? num_blocks(cache) : 0;
    const std::int64_t written = std::clamp(blocks, begin, std::max(begin, end));
    const BlockTable& table = cache.table(life_cycle, beam);
    if (written > begin) {
        std::copy(table.data() + begin, table.data() + written, out + begin);
        if (table.held() > 0) {
            const HalfOpenRange stale =
                intersect(stale_range(key, tokens_per_block(), cache.history), HalfOpenRange{begin, written});
            if (!stale.empty()) {
                std::fill(out + stale.beg, out + stale.end, kBadSlot.value());
            }
        }
    }
    std::fill(out + written, out + std::max(written, end), kBadSlot.value());
}

void SequenceContext::refresh(const KvCache& cache, const AttachedBuffer& buffer) const noexcept {
    expose(cache, buffer.life_cycle.index(), buffer.beam.value(), 0, static_cast<std::int64_t>(buffer.entries.size()),
           buffer.entries.data());
}

void SequenceContext::refresh_attached(const KvCache& cache) const noexcept {
    for (const AttachedBuffer& buffer : cache.attached) {
        refresh(cache, buffer);
    }
}

}  // namespace kvpool
