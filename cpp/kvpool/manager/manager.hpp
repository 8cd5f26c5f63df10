// The native V2 manager: KV caches of one rank over one level of memory, in integers.
//
// Everything that python/kvpool/v2/_backend.py asks of a backend, without Python. A cache is a handle (cache_slab.hpp), a
// layer group a life cycle id, a page a slot id; -1 where there is none.
//
// States of a cache: create -> SUSPENDED -> resume -> ACTIVE -> suspend -> SUSPENDED ...; close from either.
// Lengths, windows, scratch: storage/live_ranges.hpp. Order of slot ids: life cycles ascending; in each scratch slots, then
// pages by block, then beam; what a call releases may be handed out again in that call, lowest id first.
//
// Failure: a call that throws has changed nothing, and "not now" is `false`. Errors:
//   LogicError      state does not allow the call; closed or unknown handle; second thread in one cache; forked child; shut down
//   ArgumentError   value out of range          NeverFitsError   more than a pool group has in all
//   OutOfPagesError beams only                  CorruptedError   an invariant is broken; latched for good
//   and what the device throws
// Threads: every method may be called by any thread (guard.hpp); one mutex serialises them, one thread per cache.
// Streams: slots are ordered by events (transaction.hpp); the host never waits but in synchronize().
// Memory: per slot of a pool group under 16 bytes, per block and attention life cycle of a living cache at most 6 bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
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

    // Caches ----------------------------------------------------------------------------------------------------------------
    [[nodiscard]] CacheHandle create();
    // Empty stream: the cache's own, else the device's. False: too little room now.
    [[nodiscard]] bool resume(CacheHandle handle, std::optional<StreamId> stream);
    void suspend(CacheHandle handle);
    void close(CacheHandle handle);
    // Empty: keep this length. False: not enough free slots now.
    [[nodiscard]] bool resize(CacheHandle handle, std::optional<std::int64_t> capacity,
                              std::optional<std::int64_t> history);
    void stop_committing(CacheHandle handle);
    [[nodiscard]] bool commit_allowed(CacheHandle handle);
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
