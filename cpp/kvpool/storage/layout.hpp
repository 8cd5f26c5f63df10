// From layers and buffers to life cycles, coalesced buffers, pools and pool groups.
//
// Words
//   expansion E      tokens per block / the buffer's own tokens per block
//   expanded size    size * E: what a buffer takes in one block
//   coalesced buffer all buffers of a life cycle with equal expanded size, back to back in a slot: layers in
//                    configuration order, then buffers in the layer's order
//   slot             one block of one life cycle; a coalesced buffer per pool
//   scale s          buffers in the coalesced buffer = sub-pages of a slot in that pool
//   layer util u     how many of them belong to one layer
// Invariants
//   life cycles are numbered by first mention; pool groups by their first life cycle
//   pools of a group are sorted by slot bytes, descending; equal ones stay in order of first mention
//   life cycle in group g  =>  its coalesced sizes == slot_sizes of g
//   offset = k * size for the k-th buffer of a coalesced buffer
//   byte address of sub-page i of a slot = pool base + offset + (slot * s * E + i) * size / E
// A Layout is built once and never changes; it may be read by any thread.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "kvpool/core/config.hpp"
#include "kvpool/core/ids.hpp"
#include "kvpool/storage/live_ranges.hpp"

namespace kvpool {

struct BufferId {
    LayerId layer;
    std::string role;
    friend auto operator<=>(const BufferId&, const BufferId&) = default;
};

struct CoalescedBuffer {
    std::int64_t single_size = 0;  // expanded bytes of one buffer
    std::vector<BufferId> buffers;
    [[nodiscard]] std::int64_t size() const noexcept { return single_size * static_cast<std::int64_t>(buffers.size()); }
};

// num / den in lowest terms.
struct Fraction {
    std::int64_t num = 0;
    std::int64_t den = 1;
    friend constexpr bool operator==(const Fraction&, const Fraction&) noexcept = default;
};

// ceil(n * fraction); n >= 0; saturates at 2^62.
[[nodiscard]] std::int64_t ceil_times(std::int64_t n, const Fraction& fraction) noexcept;

struct LifeCycle {
    LifeCycleKey key;
    std::vector<LayerId> layers;  // configuration order
    PoolGroupId pool_group;
    Fraction scratch_fraction;               // max over layers and pools of u / s: the largest share one layer has
    std::vector<CoalescedBuffer> coalesced;  // the i-th lies in pool i of the pool group
};

// Where one buffer lies inside the slots of its pool.
struct BufferAttr {
    LifeCycleId life_cycle;
    PoolId pool;
    std::int64_t offset = 0;  // bytes inside the slot
    std::int64_t size = 0;    // expanded bytes
    std::int64_t expansion = 1;
    std::int64_t scale = 1;
    std::int64_t layer_util = 1;
};

struct PoolGroup {
    std::vector<LifeCycleId> life_cycles;  // ascending
    std::vector<std::int64_t> slot_sizes;  // bytes of a slot, per pool
    std::int64_t slot_bytes = 0;           // their sum
    bool ssm_only = false;                 // every life cycle is SSM: not subject to the resume gate
    LifeCycleKey key;                      // smallest of its life cycles: breaks ties between groups
};

struct Layout {
    std::int64_t tokens_per_block = 0;
    std::vector<LifeCycle> life_cycles;  // by LifeCycleId
    std::vector<PoolGroup> pool_groups;  // by PoolGroupId
    std::map<BufferId, BufferAttr> buffers;

    [[nodiscard]] const LifeCycle& life_cycle(LifeCycleId id) const { return life_cycles[id.index()]; }
    [[nodiscard]] const PoolGroup& pool_group(PoolGroupId id) const { return pool_groups[id.index()]; }
};

// The layout of a configuration.  Zero layers give an empty layout.  ConfigError: lengths and sizes out of range
// (above 2^62 bytes of slots in all), a layer id or role twice, tokens per block that do not divide, and, if scratch
// reuse is configured, a layer whose scratch blocks would overwrite each other (s mod u != 0).
[[nodiscard]] Layout build_layout(const ManagerConfig& config);

// ConfigError naming layer, role and product unless every page index of every buffer fits int32:
// slots * s * E - 1 <= 2^31 - 1.  `slot_counts` is indexed by pool group.
void check_index_range(const Layout& layout, std::span<const std::int64_t> slot_counts);

// "window 128, 1 sink block", "full attention", "ssm": for messages.
[[nodiscard]] std::string describe(const LifeCycleKey& key);

}  // namespace kvpool
