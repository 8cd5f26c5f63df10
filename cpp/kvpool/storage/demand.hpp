// How many slots a batch needs, and how many a pool group must have at least.
//
// All counts are slots, saturating at 2^62.  Vectors are indexed by life cycle or pool group id, as the names say.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "kvpool/core/config.hpp"
#include "kvpool/storage/layout.hpp"

namespace kvpool {

// Slots that `batch` needs at once, per life cycle.  SSM: one per request.  Attention: blocks of the system prompt
// that are live for any request, once; then for each request its live blocks beyond those, of which the scratch
// blocks count at the life cycle's scratch fraction.  `scratch_max_rewind_len` is empty when scratch reuse is off.
[[nodiscard]] std::vector<std::int64_t> batch_demand(const Layout& layout, const Batch& batch,
                                                     std::optional<std::int64_t> scratch_max_rewind_len);

// Least slots a life cycle must have for one request to run at all, per life cycle:
//   SSM 1; window S + floor((W + tpb - 2)/tpb) + 1; full attention the largest of the windows' floors, at least 1.
[[nodiscard]] std::vector<std::int64_t> structural_floors(const Layout& layout);

// Sums a count per life cycle into one per pool group.
[[nodiscard]] std::vector<std::int64_t> sum_by_pool_group(const Layout& layout,
                                                          const std::vector<std::int64_t>& per_life_cycle);

// Least slots per pool group: structural floors, and for each constraint ceil(demand / max_util_for_resume); the
// limit is 1 for groups of SSM life cycles only.
[[nodiscard]] std::vector<std::int64_t> pool_group_floors(const Layout& layout, const ManagerConfig& config);

}  // namespace kvpool
