// The whole state of a manager as plain values, for tests and for comparing backends.
#pragma once

#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "kvpool/manager/state.hpp"

namespace kvpool {

struct PoolGroupSnapshot {
    std::int64_t total = 0;
    std::int64_t free = 0;
    std::vector<std::int32_t> used;  // slot ids, ascending
    friend bool operator==(const PoolGroupSnapshot&, const PoolGroupSnapshot&) = default;
};

// Tokens as values: an id, or a digest.
using TokenValue = std::variant<Token, Digest>;

struct CacheSnapshot {
    CacheHandle handle = 0;
    CacheStatus status = CacheStatus::suspended;
    std::int32_t committed = 0;
    std::int32_t history = 0;
    std::int32_t capacity = 0;
    std::int32_t beam_width = 1;
    bool commit_allowed = true;
    ReuseScope scope;
    std::vector<TokenValue> tail;  // committed, behind the last full block
    std::int32_t divergence = 0;
    std::int32_t hybrid = 0;
    std::vector<std::vector<std::vector<std::int32_t>>> slots;  // [life cycle][beam][block]; no beams for SSM
    std::vector<std::vector<std::int32_t>> ssm;                 // [SSM life cycle][beam]; -1 before the first resume
    std::vector<std::int32_t> ssm_source;            // [SSM life cycle]: matched, until the first resume; -1 without
    std::vector<std::vector<std::int32_t>> scratch;  // [life cycle][slot]
    friend bool operator==(const CacheSnapshot&, const CacheSnapshot&) = default;
};

struct NodeSnapshot {
    struct Page {
        std::int32_t slot = 0;
        std::int64_t coverage = 0;
        std::int32_t refs = 0;
        std::int32_t priority = 0;
        std::int32_t plans = 0;
        friend bool operator==(const Page&, const Page&) = default;
    };
    ReuseScope scope;
    std::int64_t ordinal = -1;  // of a root
    std::vector<TokenValue> tokens;
    std::uint32_t marks = 0;
    std::vector<std::optional<Page>> pages;  // by life cycle
    std::vector<std::int32_t> tails;         // by life cycle
    friend bool operator==(const NodeSnapshot&, const NodeSnapshot&) = default;
};

struct QueuedSnapshot {
    std::int32_t priority = 0;
    std::int32_t victim_class = 0;
    std::int32_t slot = 0;
    friend bool operator==(const QueuedSnapshot&, const QueuedSnapshot&) = default;
};

struct ManagerSnapshot {
    std::vector<PoolGroupSnapshot> pool_groups;
    std::vector<CacheSnapshot> caches;                // ascending handles
    std::vector<NodeSnapshot> tree;                   // depth first, children in token order, scopes ascending
    std::vector<std::vector<QueuedSnapshot>> queues;  // by pool group, in the order in which pages give way
    friend bool operator==(const ManagerSnapshot&, const ManagerSnapshot&) = default;
};

// O(slots + blocks + nodes). Under the manager's lock.
[[nodiscard]] ManagerSnapshot take_snapshot(const ManagerState& state);

}  // namespace kvpool
