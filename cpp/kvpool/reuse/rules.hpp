// What the configuration says about reuse, in the form in which tree, match and eviction ask for it.  Constant.
//
// Words
//   required     attention life cycles that a prefix needs: reuse_policy REQUIRED
//   full-like    a page that every later block of the sequence needs: of a required life cycle, full attention, or windowed and
//                of a sink block
//   need         blocks right before a block boundary that a window sees from there: ceil((window - 1) / tpb)
#pragma once

#include <cstdint>
#include <limits>
#include <vector>

#include "kvpool/core/config.hpp"
#include "kvpool/core/ids.hpp"
#include "kvpool/storage/layout.hpp"

namespace kvpool {

struct ReuseRules {
    struct LifeCycleRule {
        LifeCycleId id;
        LifeCycleKey key;
        std::int64_t full_like_below = 0;  // pages of blocks of lower ordinals are full-like
        std::int64_t need = 0;             // windowed only
        std::uint32_t window_bit = 0;      // required windowed ones: of Node::whole; 0 beyond the first 32

        [[nodiscard]] bool is_full_like(std::int64_t ordinal) const noexcept { return ordinal < full_like_below; }
        // Of a windowed life cycle: first block behind the sinks that a window still sees at `end`.
        [[nodiscard]] std::int64_t first_in_window(std::int64_t end, std::int64_t tokens_per_block) const noexcept {
            const std::int64_t stale_end = stale_range(key, tokens_per_block, end).end;
            return stale_end > key.sink_blocks ? stale_end : key.sink_blocks;
        }
    };

    static constexpr std::int64_t kAllBlocks = std::numeric_limits<std::int64_t>::max();

    std::int64_t tokens_per_block = 1;
    std::vector<LifeCycleRule> life_cycles;        // by id
    std::vector<LifeCycleRule> required;           // ascending
    std::vector<LifeCycleRule> required_windowed;  // ascending
    std::vector<LifeCycleRule> windowed;           // optional ones too; ascending
    LifeCycleId ssm{-1};                           // the state life cycle
    bool longest = true;                           // else the reference policy
    bool partial = true;                           // a match may end inside a block
    std::int64_t backoff = 0;                      // tokens
    bool retain_window_tails = true;
    std::int64_t window_tail_slack = 0;     // tokens
    std::int64_t window_tail_interval = 0;  // tokens, a multiple of tpb; 0: off

    [[nodiscard]] static ReuseRules make(const Layout& layout, const ManagerConfig& config);

    [[nodiscard]] bool has_ssm() const noexcept { return ssm.value() >= 0; }
    [[nodiscard]] const LifeCycleRule& of(LifeCycleId lc) const noexcept { return life_cycles[lc.index()]; }
    // Whether a window page belongs to the last window before a multiple of the interval.
    [[nodiscard]] bool is_at_interval(const LifeCycleRule& rule, std::int64_t ordinal) const noexcept;
};

}  // namespace kvpool
