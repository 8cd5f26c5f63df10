// Which parts of an arena are committed: the bookkeeping that every device shares.
//
// Invariant: ranges are disjoint, do not touch, are multiples of the granularity and lie inside [0, bytes);
// total() = sum of their lengths.
#pragma once

#include <cstdint>
#include <map>

namespace kvpool {

class CommittedRanges {
public:
    CommittedRanges(std::int64_t bytes, std::int64_t granularity) noexcept : bytes_(bytes), granularity_(granularity) {}

    // ArgumentError unless [offset, offset + length) is a non-empty, aligned part of the arena; LogicError unless
    // all of it is not committed (check_add) or all of it is (check_remove).  They change nothing.
    void check_add(std::int64_t offset, std::int64_t length) const;
    void check_remove(std::int64_t offset, std::int64_t length) const;

    // Check, then change.
    void add(std::int64_t offset, std::int64_t length);
    void remove(std::int64_t offset, std::int64_t length);

    // Whether every byte of [offset, offset + length) is committed; true for length 0 inside a committed range.
    [[nodiscard]] bool contains(std::int64_t offset, std::int64_t length) const noexcept;
    [[nodiscard]] std::int64_t total() const noexcept { return total_; }

private:
    void check_shape(std::int64_t offset, std::int64_t length) const;

    std::int64_t bytes_;
    std::int64_t granularity_;
    std::map<std::int64_t, std::int64_t> ends_;  // begin -> end
    std::int64_t total_ = 0;
};

}  // namespace kvpool
