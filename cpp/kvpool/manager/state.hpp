// Everything a manager owns, and the steps that several of its calls are made of. Used under the manager's lock only.
//
// A mutating call is: check (no change) -> plan -> Transaction -> device calls -> publish (attached buffers, page table).
// Whatever throws before publish leaves the state as it was; publish can not fail.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kvpool/core/config.hpp"
#include "kvpool/core/math.hpp"
#include "kvpool/device/device.hpp"
#include "kvpool/manager/cache_slab.hpp"
#include "kvpool/manager/page_table.hpp"
#include "kvpool/manager/transaction.hpp"
#include "kvpool/sequence/kv_cache.hpp"
#include "kvpool/sequence/request_plan.hpp"
#include "kvpool/storage/layout.hpp"
#include "kvpool/storage/sizing.hpp"
#include "kvpool/storage/tier.hpp"

namespace kvpool {

struct ManagerState {
    ManagerState(const ManagerConfig& config, std::string_view device_name);

    Layout layout;
    SequenceContext context;
    Decimal max_util_for_resume;
    std::shared_ptr<Device> device;
    PoolPlan pool_plan;
    std::unique_ptr<Tier> tier_memory;  // nullptr once shut down: nothing below is used any more then
    Tier& tier;
    CacheSlab slab;
    PageTable page_table;
    Transaction transaction;
    RequestPlan plan;
    // A cache of one beam with no more blocks than this fits every pool group when alone: a page per block and life cycle.
    std::int64_t most_blocks_that_always_fit = kHuge;
    std::vector<ChangedBlocks> changed;
    std::vector<CopyTask> copies;
    std::int64_t num_active = 0;
    // What a call let go of; destroyed after the lock is given back, for it may run the caller's code.
    std::list<AttachedBuffer> discarded;
    std::shared_ptr<void> former_table;

    [[nodiscard]] PoolGroupId group_of(std::size_t life_cycle) const noexcept {
        return layout.life_cycles[life_cycle].pool_group;
    }

    // Runs f inside a transaction: commits it, or takes everything back and lets the error pass.
    template <class F>
    void transact(F&& f) {
        transaction.begin();
        try {
            f();
            transaction.commit();
        } catch (const CorruptedError&) {
            throw;  // nothing can be trusted any more; the manager latches
        } catch (...) {
            transaction.roll_back();
            throw;
        }
    }

    // LogicError naming `call` unless the cache is in that state.
    static void require(const KvCache& cache, CacheStatus status, const char* call);

    // "step(): request 3" or "resize()": for messages; costs nothing until there is one.
    struct Where {
        const char* call;
        std::int64_t position = -1;
        [[nodiscard]] std::string text() const {
            return std::string(call) + "()" + (position < 0 ? "" : ": request " + std::to_string(position));
        }
    };

    // resize() -----------------------------------------------------------------------------------------------------------
    // ArgumentError unless 0 <= history, history does not go back, history <= capacity <= 2^31 - 1, and every attached
    // buffer is long enough.
    void check_lengths(const KvCache& cache, Lengths lengths, Where where) const;
    // NeverFitsError naming the pool group if `plan` wants more than it has slots in all.
    void check_ever_fits(Where where) const;
    // Whether free and leaving slots are enough for `plan`.
    [[nodiscard]] bool fits_now() const noexcept;
    // Slots, tables and lengths to `plan`, inside a transaction.
    void apply_plan(KvCache& cache);
    // After the transaction: attached buffers follow, memory that a cut left unused goes back. `changed` by life cycle.
    void publish(KvCache& cache, std::span<const ChangedBlocks> changed) const noexcept;

    // Gives entries [begin, end) that have slots back, in one table.
    void release_pages(PoolGroupId group, BlockTable& table, HalfOpenRange blocks);
    // Releases scratch slots from the end until `keep` are left.
    void release_scratch(KvCache& cache, std::size_t life_cycle, std::int64_t keep);
    // Lets go of attached buffers of beams >= first_beam and leaves them full of kBadSlot.
    void detach(KvCache& cache, std::int32_t first_beam) noexcept;

    // The calls themselves; manager.hpp says what they mean ---------------------------------------------------------------
    bool resize(KvCache& cache, std::optional<std::int64_t> capacity, std::optional<std::int64_t> history);
    bool resume(KvCache& cache, std::optional<StreamId> stream);
    void suspend(KvCache& cache);
    void close(CacheHandle handle, KvCache& cache);
    void stop_committing(KvCache& cache);
    void set_stream(KvCache& cache, StreamId stream);
    void set_beam_width(KvCache& cache, std::int64_t width);
    void set_scratch_enabled(KvCache& cache, bool value);
    void attach_buffer(KvCache& cache, AttachedBuffer buffer);
    void detach_buffer(KvCache& cache, LifeCycleId life_cycle, BeamId beam) noexcept;

    // O(n): CorruptedError when an invariant of the records or the tier is broken.
    void audit() const;
    [[nodiscard]] std::int64_t clamp_max_seq_len(std::int64_t batch_size, std::int64_t token_num_upper_bound) const;

    // UnknownBufferError unless the life cycle exists, ArgumentError unless the beam does.
    void check_place(const KvCache& cache, std::int64_t life_cycle, std::int64_t beam) const;
    // "pool group 1 (window 128)": for messages.
    [[nodiscard]] std::string describe_group(std::size_t group) const;

private:
    [[nodiscard]] bool gate_is_open(const KvCache& cache) const noexcept;
    // Blocks of which a further beam gets pages of its own, as far as beam 0 has them; empty for SSM.
    [[nodiscard]] HalfOpenRange own_blocks(const KvCache& cache, std::size_t life_cycle) const noexcept;
    // NeverFitsError or OutOfPagesError if the pool groups can not give what so many beams take.
    void check_room_for_beams(const KvCache& cache, std::int64_t width) const;
    void grow_beams(KvCache& cache, std::int32_t width);
    void shrink_beams(KvCache& cache, std::int32_t width);
};

}  // namespace kvpool
