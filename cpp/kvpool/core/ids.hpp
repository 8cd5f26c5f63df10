// Strong index types: one type per kind of id, so that a slot id can not be passed where a block ordinal is meant.
//
// A StrongId is a bare integer in memory (same size, trivially copyable) that is built explicitly and compared only
// with its own kind.  `value()` gives the number, `index()` the position in an array.  There is no arithmetic on
// purpose: whoever computes with ids says so with `value()`.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>

namespace kvpool {

template <class Tag, class Rep>
class StrongId {
public:
    using rep = Rep;

    constexpr StrongId() noexcept = default;
    explicit constexpr StrongId(Rep value) noexcept : value_(value) {}

    [[nodiscard]] constexpr Rep value() const noexcept { return value_; }
    // The id as an array position; only for ids that are not negative.
    [[nodiscard]] constexpr std::size_t index() const noexcept { return static_cast<std::size_t>(value_); }

    friend constexpr bool operator==(StrongId, StrongId) noexcept = default;
    friend constexpr auto operator<=>(StrongId, StrongId) noexcept = default;

private:
    Rep value_{};
};

// The id at position `i` of an array indexed by that id.
template <class Id>
[[nodiscard]] constexpr Id make_id(std::size_t i) noexcept {
    return Id(static_cast<typename Id::rep>(i));
}

// A place for a page inside a pool group; the same index in every pool of the group.  kBadSlot where there is none.
using SlotId = StrongId<struct SlotIdTag, std::int32_t>;
// A rule for which blocks of a sequence stay live; equals the layer group id of the public API.
using LifeCycleId = StrongId<struct LifeCycleIdTag, std::int32_t>;
// Pools that share slot ids.
using PoolGroupId = StrongId<struct PoolGroupIdTag, std::int32_t>;
// A pool inside its pool group.
using PoolId = StrongId<struct PoolIdTag, std::int32_t>;
// The caller's name of a layer (any integer, not an index).
using LayerId = StrongId<struct LayerIdTag, std::int64_t>;
// Position of a block inside a sequence.
using BlockOrdinal = StrongId<struct BlockOrdinalTag, std::int32_t>;
using BeamId = StrongId<struct BeamIdTag, std::int32_t>;
// A node of the radix tree.  kNoNode where there is none.
using NodeId = StrongId<struct NodeIdTag, std::int32_t>;
// A device queue.  0 is the device's own stream.
using StreamId = StrongId<struct StreamIdTag, std::int64_t>;
// A point in a stream.  0 is complete from the start.
using EventId = StrongId<struct EventIdTag, std::uint64_t>;

inline constexpr SlotId kBadSlot{-1};
inline constexpr NodeId kNoNode{-1};
inline constexpr EventId kCompleteEvent{0};
inline constexpr StreamId kOwnStream{0};

}  // namespace kvpool

template <class Tag, class Rep>
struct std::hash<kvpool::StrongId<Tag, Rep>> {
    std::size_t operator()(kvpool::StrongId<Tag, Rep> id) const noexcept { return std::hash<Rep>{}(id.value()); }
};
