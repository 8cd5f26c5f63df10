// What a change of lengths means for one life cycle of one request: pure arithmetic on lengths, no state.
//
// Words
//   retired       blocks that had a place before the call, fall behind the window by it and give their pages up
//   held          such blocks whose pages stay, because they may still be committed
//   into scratch  blocks that existed before and become scratch by it (their pages go)
//   cut           blocks beyond the new capacity
//   allocate      blocks that need a page of their own after the call and have none before: new ones, and those that were
//                 scratch and are no longer
// Invariants
//   retired < held < into_scratch < cut (as ranges, disjoint);  allocate ascending, disjoint, and disjoint from those four
//   live = blocks - stale - scratch;  live(new) = live(old) - leaving pages + allocate
// Costs a fixed number of instructions. May be used by any thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "kvpool/storage/layout.hpp"
#include "kvpool/storage/live_ranges.hpp"

namespace kvpool {

// Tokens; history <= capacity <= 2^31 - 1.
struct Lengths {
    std::int64_t capacity = 0;
    std::int64_t history = 0;
    friend constexpr bool operator==(const Lengths&, const Lengths&) noexcept = default;
};

// A few ranges in a row, without memory of its own.
class RangeList {
public:
    // An empty range is not stored.
    void append(HalfOpenRange range) noexcept {
        if (!range.empty()) {
            ranges_[count_++] = range;
        }
    }
    // `range` without `first` and `second`, of which `first` does not begin after `second`.
    void append_without(HalfOpenRange range, HalfOpenRange first, HalfOpenRange second) noexcept;
    [[nodiscard]] const HalfOpenRange* begin() const noexcept { return ranges_.data(); }
    [[nodiscard]] const HalfOpenRange* end() const noexcept { return ranges_.data() + count_; }
    // Sum of the sizes.
    [[nodiscard]] std::int64_t total() const noexcept;

private:
    std::array<HalfOpenRange, 6> ranges_;
    std::size_t count_ = 0;
};

// How lengths become ranges in this manager, and for this request.
struct LengthRules {
    std::int64_t tokens_per_block = 1;
    std::optional<std::int64_t> scratch_rewind;  // empty: no scratch
};

struct LifeCyclePlan {
    HalfOpenRange retired;
    HalfOpenRange held;
    HalfOpenRange into_scratch;
    HalfOpenRange cut;
    RangeList allocate;
    HalfOpenRange scratch;           // blocks, after the call
    std::int64_t scratch_slots = 0;  // after the call
};

// Scratch blocks of a request of these lengths; they take ceil(blocks * scratch_fraction) slots.
[[nodiscard]] HalfOpenRange scratch_blocks(const LifeCycle& life_cycle, const LengthRules& rules,
                                           Lengths lengths) noexcept;

// What a request has before the call.
struct LengthState {
    Lengths lengths{};
    HalfOpenRange
        scratch{};  // blocks that have no page of their own because they were scratch when the lengths were last set
    std::int64_t first_held = kHuge;  // first block whose page stays when it falls behind the window
};

// The plan of an attention life cycle; that of an SSM life cycle is empty.
[[nodiscard]] LifeCyclePlan plan_life_cycle(const LifeCycle& life_cycle, const LengthRules& rules,
                                            const LengthState& before, Lengths after) noexcept;

// The plan for a history that commits have moved. It takes no slots: blocks that were scratch have nothing that could be
// committed, so those of them that the window still sees stay scratch until the lengths are set anew.
[[nodiscard]] LifeCyclePlan plan_history(const LifeCycle& life_cycle, const LengthRules& rules,
                                         const LengthState& before, std::int64_t history) noexcept;

// Lengths that need the very same pages: history in [the present one, history_limit], capacity in
// (capacity_floor, capacity_limit]. What the hot path of a step compares with.
struct LengthBox {
    std::int32_t capacity_floor = -1;
    std::int32_t capacity_limit = 0;
    std::int32_t history_limit = 0;

    // The box that no lengths are in.
    [[nodiscard]] static constexpr LengthBox nothing() noexcept { return {0, -1, -1}; }
};

// The box around `lengths`; it may be smaller than the largest one, never larger.
[[nodiscard]] LengthBox length_box(const Layout& layout, const LengthRules& rules, Lengths lengths) noexcept;

}  // namespace kvpool
