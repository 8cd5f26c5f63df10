// The native V2 manager: KV caches of one rank over one level of memory, in integers.
//
// Everything that python/kvpool/v2/_backend.py asks of a backend, without Python. A cache is a handle (cache_slab.hpp), a
// layer group a life cycle id, a page a slot id; -1 where there is none.
//
// States of a cache: create -> SUSPENDED -> resume -> ACTIVE -> suspend -> SUSPENDED ...; close from either.
// Lengths, windows, scratch: storage/live_ranges.hpp. Order of slot ids: life cycles ascending; in each scratch slots, then
// pages by block, then beam; what a call releases may be handed out again in that call, lowest id first.
// Tokens are raw (core/tokens.hpp) and read in place; what prefixes are shared within is a scope (reuse/keys.hpp).
//
// Failure: a call that throws has changed nothing, and "not now" is `false`. Errors:
//   LogicError      state does not allow the call; closed or unknown handle; second thread in one cache; forked child; shut down
//   ArgumentError   value out of range          NeverFitsError   more than a pool group has in all
//   OutOfPagesError beams only                  CorruptedError   an invariant is broken; latched for good
//   and what the device throws
// Threads: every method may be called by any thread (guard.hpp); one mutex serialises them, one thread per cache.
// Streams: slots are ordered by events (transaction.hpp); the host never waits but in synchronize().
// Memory: per slot of a pool group under 60 bytes once it was used, per block and attention life cycle of a living cache at most
// 6 bytes; blocks in the tree: reuse/radix_tree.hpp.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvpool/manager/guard.hpp"
#include "kvpool/manager/snapshot.hpp"
#include "kvpool/manager/state.hpp"
#include "kvpool/manager/step.hpp"

namespace kvpool {

struct CacheLengths {
    std::int64_t committed = 0;
    std::int64_t history = 0;
    std::int64_t capacity = 0;
    std::int64_t num_blocks = 0;
};

struct ScratchDescription {
    HalfOpenRange blocks;
    std::vector<std::int32_t> slots;
};

struct SlotStatistics {
    std::int64_t total = 0;
    std::int64_t free = 0;
    std::int64_t evictable = 0;
};

class Manager {
public:
    // ConfigError when the configuration can not be laid out within its quota or the device name is not legal; what the
    // device throws when memory lacks.
    Manager(const ManagerConfig& config, std::string_view device);
    Manager(const Manager&) = delete;  // a manager is a place: caches and views refer to it
    Manager& operator=(const Manager&) = delete;
    // In a forked child nothing is torn down: the memory is the parent's.
    ~Manager();

    // Constant for life -----------------------------------------------------------------------------------------------------
    [[nodiscard]] const Layout& layout() const;
    [[nodiscard]] const PoolPlan& pool_plan() const;
    [[nodiscard]] std::string device_name() const;
    [[nodiscard]] std::shared_ptr<Device> device() const;

    // Pools -----------------------------------------------------------------------------------------------------------------
    [[nodiscard]] std::vector<std::int64_t> slot_counts();
    [[nodiscard]] std::vector<std::vector<Address>> pool_addresses();
    // The pool itself; its arena keeps the memory alive beyond the manager. ArgumentError for an unknown pool.
    [[nodiscard]] Pool pool(std::int64_t pool_group, std::int64_t pool);
    [[nodiscard]] std::int64_t mapped_bytes();
    [[nodiscard]] std::vector<SlotStatistics> statistics();
    // Longest whole-block sequence, at most the bound, that fits beside batch_size - 1 sequences of one token.
    [[nodiscard]] std::int64_t clamp_max_seq_len(std::int64_t batch_size, std::int64_t token_num_upper_bound);
    void synchronize();
    [[nodiscard]] ManagerSnapshot snapshot();
    void audit();
    [[nodiscard]] std::int64_t num_open();
    // Gives the memory back; living views keep theirs. LogicError while caches are open; idempotent.
    void shutdown();

    // Reuse; ArgumentError for a negative id that is no digest ---------------------------------------------------------------
    // Tokens that a cache created now would take over.
    [[nodiscard]] std::int64_t probe_reuse(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests);
    // Chain key of the query's first block that would not be taken over whole; empty if the query does not fill it.
    [[nodiscard]] std::optional<BlockKey> probe_first_new_block_key(const ReuseScope& scope, TokenSpan ids,
                                                                    std::span<const Digest> digests);
    // Forgets every prefix and planned drop. LogicError while caches are open.
    void clear_reusable_blocks();
    // Carries a planned drop out; false if there is no such plan (any more).
    bool drop_planned(std::int64_t plan);
    [[nodiscard]] PagesOnPath match_pages(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                                          std::int64_t life_cycle, bool partial);
    // Whether nobody owns a page of the tree.
    [[nodiscard]] bool all_tree_pages_droppable();
    // For tests: the last block of the tokens, with cached pages that cover so many tokens, by life cycle; and what its page covers.
    void debug_insert_block(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                            std::span<const std::int64_t> coverage);
    void debug_set_coverage(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                            std::int64_t life_cycle, std::int64_t coverage);

    // Caches ----------------------------------------------------------------------------------------------------------------
    // Takes the longest legal prefix over. `input` is used up.
    [[nodiscard]] CacheHandle create(CreateInput input = {});
    // By life cycle, behind those given before.
    void extend_priorities(CacheHandle handle, const std::vector<std::vector<std::int32_t>>& priorities);
    // Empty stream: the cache's own, else the device's. False: too little room now. `optional_groups`: which OPTIONAL groups share
    // what was matched; empty: every complete one; chosen by the first resume.
    [[nodiscard]] bool resume(CacheHandle handle, std::optional<StreamId> stream,
                              const std::optional<std::vector<std::int64_t>>& optional_groups = std::nullopt);
    // The tokens behind those committed so far are final; is_end: no more will follow, and the cache's memory is not written again.
    void commit(CacheHandle handle, TokenSpan ids, std::span<const Digest> digests, bool is_end);
    void suspend(CacheHandle handle);
    void close(CacheHandle handle);
    // Empty: keep this length. False: not enough free slots now.
    [[nodiscard]] bool resize(CacheHandle handle, std::optional<std::int64_t> capacity,
                              std::optional<std::int64_t> history);
    void stop_committing(CacheHandle handle);
    [[nodiscard]] bool commit_allowed(CacheHandle handle);
    [[nodiscard]] std::pair<std::vector<Token>, std::vector<Digest>> committed_tokens(CacheHandle handle);
    // Chain keys of the full committed blocks.
    [[nodiscard]] std::vector<BlockKey> block_keys(CacheHandle handle);
    // At creation: depth of the walk, and tokens that the attention groups alone would have taken over.
    [[nodiscard]] std::pair<std::int64_t, std::int64_t> match_depths(CacheHandle handle);
    [[nodiscard]] std::vector<ReuseStatus> reuse_status(CacheHandle handle);
    // Number of a plan that covers the window tail of what was committed; empty if that is not whole any more.
    [[nodiscard]] std::optional<std::int64_t> plan_drop(CacheHandle handle);
    // Whether the tree names the page of a block; empty without a page.
    [[nodiscard]] std::optional<bool> page_is_linked(CacheHandle handle, std::int64_t ordinal, std::int64_t life_cycle);
    [[nodiscard]] CacheLengths lengths(CacheHandle handle);
    // A stale handle is closed.
    [[nodiscard]] CacheStatus status(CacheHandle handle);
    [[nodiscard]] std::optional<StreamId> stream(CacheHandle handle);
    void set_stream(CacheHandle handle, StreamId stream);
    [[nodiscard]] std::int64_t beam_width(CacheHandle handle);
    void set_beam_width(CacheHandle handle, std::int64_t width);
    [[nodiscard]] bool scratch_enabled(CacheHandle handle);
    void set_scratch_enabled(CacheHandle handle, bool value);
    // Nothing if there are no scratch slots.
    [[nodiscard]] std::optional<ScratchDescription> scratch_desc(CacheHandle handle, std::int64_t life_cycle);
    // Exposed slot ids, or those of every page the cache owns; one per block.
    [[nodiscard]] std::vector<std::int32_t> page_indices(CacheHandle handle, std::int64_t life_cycle,
                                                         std::int64_t beam);
    [[nodiscard]] std::vector<std::int32_t> held_page_indices(CacheHandle handle, std::int64_t life_cycle,
                                                              std::int64_t beam);
    // What keeps an attached buffer's memory in place; nullptr if none is attached.
    [[nodiscard]] std::shared_ptr<void> attached_buffer(CacheHandle handle, std::int64_t life_cycle, std::int64_t beam);
    // keep_alive == nullptr detaches. ArgumentError if it is shorter than the blocks of the cache.
    void attach_buffer(CacheHandle handle, std::int64_t beam, std::int64_t life_cycle, std::span<std::int32_t> entries,
                       std::shared_ptr<void> keep_alive);
    [[nodiscard]] SlotId ssm_slot(CacheHandle handle, std::int64_t life_cycle, std::int64_t beam);

    // See step.hpp.
    StepOutput step(const StepInput& input);

    // For tests: holds the lock while f runs.
    template <class F>
    void with_lock(F&& f) {
        guard_.check_process();
        const ManagerLock lock(guard_);
        f();
    }

private:
    // What a call let go of: destroyed after the lock.
    struct Leftovers {
        std::list<AttachedBuffer> buffers;
        std::shared_ptr<void> table;
    };

    // The lock for a step: while it has to be waited for, the busy flags of the batch's caches are taken.
    void lock_for_step(std::optional<ManagerLock>& lock, std::span<const CacheHandle> handles);
    void collect(Leftovers& leftovers) noexcept;
    // Lock held.
    [[nodiscard]] ManagerState& open_state(const char* call);
    template <class F>
    decltype(auto) locked(const char* call, F&& f);
    template <class F>
    decltype(auto) inside(const char* call, CacheHandle handle, F&& f);
    [[noreturn]] static void throw_stale(const char* call, CacheHandle handle);

    ManagerGuard guard_;
    std::unique_ptr<ManagerState> state_;
    BatchStep batch_step_;
    bool shut_down_ = false;
};

}  // namespace kvpool
