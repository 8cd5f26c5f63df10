#include "kvpool/storage/tier.hpp"

#include <utility>

namespace kvpool {

Tier::Tier(Device& device, const Layout& layout, std::span<const std::int64_t> slot_counts, std::int64_t grain) {
    groups_.reserve(layout.pool_groups.size());
    for (std::size_t g = 0; g < layout.pool_groups.size(); ++g) {
        const std::int64_t slots = slot_counts[g];
        Group group{SlotAllocator(slots), make_lazy_array<std::uint64_t>(static_cast<std::size_t>(slots)), {}};
        for (const std::int64_t slot_bytes : layout.pool_groups[g].slot_sizes) {
            group.pools.emplace_back(device, slot_bytes, slots, grain);
        }
        groups_.push_back(std::move(group));
    }
}

std::int64_t Tier::mapped_bytes() const {
    std::int64_t sum = 0;
    for (const Group& group : groups_) {
        for (const Pool& pool : group.pools) {
            sum += pool.mapped_bytes();
        }
    }
    return sum;
}

void Tier::append_slot_copy(PoolGroupId g, SlotId dst, SlotId src, std::vector<CopyTask>& tasks) const {
    for (const Pool& pool : at(g).pools) {
        tasks.push_back({pool.slot_address(dst), pool.slot_address(src), pool.slot_bytes()});
    }
}

void Tier::audit() const {
    for (const Group& group : groups_) {
        group.allocator.audit();
    }
}

}  // namespace kvpool
