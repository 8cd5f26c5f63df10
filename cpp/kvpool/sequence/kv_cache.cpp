#include "kvpool/sequence/kv_cache.hpp"

#include <algorithm>

#include "kvpool/core/math.hpp"

namespace kvpool {

void KvCache::open(std::size_t num_life_cycles, bool scratch_on, std::uint32_t new_generation) {
    tables.resize(num_life_cycles);
    scratch.resize(scratch_on ? num_life_cycles : 0);
    capacity = history = committed = committed_blocks = 0;
    matched = divergence = hybrid = 0;
    last_node = kNoNode;
    state_source = kBadSlot;
    prompt_length = 0;
    scope = {};
    was_resumed = text_only = false;
    row = -1;
    table_serial = 0;
    stream = kOwnStream;
    beam_width = 1;
    status = CacheStatus::suspended;
    has_stream = false;
    commit_allowed = true;
    scratch_enabled = scratch_on;
    box = {};
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
    tail.reset();
    priorities.clear();
    priorities.shrink_to_fit();
    optional.clear();
    optional.shrink_to_fit();
}

SequenceContext::SequenceContext(const Layout& layout_of_manager, std::optional<std::int64_t> rewind, bool min_snapshot)
    : layout(&layout_of_manager), scratch_rewind(rewind), commit_min_snapshot(min_snapshot) {
    const auto is_first_to_close = [&](std::size_t i) {
        const LifeCycleKey& key = layout->life_cycles[i].key;
        return !key.is_windowed() && !key.optional;
    };
    for (std::size_t i = 0; i < num_life_cycles(); ++i) {
        if (layout->life_cycles[i].key.is_ssm) {
            state = i;
        } else {
            attention.push_back(i);
        }
    }
    close_order = attention;
    std::stable_partition(close_order.begin(), close_order.end(), is_first_to_close);
}

std::int64_t SequenceContext::num_blocks(const KvCache& cache) const noexcept {
    return div_up(std::int64_t{cache.capacity}, layout->tokens_per_block);
}

LengthBox SequenceContext::box_around(const KvCache& cache, Lengths lengths) const noexcept {
    const LengthRules length_rules = rules(cache);
    for (std::size_t i = 0; i < cache.scratch.size(); ++i) {
        if (scratch_blocks(layout->life_cycles[i], length_rules, lengths) != cache.scratch_range(i)) {
            return LengthBox::
                nothing();  // switched off or not planned anew meanwhile: the next change of lengths does that
        }
    }
    return length_box(*layout, length_rules, lengths);
}

std::int64_t SequenceContext::owned_alone(const KvCache& cache, PoolGroupId group) const noexcept {
    std::int64_t sum = 0;
    for_each_slot(cache, [&](LifeCycleId life_cycle, SlotId slot) {
        if (layout->life_cycle(life_cycle).pool_group == group && prefix->refs(life_cycle, slot) == 1) {
            ++sum;
        }
    });
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
