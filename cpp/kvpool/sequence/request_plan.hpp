// What a change of lengths means for one request as a whole: how many slots come and go in each pool group, and which
// entries of its tables change. Knows nothing of free slots.
//
// Words
//   leaving   pages that the call gives back: newly stale ones that are not held, those of blocks that become scratch or
//             are cut, and surplus scratch slots
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

    // Plan for going from the present lengths to `after`. With the present ones and `resuming` it is what a resume needs:
    // the scratch slots that suspend() gave up and, the first time, the SSM states.
    void make(const SequenceContext& context, const KvCache& cache, Lengths after, bool resuming);

    [[nodiscard]] Lengths after() const noexcept { return after_; }
    [[nodiscard]] std::int64_t blocks_after() const noexcept { return blocks_after_; }
    [[nodiscard]] const LifeCyclePlan& life_cycle(std::size_t i) const noexcept { return parts_[i]; }
    // Whether newly stale pages stay held instead of leaving.
    [[nodiscard]] bool keeps_stale() const noexcept { return keeps_stale_; }
    [[nodiscard]] std::span<const GroupCount> groups() const noexcept { return groups_; }
    // Exposed entries that change by the plan, those beyond the new end included.
    [[nodiscard]] ChangedBlocks changed(std::size_t life_cycle) const noexcept;

private:
    void count_life_cycle(const KvCache& cache, std::size_t i, GroupCount& count);

    std::vector<LifeCyclePlan> parts_;  // by life cycle
    std::vector<HalfOpenRange>
        changed_;                     // by life cycle: hull of changed entries among blocks that exist before and after
    std::vector<bool> is_ssm_;        // by life cycle
    std::vector<GroupCount> groups_;  // by pool group
    Lengths after_;
    std::int64_t blocks_before_ = 0;
    std::int64_t blocks_after_ = 0;
    bool keeps_stale_ = false;
};

}  // namespace kvpool
