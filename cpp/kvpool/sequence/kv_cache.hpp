// The record of one request: lengths, pages, scratch slots, and where its page indices are written.
//
// Words
//   exposed     the slot id that kernels may see for a block: its page's while ACTIVE and not stale, else kBadSlot
//   attached    an int32 buffer of the caller that always shows the exposed ids of one (life cycle, beam)
//   box         lengths that need the very same pages (LengthBox)
// Invariants (committed = 0 until there is reuse)
//   0 <= history <= capacity;  attention tables have div_up(capacity, tpb) entries;  SSM tables at most one: the state slot
//   entry o of beam 0 is kBadSlot iff o is scratch, or stale and not held
//   scratch[lc] has ceil(blocks * scratch_fraction) slots while ACTIVE, 0 otherwise
//   attached[k].data[o] == exposed(o) for o < blocks, kBadSlot beyond
// `generation` and `busy` may be read by any thread; all else only under the manager's lock. Records do not move.
#pragma once

#include <atomic>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/sequence/block_table.hpp"
#include "kvpool/sequence/resize_plan.hpp"
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
    std::uint32_t last_generation = 0;
    bool has_state = false;              // SSM slots were allocated (first resume)
    std::vector<BlockTable> tables;      // [life cycle * beam_width + beam]
    std::vector<ScratchBlocks> scratch;  // [life cycle]; empty unless the manager is configured for scratch
    std::list<AttachedBuffer> attached;  // a list: letting go of one can not fail

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
    // Forgets the step table's row; the next step writes the whole row.
    void unbind() noexcept { table_serial = 0; }

    // Makes the record that of a fresh SUSPENDED cache.
    void open(std::size_t num_life_cycles, bool scratch_on, std::uint32_t new_generation);
    // Ends the record's life; it owns no slots and no attached buffers by now.
    void end() noexcept;
};

// Fixed properties of a manager that records are read with.
struct SequenceContext {
    const Layout* layout = nullptr;
    std::optional<std::int64_t> scratch_rewind;  // empty unless configured
    bool commit_min_snapshot = false;

    [[nodiscard]] std::int64_t tokens_per_block() const noexcept { return layout->tokens_per_block; }
    [[nodiscard]] std::size_t num_life_cycles() const noexcept { return layout->life_cycles.size(); }
    [[nodiscard]] LengthRules rules(const KvCache& cache) const noexcept {
        return {layout->tokens_per_block, cache.scratch_enabled ? scratch_rewind : std::nullopt};
    }
    // Whether pages that fall behind the window stay held.
    [[nodiscard]] bool keeps_stale(const KvCache& cache) const noexcept {
        return cache.commit_allowed && !commit_min_snapshot;
    }
    [[nodiscard]] std::int64_t num_blocks(const KvCache& cache) const noexcept;
    void refresh_box(KvCache& cache) const noexcept;
    // Slots of a pool group that the cache owns, held and scratch ones included.
    [[nodiscard]] std::int64_t owned(const KvCache& cache, PoolGroupId group) const noexcept;
    // Scratch slots in use, over all life cycles.
    [[nodiscard]] bool has_scratch(const KvCache& cache) const noexcept;

    // Writes the exposed ids of blocks [begin, end) to out[begin..end); kBadSlot beyond the last block.
    void expose(const KvCache& cache, std::size_t life_cycle, std::int32_t beam, std::int64_t begin, std::int64_t end,
                std::int32_t* out) const noexcept;
    // Brings one attached buffer, or all of a cache, up to date as a whole.
    void refresh(const KvCache& cache, const AttachedBuffer& buffer) const noexcept;
    void refresh_attached(const KvCache& cache) const noexcept;
};

}  // namespace kvpool
