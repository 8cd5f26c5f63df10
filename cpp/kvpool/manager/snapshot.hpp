// The whole state of a manager as plain values, for tests and for comparing backends.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/manager/state.hpp"

namespace kvpool {

struct PoolGroupSnapshot {
    std::int64_t total = 0;
    std::int64_t free = 0;
    std::vector<std::int32_t> used;  // slot ids, ascending
    friend bool operator==(const PoolGroupSnapshot&, const PoolGroupSnapshot&) = default;
};

struct CacheSnapshot {
    CacheHandle handle = 0;
    CacheStatus status = CacheStatus::suspended;
    std::int32_t history = 0;
    std::int32_t capacity = 0;
    std::int32_t beam_width = 1;
    bool commit_allowed = true;
    std::vector<std::vector<std::vector<std::int32_t>>> slots;  // [life cycle][beam][block]; no beams for SSM
    std::vector<std::vector<std::int32_t>> ssm;                 // [SSM life cycle][beam]; -1 before the first resume
    std::vector<std::vector<std::int32_t>> scratch;             // [life cycle][slot]
    friend bool operator==(const CacheSnapshot&, const CacheSnapshot&) = default;
};

struct ManagerSnapshot {
    std::vector<PoolGroupSnapshot> pool_groups;
    std::vector<CacheSnapshot> caches;  // ascending handles
    friend bool operator==(const ManagerSnapshot&, const ManagerSnapshot&) = default;
};

// O(slots + blocks). Under the manager's lock.
[[nodiscard]] ManagerSnapshot take_snapshot(const ManagerState& state);

}  // namespace kvpool
