// Which blocks of a sequence are live, stale or scratch: pure functions of the three lengths.
//
// Words: tpb = tokens per block, H = history, C = capacity, W = window, S = sink blocks, R = rewind (tokens at the
// tail that may be taken back).  At least one query token stands at position H, so a window sees [H + 1 - W, H].
#pragma once

#include <algorithm>
#include <compare>
#include <cstdint>

#include "kvpool/core/math.hpp"

namespace kvpool {

// Block ordinals [beg, end).  All empty ranges are equal.
struct HalfOpenRange {
    std::int64_t beg = 0;
    std::int64_t end = 0;

    [[nodiscard]] constexpr bool empty() const noexcept { return end <= beg; }
    [[nodiscard]] constexpr std::int64_t size() const noexcept { return empty() ? 0 : end - beg; }
    [[nodiscard]] constexpr bool contains(std::int64_t ordinal) const noexcept {
        return beg <= ordinal && ordinal < end;
    }
    friend constexpr bool operator==(const HalfOpenRange& a, const HalfOpenRange& b) noexcept {
        return (a.empty() && b.empty()) || (a.beg == b.beg && a.end == b.end);
    }
};

[[nodiscard]] constexpr HalfOpenRange intersect(HalfOpenRange a, HalfOpenRange b) noexcept {
    return {std::max(a.beg, b.beg), std::min(a.end, b.end)};
}

// What makes two layers share a life cycle.  Also its place in the order that breaks ties: attention before SSM, full
// attention (window -1) before windows, then windows and sink blocks ascending, then those that reuse needs before others.
struct LifeCycleKey {
    static constexpr std::int64_t kFull = -1;

    bool is_ssm = false;
    std::int64_t window = kFull;  // tokens, or kFull; kFull for SSM
    std::int64_t sink_blocks = 0;
    bool optional = false;  // a prefix match does not need its pages

    [[nodiscard]] constexpr bool is_windowed() const noexcept { return window != kFull; }
    friend constexpr auto operator<=>(const LifeCycleKey&, const LifeCycleKey&) noexcept = default;
};

// Ordinals that hold nothing anyone will read once `history` tokens are done:
//   full  empty at min(ceil(H/tpb), S)
//   SWA   [start, max(start, floor((H + 1 - W)/tpb))), start = min(ceil(H/tpb), S)
//   SSM   [0, floor(H/tpb))
[[nodiscard]] constexpr HalfOpenRange stale_range(const LifeCycleKey& key, std::int64_t tokens_per_block,
                                                  std::int64_t history) noexcept {
    if (key.is_ssm) {
        return {0, history / tokens_per_block};
    }
    const std::int64_t start = std::min(div_up(history, tokens_per_block), key.sink_blocks);
    if (!key.is_windowed()) {
        return {start, start};
    }
    const std::int64_t first_seen = history + 1 - key.window;  // may be negative: then nothing is stale yet
    return {start, first_seen > 0 ? std::max(start, first_seen / tokens_per_block) : start};
}

// New blocks that will have left the window once this chunk is history:
//   stale(max(0, C - R)) and [ceil(H/tpb), ceil(C/tpb)); empty unless the life cycle has a window.
[[nodiscard]] HalfOpenRange scratch_range(const LifeCycleKey& key, std::int64_t tokens_per_block, std::int64_t history,
                                          std::int64_t capacity, std::int64_t max_rewind_len) noexcept;

}  // namespace kvpool
