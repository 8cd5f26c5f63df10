#include "kvpool/reuse/rules.hpp"

#include <algorithm>

#include "kvpool/core/math.hpp"

namespace kvpool {

ReuseRules ReuseRules::make(const Layout& layout, const ManagerConfig& config) {
    constexpr std::size_t kBits = 32;
    constexpr std::int64_t kDefaultWindows = 16;
    ReuseRules rules;
    const std::int64_t tpb = layout.tokens_per_block;
    std::int64_t largest_window = 0;
    rules.tokens_per_block = tpb;
    for (std::size_t i = 0; i < layout.life_cycles.size(); ++i) {
        LifeCycleRule rule{.id = make_id<LifeCycleId>(i), .key = layout.life_cycles[i].key};
        const bool required = !rule.key.is_ssm && !rule.key.optional;
        if (rule.key.is_ssm) {
            rules.ssm = rule.id;
        } else if (rule.key.is_windowed()) {
            rule.need = div_up(rule.key.window - 1, tpb);
            rule.full_like_below = required ? rule.key.sink_blocks : 0;
            if (required && rules.required_windowed.size() < kBits) {
                rule.window_bit = std::uint32_t{1} << rules.required_windowed.size();
            }
            rules.windowed.push_back(rule);
        } else {
            rule.full_like_below = required ? kAllBlocks : 0;
        }
        if (required) {
            rules.required.push_back(rule);
            if (rule.key.is_windowed()) {
                rules.required_windowed.push_back(rule);
                largest_window = std::max(largest_window, rule.key.window);
            }
        }
        rules.life_cycles.push_back(rule);
    }
    rules.longest = config.longest_match;
    rules.partial = config.enable_partial_reuse;
    rules.backoff = config.reuse_match_backoff;
    rules.retain_window_tails = config.retain_window_tails;
    rules.window_tail_slack = config.window_tail_slack;
    if (config.retain_window_tails) {
        const std::int64_t interval =
            config.window_tail_interval.value_or(saturate(Int128{largest_window} * kDefaultWindows));
        rules.window_tail_interval = saturate(round_up(Int128{interval}, Int128{tpb}));
    }
    return rules;
}

bool ReuseRules::is_at_interval(const LifeCycleRule& rule, std::int64_t ordinal) const noexcept {
    if (window_tail_interval == 0) {
        return false;
    }
    const std::int64_t grid = round_up((ordinal + 1) * tokens_per_block, window_tail_interval);
    return ordinal >= stale_range(rule.key, tokens_per_block, grid).end;
}

}  // namespace kvpool
