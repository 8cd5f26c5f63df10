// The step table: an int32 array of the caller, [layer group][row][block], that the manager writes slot ids into.
//
// Words
//   bound     a cache has a row: row(cache) shows exactly its exposed ids, kBadSlot beyond its last block, in every group
//   serial    number of the table at hand; a cache whose table_serial differs is not bound
// Invariants
//   bound(cache)  =>  owner(cache.row) == handle(cache);  a row has at most one bound cache
//   the table's memory stays in place as long as it is the table at hand (memory)
// SSM groups have rows too, all kBadSlot. Not thread safe: used under the manager's lock.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "kvpool/manager/cache_slab.hpp"
#include "kvpool/sequence/request_plan.hpp"

namespace kvpool {

// Where a table lies and how large it is. Two equal views are the same table.
struct TableView {
    std::int32_t* data = nullptr;
    std::int64_t groups = 0;
    std::int64_t rows = 0;
    std::int64_t blocks = 0;  // most blocks of a row
    friend bool operator==(const TableView&, const TableView&) noexcept = default;
};

// One changed stretch of the table: group, row, first block, end block.
using DirtyRange = std::array<std::int32_t, 4>;

class PageTable {
public:
    [[nodiscard]] std::uint64_t serial() const noexcept { return serial_; }
    // Serial of `view` if it is, or became, the table at hand.
    [[nodiscard]] std::uint64_t serial_of(const TableView& view) const noexcept {
        return view == view_ && serial_ != 0 ? serial_ : serial_ + 1;
    }
    // Makes `view` the table at hand and unbinds every cache, unless it is so already. What kept the former one in place.
    std::shared_ptr<void> adopt(const TableView& view, const std::shared_ptr<void>& memory);

    // Whether the cache's row is `row` of the table with that serial.
    [[nodiscard]] static bool is_bound(const KvCache& cache, std::int32_t row, std::uint64_t serial) noexcept {
        return cache.table_serial == serial && cache.row == row;
    }
    // Gives the row to the cache, away from who had it.
    void bind(CacheSlab& slab, CacheHandle handle, KvCache& cache, std::int32_t row) noexcept;

    // Writes the whole row of the cache in every group.
    void write_row(const SequenceContext& context, const KvCache& cache, std::vector<DirtyRange>& dirty) const;
    // Writes a stretch of the row in one group; an empty one is skipped.
    void write_blocks(const SequenceContext& context, const KvCache& cache, std::size_t group, HalfOpenRange blocks,
                      std::vector<DirtyRange>& dirty) const;

private:
    [[nodiscard]] std::int32_t* row_of(std::size_t group, std::int32_t row) const noexcept {
        return view_.data + (static_cast<std::int64_t>(group) * view_.rows + row) * view_.blocks;
    }

    TableView view_;
    std::shared_ptr<void> memory_;
    std::uint64_t serial_ = 0;         // 0: no table yet
    std::vector<CacheHandle> owners_;  // by row; -1: nobody
};

}  // namespace kvpool
