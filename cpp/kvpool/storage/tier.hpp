// Level 0: the pools of every pool group, who has which slot, and when a slot may be touched.
//
// Ready event of a slot: after a release, the last use by its former owner; 0 = may be touched at once.  Whoever is
// handed a slot makes its stream wait for that event first.  It stays with the slot until the next release sets
// another.
// Invariant: total = free + used + overflow of pending shrinks, per pool group.  Metadata: under 16 bytes a slot.
// Not thread safe: used under the manager's lock.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/device/device.hpp"
#include "kvpool/storage/layout.hpp"
#include "kvpool/storage/pool.hpp"
#include "kvpool/storage/slot_allocator.hpp"

namespace kvpool {

class Tier {
public:
    // Maps all pools; `slot_counts` per pool group, as plan_pools() gave them.  Throws what the device throws;
    // nothing stays mapped then.  The device must outlive the tier.
    Tier(Device& device, const Layout& layout, std::span<const std::int64_t> slot_counts, std::int64_t grain);

    [[nodiscard]] std::size_t num_pool_groups() const noexcept { return groups_.size(); }
    [[nodiscard]] std::int64_t total(PoolGroupId g) const noexcept { return at(g).allocator.capacity(); }
    [[nodiscard]] std::int64_t free(PoolGroupId g) const noexcept { return at(g).allocator.num_free(); }
    [[nodiscard]] std::int64_t used(PoolGroupId g) const noexcept { return at(g).allocator.num_occupied(); }

    // The lowest free slot.  OutOfPagesError when there is none.
    [[nodiscard]] SlotId allocate(PoolGroupId g) { return at(g).allocator.allocate(); }
    // Gives the slot back; it may be touched again after `ready`.  LogicError unless it is occupied.
    void release(PoolGroupId g, SlotId slot, EventId ready) {
        Group& group = at(g);
        group.allocator.release(slot);
        group.ready_events[slot.index()] = ready.value();
    }
    // Undoes the release of this very slot, and its event.
    void reoccupy(PoolGroupId g, SlotId slot, EventId former_ready) {
        Group& group = at(g);
        group.allocator.reoccupy(slot);
        group.ready_events[slot.index()] = former_ready.value();
    }
    [[nodiscard]] EventId ready_event(PoolGroupId g, SlotId slot) const noexcept {
        return EventId(at(g).ready_events[slot.index()]);
    }
    void set_ready_event(PoolGroupId g, SlotId slot, EventId ready) noexcept {
        at(g).ready_events[slot.index()] = ready.value();
    }

    [[nodiscard]] const SlotAllocator& allocator(PoolGroupId g) const noexcept { return at(g).allocator; }
    [[nodiscard]] std::span<const Pool> pools(PoolGroupId g) const noexcept { return at(g).pools; }
    [[nodiscard]] std::int64_t mapped_bytes() const;

    // Appends the copies of one whole slot: one task per pool.
    void append_slot_copy(PoolGroupId g, SlotId dst, SlotId src, std::vector<CopyTask>& tasks) const;

    // CorruptedError when an invariant is broken.  O(slots).
    void audit() const;

private:
    struct Group {
        SlotAllocator allocator;
        LazyArray<std::uint64_t> ready_events;  // EventId values
        std::vector<Pool> pools;
    };

    [[nodiscard]] Group& at(PoolGroupId g) noexcept { return groups_[g.index()]; }
    [[nodiscard]] const Group& at(PoolGroupId g) const noexcept { return groups_[g.index()]; }

    std::vector<Group> groups_;
};

}  // namespace kvpool
