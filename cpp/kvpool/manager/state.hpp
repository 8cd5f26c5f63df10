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
#include <type_traits>
#include <utility>
#include <vector>

#include "kvpool/core/config.hpp"
#include "kvpool/core/journal.hpp"
#include "kvpool/core/math.hpp"
#include "kvpool/device/device.hpp"
#include "kvpool/manager/cache_slab.hpp"
#include "kvpool/manager/commit.hpp"
#include "kvpool/manager/first_resume.hpp"
#include "kvpool/manager/page_table.hpp"
#include "kvpool/manager/planned_drops.hpp"
#include "kvpool/manager/transaction.hpp"
#include "kvpool/manager/where.hpp"
#include "kvpool/page/prefix_cache.hpp"
#include "kvpool/sequence/kv_cache.hpp"
#include "kvpool/sequence/request_plan.hpp"
#include "kvpool/storage/layout.hpp"
#include "kvpool/storage/sizing.hpp"
#include "kvpool/storage/tier.hpp"

namespace kvpool {

// What a new cache begins with.
struct CreateInput {
    ReuseScope scope;
    std::optional<TokenSpan> ids;  // empty: no look-up
    std::span<const Digest> digests;
    std::int64_t prompt_length = 0;  // tokens; 0 if unknown
    bool text_only = false;
    std::vector<std::vector<std::int32_t>> priorities;  // [life cycle][block]; empty: the default throughout
};

// What one attention layer group holds of the matched prefix, at creation.
struct ReuseStatus {
    LifeCycleId group;
    bool optional = false;
    bool complete = true;
    std::int64_t endpoint = 0;            // tokens matched
    std::vector<HalfOpenRange> coverage;  // tokens
};

// What the walk along a query's blocks meets, whatever is legal: per block the group's page.
struct PagesOnPath {
    struct Page {
        SlotId slot;
        std::int64_t coverage = 0;  // tokens
    };
    std::int64_t tokens = 0;  // matched
    std::vector<std::optional<Page>> pages;
};

struct ManagerState {
    ManagerState(const ManagerConfig& config, std::string_view device_name);

    Layout layout;
    SequenceContext context;
    Decimal max_util_for_resume;
    std::shared_ptr<Device> device;
    PoolPlan pool_plan;
    Journal journal;
    std::unique_ptr<Tier> tier_memory;  // nullptr once shut down: nothing below is used any more then
    Tier& tier;
    std::unique_ptr<PrefixCache> prefix_memory;  // as the tier's
    PrefixCache& prefix;
    CacheSlab slab;
    PageTable page_table;
    PlannedDrops planned_drops;
    Transaction transaction;
    RequestPlan plan;
    Committer committer;
    FirstResume first_resume;
    MatchResult match;
    // A cache of one beam with no more blocks than this fits every pool group when alone: a page per block and life cycle.
    std::int64_t most_blocks_that_always_fit = kHuge;
    std::vector<ChangedBlocks> changed;
    std::int64_t num_active = 0;
    // What a call let go of; destroyed after the lock is given back, for it may run the caller's code.
    std::list<AttachedBuffer> discarded;
    std::shared_ptr<void> former_table;

    [[nodiscard]] PoolGroupId group_of(std::size_t life_cycle) const noexcept {
        return layout.life_cycles[life_cycle].pool_group;
    }

    // Runs f inside a transaction: commits it, or takes everything back, if f answers false or throws; the error passes.
    template <class F>
    bool transact(F&& f) {
        transaction.begin();
        try {
            bool done = true;
            if constexpr (std::is_same_v<decltype(f()), bool>) {
                done = f();
            } else {
                f();
            }
            if (!done) {
                transaction.roll_back();
            }
            transaction.commit();
            return done;
        } catch (const CorruptedError&) {
            throw;  // nothing can be trusted any more; the manager latches
        } catch (...) {
            transaction.roll_back();
            throw;
        }
    }

    // LogicError naming `call` unless the cache is in that state.
    static void require(const KvCache& cache, CacheStatus status, const char* call);

    // resize() -----------------------------------------------------------------------------------------------------------
    // ArgumentError unless 0 <= history, history does not go back nor behind the tokens that will be committed,
    // history <= capacity <= 2^31 - 1, and every attached buffer is long enough.
    void check_lengths(const KvCache& cache, Lengths lengths, Where where, std::int64_t committed = 0) const;
    // NeverFitsError naming the pool group if `plan` wants more than it has slots in all.
    void check_ever_fits(Where where) const;
    // Whether free, evictable and leaving slots are enough for `plan`.
    [[nodiscard]] bool fits_now() const noexcept;
    // Slots, tables and lengths to `to`, inside a transaction; evicts what it needs for that.
    void apply_plan(KvCache& cache, const RequestPlan& to);
    // After the transaction: attached buffers follow, memory that a cut left unused goes back. `changed` by life cycle.
    void publish(KvCache& cache, std::span<const ChangedBlocks> changed) const noexcept;
    // The changes of a plan, by life cycle; valid until the next call of it.
    [[nodiscard]] std::span<const ChangedBlocks> changes_of(const RequestPlan& of);

    // Device calls of a call on one cache, at the end of its transaction: none as long as no stream has used its pages.
    void settle(const KvCache& cache);

    [[nodiscard]] HalfOpenRange stale_blocks(const KvCache& cache, std::size_t life_cycle) const noexcept {
        return stale_range(layout.life_cycles[life_cycle].key, layout.tokens_per_block, cache.history);
    }
    // Gives entries [begin, end) that have slots back, in one table.
    void release_pages(std::size_t life_cycle, BlockTable& table, HalfOpenRange blocks);
    // Releases scratch slots from the end until `keep` are left.
    void release_scratch(KvCache& cache, std::size_t life_cycle, std::int64_t keep);
    // Lets go of attached buffers of beams >= first_beam and leaves them full of kBadSlot.
    void detach(KvCache& cache, std::int32_t first_beam) noexcept;

    // The calls themselves; manager.hpp says what they mean ---------------------------------------------------------------
    CacheHandle create(CreateInput& input);
    bool resize(KvCache& cache, std::optional<std::int64_t> capacity, std::optional<std::int64_t> history);
    bool resume(KvCache& cache, std::optional<StreamId> stream,
                const std::optional<std::vector<std::int64_t>>& optional_groups);
    void suspend(KvCache& cache);
    void close(CacheHandle handle, KvCache& cache);
    void set_stream(KvCache& cache, StreamId stream);
    void set_beam_width(KvCache& cache, std::int64_t width);
    void set_scratch_enabled(KvCache& cache, bool value);
    void attach_buffer(KvCache& cache, AttachedBuffer buffer);
    void detach_buffer(KvCache& cache, LifeCycleId life_cycle, BeamId beam) noexcept;
    [[nodiscard]] std::int64_t probe_reuse(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests);
    [[nodiscard]] std::optional<BlockKey> probe_first_new_block_key(const ReuseScope& scope, TokenSpan ids,
                                                                    std::span<const Digest> digests);
    void clear_reusable_blocks();
    [[nodiscard]] std::optional<std::int64_t> plan_drop(const KvCache& cache);
    bool drop_planned(std::int64_t plan_id);
    [[nodiscard]] std::vector<ReuseStatus> reuse_status(const KvCache& cache) const;
    [[nodiscard]] std::vector<BlockKey> block_keys(const KvCache& cache);
    // Raw ids, and digests numbered by first use.
    [[nodiscard]] std::pair<std::vector<Token>, std::vector<Digest>> committed_tokens(const KvCache& cache) const;
    [[nodiscard]] PagesOnPath match_pages(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                                          std::int64_t life_cycle, bool partial);
    void debug_insert_block(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                            std::span<const std::int64_t> coverage);
    void debug_set_coverage(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                            std::int64_t life_cycle, std::int64_t coverage);

    // O(n): CorruptedError when an invariant of the records or the tier is broken.
    void audit() const;
    [[nodiscard]] std::int64_t clamp_max_seq_len(std::int64_t batch_size, std::int64_t token_num_upper_bound) const;

    // UnknownBufferError unless the life cycle exists, ArgumentError unless the beam does.
    void check_place(const KvCache& cache, std::int64_t life_cycle, std::int64_t beam) const;
    void check_life_cycle(std::int64_t life_cycle) const;
    // Page of a block in beam 0, or the state at any block; kBadSlot without.
    [[nodiscard]] SlotId page_of(const KvCache& cache, std::size_t life_cycle, std::int64_t ordinal) const noexcept;
    // "pool group 1 (window 128)": for messages.
    [[nodiscard]] std::string describe_group(std::size_t group) const;

private:
    [[nodiscard]] bool gate_is_open(const KvCache& cache) const noexcept;
    [[nodiscard]] std::int64_t tokens_per_block() const noexcept { return layout.tokens_per_block; }

    // create()
    void take_over_match(KvCache& cache, const MatchResult& found);
    void adopt_pages(KvCache& cache, const MatchResult& found, std::size_t life_cycle);
    [[nodiscard]] OptionalReuse coverage_of(const MatchResult& found, std::size_t life_cycle) const;

    // close()
    // The node that the committed tokens end in; kNoNode without any.
    [[nodiscard]] NodeId end_node(const KvCache& cache) const noexcept;
    void mark_end(KvCache& cache, NodeId end);
    void release_everything(KvCache& cache, NodeId end);

    // Encoded committed tokens of a cache.
    [[nodiscard]] std::vector<Token> encoded_tokens(const KvCache& cache) const;
    // The pages that a plan to drop the window tail covers, after a match of all of it; false if it is not whole any more.
    [[nodiscard]] bool collect_planned_pages(const KvCache& cache,
                                             std::vector<std::pair<NodeId, LifeCycleId>>& wanted) const;
    // The node before the last block of the tokens, whose other blocks are full; kNoNode if it is not in the tree.
    [[nodiscard]] NodeId find_parent(const ReuseScope& scope, TokenSpan encoded) const noexcept;
    [[nodiscard]] TokenSpan last_block(TokenSpan encoded) const noexcept;

    // Blocks of which a further beam gets pages of its own, as far as beam 0 has them; empty for SSM.
    [[nodiscard]] HalfOpenRange own_blocks(const KvCache& cache, std::size_t life_cycle) const noexcept;
    // Slots per pool group that so many beams take besides; NeverFitsError or OutOfPagesError if they can not be had.
    [[nodiscard]] std::vector<std::int64_t> room_for_beams(const KvCache& cache, std::int64_t width) const;
    void grow_beams(KvCache& cache, std::int32_t width);
    void shrink_beams(KvCache& cache, std::int32_t width);
};

}  // namespace kvpool
