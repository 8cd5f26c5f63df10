// What a change of lengths means for one request as a whole: how many slots come and go in each pool group, and which
// entries of its tables change. Knows nothing of free slots.
//
// Words
//   leaving   slots that are free or can be evicted once the call has given its pages back: newly stale ones that are not held,
//             those of blocks that become scratch or are cut, and surplus scratch slots; not those that others own, too
//   total     slots owned after the call, held ones not counted: what can never be more than the pool group has
// A RequestPlan is made once per manager and filled again for each request; it allocates nothing after the first.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/sequence/kv_cache.hpp"
#include "kvpool/sequence/resize_plan.hpp"

namespace kvpool {

// At most two ranges of blocks, ascending, that neither touch nor overlap.
struct ChangedBlocks {
    HalfOpenRange first;
    HalfOpenRange second;
};

class RequestPlan {
public:
    struct GroupCount {
        std::int64_t leaving = 0;
        std::int64_t wanted = 0;
        std::int64_t total = 0;
    };

    // Plan for going from the present lengths to `after`. With the present ones it is what a later resume needs: the scratch
    // slots that suspend() gave up.
    void make(const SequenceContext& context, const KvCache& cache, Lengths after);
    // Plan for a history that commits have moved (plan_history()); it wants nothing. False: the pages stay as they are, there is
    // nothing to apply but the history.
    bool make_commit(const SequenceContext& context, const KvCache& cache, std::int64_t history);
    // Plan for the first resume: pages of the block that the match ends in, all pages of OPTIONAL groups that share none
    // (`selected` is false for them), states. The pages that are copied do not count as leaving.
    void make_first_resume(const SequenceContext& context, const KvCache& cache);

    // One slot of the group is not wanted after all.
    void forgo_slot(PoolGroupId group) noexcept { --groups_[group.index()].wanted; }

    // Entry `ordinal` changes besides.
    void add_change(std::size_t life_cycle, std::int64_t ordinal) noexcept;
    // The changes of `earlier`, made from an earlier state of the same call, are changes of the call as well.
    void add_changes_of(const RequestPlan& earlier) noexcept;

    [[nodiscard]] Lengths after() const noexcept { return after_; }
    [[nodiscard]] std::int64_t blocks_after() const noexcept { return blocks_after_; }
    [[nodiscard]] const LifeCyclePlan& life_cycle(std::size_t i) const noexcept { return parts_[i]; }
    [[nodiscard]] std::span<const GroupCount> groups() const noexcept { return groups_; }
    // Exposed entries that change by the plan, those beyond the new end included.
    [[nodiscard]] ChangedBlocks changed(std::size_t life_cycle) const noexcept;
    [[nodiscard]] bool changes_nothing() const noexcept;

private:
    void reset(const SequenceContext& context, const KvCache& cache, Lengths after);
    void count_life_cycle(const KvCache& cache, std::size_t i);
    void note_changes(const KvCache& cache, std::size_t i);
    [[nodiscard]] GroupCount& count_of(std::size_t life_cycle) noexcept {
        return groups_[context_->layout->life_cycles[life_cycle].pool_group.index()];
    }

    const SequenceContext* context_ = nullptr;
    std::vector<LifeCyclePlan> parts_;  // by life cycle
    std::vector<HalfOpenRange>
        changed_;                     // by life cycle: hull of changed entries among blocks that exist before and after
    std::vector<GroupCount> groups_;  // by pool group
    Lengths after_;
    std::int64_t blocks_before_ = 0;
    std::int64_t blocks_after_ = 0;
};

}  // namespace kvpool
