#include "kvpool/manager/page_table.hpp"

#include <utility>

namespace kvpool {

std::shared_ptr<void> PageTable::adopt(const TableView& view, const std::shared_ptr<void>& memory) {
    if (serial_ == serial_of(view)) {
        return nullptr;
    }
    owners_.assign(static_cast<std::size_t>(view.rows), -1);
    view_ = view;
    ++serial_;
    return std::exchange(memory_, memory);
}

void PageTable::bind(CacheSlab& slab, CacheHandle handle, KvCache& cache, std::int32_t row) noexcept {
    CacheHandle& owner = owners_[static_cast<std::size_t>(row)];
    if (owner != handle) {
        KvCache* former = owner < 0 ? nullptr : slab.find(owner);
        if (former != nullptr && is_bound(*former, row, serial_)) {
            former->unbind();
        }
        owner = handle;
    }
    cache.row = row;
    cache.table_serial = serial_;
}

void PageTable::write_row(const SequenceContext& context, const KvCache& cache, std::vector<DirtyRange>& dirty) const {
    for (std::size_t group = 0; group < context.num_life_cycles(); ++group) {
        write_blocks(context, cache, group, {0, view_.blocks}, dirty);
    }
}

void PageTable::write_blocks(const SequenceContext& context, const KvCache& cache, std::size_t group,
                             HalfOpenRange blocks, std::vector<DirtyRange>& dirty) const {
    if (blocks.empty()) {
        return;
    }
    context.expose(cache, group, 0, blocks.beg, blocks.end, row_of(group, cache.row));
    dirty.push_back({static_cast<std::int32_t>(group), cache.row, static_cast<std::int32_t>(blocks.beg),
                     static_cast<std::int32_t>(blocks.end)});
}

}  // namespace kvpool
