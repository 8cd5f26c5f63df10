// From a byte quota to slot counts, in integers only: independent of layer order, and equal on ranks with equal
// inputs.
//
// Words: grain g = unit in which pool memory is mapped; cost(n slots) = sum over the group's pools of
// round_up(n * slot bytes, g); need = relative demand of a pool group; floor = slots it must have.
// Promise: sum of costs <= quota and count >= floor, or a ConfigError that lists every floor.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/core/config.hpp"
#include "kvpool/storage/layout.hpp"

namespace kvpool {

// Grain of a quota: 2, 4, 8, 16 or 32 MiB for quotas from 0, 2, 4, 8, 16 GiB, rounded up to the device's granularity.
// ArgumentError unless both are in [1, 2^62].
[[nodiscard]] std::int64_t grain_for_quota(std::int64_t quota, std::int64_t granularity);

// Grains that n slots take: sum over pools of ceil(n * size / g).  Saturates at 2^62.  ArgumentError unless n >= 0,
// every size and g > 0.
[[nodiscard]] std::int64_t grains_for_slots(std::int64_t n, std::span<const std::int64_t> slot_sizes, std::int64_t g);

// {most slots that fit `grains`, grains they take}.  Same errors; at least one pool.
[[nodiscard]] std::pair<std::int64_t, std::int64_t> grains_to_slots(std::int64_t grains,
                                                                    std::span<const std::int64_t> slot_sizes,
                                                                    std::int64_t g);

struct SizingGroup {
    std::vector<std::int64_t> slot_sizes;  // bytes of a slot, per pool; each > 0
    std::int64_t floor = 0;                // >= 0
    std::int64_t need = 1;                 // >= 1
    LifeCycleKey key;                      // breaks ties
    std::string label;                     // for the error message; empty: the key's description
};

// Slot counts, one per group, of the division that
//   1. takes the largest integer m with sum of cost(max(floor, m * need / max need)) <= quota, then
//   2. gives what is left slot by slot to the group with the smallest count / need (ties: larger slot bytes, then the
//      smaller key) of those that can still take one; a group that can not is out for good.
// Takes time logarithmic in the quota.  ArgumentError for values out of range, ConfigError when the floors exceed
// the quota.
[[nodiscard]] std::vector<std::int64_t> solve_slot_counts(std::int64_t quota, std::int64_t grain,
                                                          std::span<const SizingGroup> groups);

// Relative demand per pool group, each >= 1; first that applies: initial_pool_ratio, typical_step, the constraints
// (per life cycle the largest of its demands below the limit and its structural floor), one request of 2049 tokens with
// a history of 2048.  ConfigError for a ratio list that does not match the life cycles.
[[nodiscard]] std::vector<std::int64_t> pool_group_needs(const Layout& layout, const ManagerConfig& config);

// The sizes of all pools of level 0.
struct PoolPlan {
    std::int64_t grain = 0;
    std::vector<std::int64_t> floors;  // per pool group
    std::vector<std::int64_t> counts;  // slots per pool group
};

// The whole way from a configuration to slot counts, index range checked.  `granularity` is the device's.
[[nodiscard]] PoolPlan plan_pools(const Layout& layout, const ManagerConfig& config, std::int64_t granularity);

}  // namespace kvpool
