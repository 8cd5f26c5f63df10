#include "kvpool/storage/live_ranges.hpp"

namespace kvpool {

HalfOpenRange scratch_range(const LifeCycleKey& key, std::int64_t tokens_per_block, std::int64_t history,
                            std::int64_t capacity, std::int64_t max_rewind_len) noexcept {
    if (key.is_ssm || !key.is_windowed()) {
        return {};
    }
    const std::int64_t settled = std::max<std::int64_t>(0, capacity - max_rewind_len);
    const HalfOpenRange fresh{div_up(history, tokens_per_block), div_up(capacity, tokens_per_block)};
    return intersect(stale_range(key, tokens_per_block, settled), fresh);
}

}  // namespace kvpool
