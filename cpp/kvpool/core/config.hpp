// The manager's configuration as plain data.
//
// Mirrors the part of kvpool.v2's KVCacheManagerConfig that decides anything in the core.  The facade has checked
// types and simple ranges before; build_layout() and plan_pools() check what they depend on and raise ConfigError.
// All sizes are bytes, all lengths tokens.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "kvpool/core/ids.hpp"

namespace kvpool {

struct BufferConfig {
    std::string role;
    std::int64_t size = 0;                         // bytes of one page at the buffer's own tokens per block; > 0
    std::optional<std::int64_t> tokens_per_block;  // the buffer's own; divides the manager's; none for state (SSM)
};

struct LayerConfig {
    LayerId layer_id;
    bool is_ssm = false;
    std::optional<std::int64_t> window;  // tokens, > 0; none = full attention; none for SSM
    std::int64_t sink_tokens = 0;        // > 0 only with a window
    bool optional = false;               // reuse_policy OPTIONAL: never shortens a match; false for SSM
    std::vector<BufferConfig> buffers;   // roles unique; some layer of the life cycle has one
};

// One request of a batch: 0 <= history <= capacity.
struct Request {
    std::int64_t capacity = 0;
    std::int64_t history = 0;
};

struct Batch {
    std::vector<Request> requests;
    std::int64_t system_prompt_length = 0;  // tokens shared by all requests
};

struct ManagerConfig {
    std::int64_t tokens_per_block = 0;
    std::int64_t gpu_quota = 0;  // bytes of level 0: a hard cap
    std::vector<LayerConfig> layers;
    std::vector<Batch> constraints;                         // batches that must always be feasible
    std::optional<Batch> typical_step;                      // what the split is made for
    std::optional<std::vector<double>> initial_pool_ratio;  // byte share per life cycle, sum 1
    double max_util_for_resume = 0.97;                      // in (0, 1]
    std::optional<std::int64_t> scratch_max_rewind_len;     // present iff scratch reuse is configured
    bool commit_min_snapshot = false;
    bool merge_equal_pools = true;
    bool enable_partial_reuse = true;
    std::int64_t reuse_match_backoff = 0;              // tokens, >= 0
    bool longest_match = true;                         // match_policy "longest"; else "reference"
    bool retain_window_tails = true;                   // windows behind likely end points are evicted late
    std::int64_t window_tail_slack = 512;              // tokens, >= 0
    std::optional<std::int64_t> window_tail_interval;  // tokens, >= 0; none: from the largest required window
    bool text_only = false;
    bool enable_stats = true;
};

}  // namespace kvpool
