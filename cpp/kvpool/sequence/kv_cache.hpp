// The record of one request: lengths, pages, scratch slots, and where its page indices are written.
//
// Words
//   exposed     the slot id that kernels may see for a block: its page's while ACTIVE and not stale, else kBadSlot
//   attached    an int32 buffer of the caller that always shows the exposed ids of one (life cycle, beam)
//   box         lengths that need the very same pages (LengthBox)
//   matched     a cache that took over a prefix and was not resumed yet: its pages are the tree's, nothing is copied
// Invariants
//   0 <= committed <= history <= capacity;  committed = committed_blocks * tpb + tail.size()
//   last_node is the node of block committed_blocks - 1, or the scope's root, or none; the cache holds it
//   attention tables have div_up(capacity, tpb) entries;  SSM tables at most one: the state slot
//   entry o of beam 0 is kBadSlot iff o is scratch, or stale and not held (matched: or of an OPTIONAL group without that page)
//   held pages are those of stale blocks >= committed_blocks
//   scratch[lc] has ceil(blocks * scratch_fraction) slots while ACTIVE, 0 otherwise
//   attached[k].data[o] == exposed(o) for o < blocks, kBadSlot beyond
// `generation` and `busy` may be read by any thread; all else only under the manager's lock. Records do not move.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/page/prefix_cache.hpp"
#include "kvpool/sequence/block_table.hpp"
#include "kvpool/sequence/resize_plan.hpp"
#include "kvpool/sequence/token_tail.hpp"
#include "kvpool/storage/layout.hpp"

namespace kvpool {

enum class CacheStatus : std::uint8_t { suspended = 0, active = 1, closed = 2 };

// A buffer of the caller; `keep_alive` holds its memory in place.
struct AttachedBuffer {
    LifeCycleId life_cycle;
    BeamId beam;
    std::span<std::int32_t> entries;
    std::shared_ptr<void> keep_alive;
};

// Blocks of one life cycle that share a few slots instead of having pages. While SUSPENDED the slots are gone, the blocks
// stay without pages.
struct ScratchBlocks {
    BlockTable slots;
    HalfOpenRange blocks;
};

// What an OPTIONAL layer group holds of the matched prefix, at creation; and whether it shares it.
struct OptionalReuse {
    LifeCycleId life_cycle;
    bool complete = true;   // every block that is live at the end of the match is covered as far as it goes
    bool selected = false;  // counts once the cache was resumed
    std::vector<HalfOpenRange> coverage;  // tokens; ascending, neither touching nor overlapping
};

inline constexpr std::int32_t kDefaultPriority = 35;

// All that a decode step reads and writes when it crosses no block and no window.
struct alignas(64) KvCacheHead {
    std::atomic<std::uint32_t> generation{0};  // of the living handle; 0: no cache lives here
    std::atomic<std::uint32_t> busy{0};        // 1 while a thread is inside a call on this cache
    std::uint64_t stamp = 0;                   // number of the last step that named it
    std::int32_t capacity = 0;                 // tokens
    std::int32_t history = 0;                  // tokens
    LengthBox box;
    std::int32_t row = -1;           // of the step table; counts only if table_serial is the present table's
    std::uint64_t table_serial = 0;  // 0: bound to no row
    StreamId stream{0};
    std::int32_t beam_width = 1;
    CacheStatus status = CacheStatus::closed;
    bool has_stream = false;
    bool commit_allowed = true;
    bool scratch_enabled = false;
};

static_assert(sizeof(KvCacheHead) == 64, "a decode step touches one cache line per request");

struct KvCache : KvCacheHead {
    TokenTail tail;                     // committed tokens behind the last full block
    std::int32_t committed = 0;         // tokens
    std::int32_t committed_blocks = 0;  // full ones
    NodeId last_node = kNoNode;
    std::uint32_t last_generation = 0;
    bool was_resumed = false;
    bool text_only = false;
    std::int32_t matched = 0;        // tokens that creation took over
    std::int32_t divergence = 0;     // tokens that the walk at creation found, legal or not
    std::int32_t hybrid = 0;         // tokens that the attention groups alone would have reused
    SlotId state_source = kBadSlot;  // matched: page of the state that the first resume copies
    std::int64_t prompt_length = 0;  // tokens; 0 if unknown
    ReuseScope scope;
    std::vector<BlockTable> tables;      // [life cycle * beam_width + beam]
    std::vector<ScratchBlocks> scratch;  // [life cycle]; empty unless the manager is configured for scratch
    std::list<AttachedBuffer> attached;  // a list: letting go of one can not fail
    std::vector<std::vector<std::int32_t>> priorities;  // [life cycle][block], the last one goes on; empty: default
    std::vector<OptionalReuse> optional;                // by OPTIONAL life cycle, ascending

    [[nodiscard]] Lengths lengths() const noexcept { return {capacity, history}; }
    [[nodiscard]] bool is_active() const noexcept { return status == CacheStatus::active; }
    [[nodiscard]] BlockTable& table(std::size_t life_cycle, std::int32_t beam) noexcept {
        return tables[life_cycle * static_cast<std::size_t>(beam_width) + static_cast<std::size_t>(beam)];
    }
    [[nodiscard]] const BlockTable& table(std::size_t life_cycle, std::int32_t beam) const noexcept {
        return tables[life_cycle * static_cast<std::size_t>(beam_width) + static_cast<std::size_t>(beam)];
    }
    [[nodiscard]] std::int32_t scratch_count(std::size_t life_cycle) const noexcept {
        return scratch.empty() ? 0 : scratch[life_cycle].slots.size();
    }
    [[nodiscard]] HalfOpenRange scratch_range(std::size_t life_cycle) const noexcept {
        return scratch.empty() ? HalfOpenRange{} : scratch[life_cycle].blocks;
    }
    // Whether its pages still are the tree's: between a creation that matched something and the first resume.
    [[nodiscard]] bool is_matched() const noexcept { return !was_resumed && committed > 0; }
    // Priority of the page of a block.
    [[nodiscard]] std::int32_t priority(std::size_t life_cycle, std::int64_t ordinal) const noexcept {
        if (priorities.empty() || priorities[life_cycle].empty()) {
            return kDefaultPriority;
        }
        const std::vector<std::int32_t>& list = priorities[life_cycle];
        return list[std::min(static_cast<std::size_t>(ordinal), list.size() - 1)];
    }
    // Forgets the step table's row; the next step writes the whole row.
    void unbind() noexcept { table_serial = 0; }

    // Makes the record that of a fresh SUSPENDED cache without a prefix.
    void open(std::size_t num_life_cycles, bool scratch_on, std::uint32_t new_generation);
    // Ends the record's life; it owns no slots and no attached buffers by now.
    void end() noexcept;
};

// Fixed properties of a manager that records are read with.
struct SequenceContext {
    const Layout* layout = nullptr;
    const PrefixCache* prefix = nullptr;
    std::optional<std::int64_t> scratch_rewind;  // empty unless configured
    bool commit_min_snapshot = false;
    std::vector<std::size_t> attention;    // life cycles, ascending
    std::vector<std::size_t> close_order;  // attention life cycles: REQUIRED full attention first, then the others
    std::optional<std::size_t> state;      // the SSM life cycle

    SequenceContext(const Layout& layout_of_manager, std::optional<std::int64_t> rewind, bool min_snapshot);

    [[nodiscard]] std::int64_t tokens_per_block() const noexcept { return layout->tokens_per_block; }
    [[nodiscard]] std::size_t num_life_cycles() const noexcept { return layout->life_cycles.size(); }
    [[nodiscard]] bool is_state(std::size_t life_cycle) const noexcept { return state == life_cycle; }
    [[nodiscard]] LengthRules rules(const KvCache& cache) const noexcept {
        return {layout->tokens_per_block, cache.scratch_enabled ? scratch_rewind : std::nullopt};
    }
    // Whether pages that fall behind the window before they are committed stay held.
    [[nodiscard]] bool keeps_stale(const KvCache& cache) const noexcept {
        return cache.commit_allowed && !commit_min_snapshot;
    }
    // First block whose page stays when it falls behind the window.
    [[nodiscard]] std::int64_t first_held(const KvCache& cache) const noexcept {
        return keeps_stale(cache) ? std::int64_t{cache.committed_blocks} : kHuge;
    }
    [[nodiscard]] std::int64_t num_blocks(const KvCache& cache) const noexcept;
    // Lengths around `lengths` that need the very same pages, given the scratch blocks that the cache has.
    [[nodiscard]] LengthBox box_around(const KvCache& cache, Lengths lengths) const noexcept;
    void refresh_box(KvCache& cache) const noexcept { cache.box = box_around(cache, cache.lengths()); }
    // Slots of a pool group that nobody but the cache owns, held and scratch ones included.
    [[nodiscard]] std::int64_t owned_alone(const KvCache& cache, PoolGroupId group) const noexcept;
    // f(life cycle id, slot) for every slot that the cache owns: pages, scratch slots, states and the state it will copy.
    template <class F>
    void for_each_slot(const KvCache& cache, F&& f) const;
    // Scratch slots in use, over all life cycles.
    [[nodiscard]] bool has_scratch(const KvCache& cache) const noexcept;

    // Writes the exposed ids of blocks [begin, end) to out[begin..end); kBadSlot beyond the last block.
    void expose(const KvCache& cache, std::size_t life_cycle, std::int32_t beam, std::int64_t begin, std::int64_t end,
                std::int32_t* out) const noexcept;
    // Brings one attached buffer, or all of a cache, up to date as a whole.
    void refresh(const KvCache& cache, const AttachedBuffer& buffer) const noexcept;
    void refresh_attached(const KvCache& cache) const noexcept;
};

template <class F>
void SequenceContext::for_each_slot(const KvCache& cache, F&& f) const {
    const auto each = [&](LifeCycleId life_cycle, const BlockTable& table) {
        for (std::int64_t i = 0; i < table.size(); ++i) {
            if (table[i] != kBadSlot) {
                f(life_cycle, table[i]);
            }
        }
    };
    for (std::size_t i = 0; i < num_life_cycles(); ++i) {
        const auto id = make_id<LifeCycleId>(i);
        for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
            each(id, cache.table(i, beam));
        }
        if (!cache.scratch.empty()) {
            each(id, cache.scratch[i].slots);
        }
    }
    if (state.has_value() && cache.state_source != kBadSlot) {
        f(make_id<LifeCycleId>(*state), cache.state_source);
    }
}

}  // namespace kvpool
