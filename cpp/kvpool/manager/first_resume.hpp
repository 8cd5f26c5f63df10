// The first resume of a cache: what is shared stays shared, what will be written becomes the cache's own.
//
// Words
//   source      page that the cache would write to: of the block that the match ends in, and the matched state
//   taken over  a source that leaves the tree and becomes the cache's own instead of being copied
// Order: pages of OPTIONAL groups that share none go; sources that nobody else owns are taken over where a pool group has no room
// otherwise (else a match that fills a pool group could never be resumed); room is made; slots are handed out, life cycles ascending
// (blocks, states); the sources go. They are let go of last, so that no copy reads a slot that the same call hands out.
// Used under the manager's lock; its memory is kept from call to call.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kvpool/sequence/kv_cache.hpp"
#include "kvpool/sequence/request_plan.hpp"

namespace kvpool {

struct ManagerState;

class FirstResume {
public:
    explicit FirstResume(ManagerState& state) noexcept : state_(state) {}

    // Which OPTIONAL groups share what was matched; empty: every complete one. ArgumentError unless they may be chosen: before the
    // first resume complete OPTIONAL groups, afterwards the same ones.
    static void choose_groups(KvCache& cache, const std::optional<std::vector<std::int64_t>>& groups);
    // All of it but the cache's status, as one transaction; false if there is too little room now.
    bool run(KvCache& cache, StreamId stream, RequestPlan& plan);

private:
    // The source of a life cycle; kBadSlot without.
    [[nodiscard]] SlotId source_of(const KvCache& cache, std::size_t life_cycle) const noexcept;
    // Lets sources become the cache's own until the pool groups have room; false if they do not suffice.
    bool take_sources_over(KvCache& cache, RequestPlan& plan);
    void allocate(KvCache& cache, std::size_t life_cycle);
    void allocate_state(KvCache& cache, std::size_t life_cycle);
    void release_sources(KvCache& cache);

    ManagerState& state_;
    std::vector<SlotId> copies_;       // by life cycle: copy of the source of a block; kBadSlot without
    std::vector<bool> is_taken_over_;  // by life cycle
};

}  // namespace kvpool
