// Hands out slot ids, always the lowest free one, so that the tails of pools stay empty.
//
// Words
//   capacity   ids are 0 .. capacity - 1
//   target     capacity after the pending shrink; == capacity when none is pending
//   active     high-water mark: ids >= active were never handed out
//   recycled   free ids < active that may be handed out again
//   overflow   free ids >= target, waiting for the shrink to finish
// Invariants
//   recycled + overflow + occupied == active <= capacity          (recycled ids < target <= overflow ids)
//   num_free == recycled + max(target - active, 0)
// Undo: release(allocate()) and reoccupy(id) after release(id) bring every later answer back, when done in reverse
// order; only `active` may stay higher.  Ready events of slots are kept beside (Tier).  allocate and release take a
// fixed number of instructions, whatever the capacity.  Not thread safe: used under the manager's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/storage/slot_set.hpp"

namespace kvpool {

class SlotAllocator {
public:
    // ArgumentError unless 0 <= capacity <= 2^31.
    explicit SlotAllocator(std::int64_t capacity);

    // The lowest free id.  OutOfPagesError when there is none.
    [[nodiscard]] SlotId allocate();
    // The n lowest free ids, ascending; all or none.  ArgumentError if n < 0.
    [[nodiscard]] std::vector<SlotId> allocate_many(std::int64_t n);
    // LogicError unless the id is occupied.
    void release(SlotId id);
    // Takes back a release of this very id.  LogicError unless the id was released and not handed out since.
    void reoccupy(SlotId id);
    [[nodiscard]] bool is_occupied(SlotId id) const noexcept;

    [[nodiscard]] std::int64_t capacity() const noexcept { return capacity_; }
    [[nodiscard]] std::int64_t target_capacity() const noexcept { return target_; }
    [[nodiscard]] std::int64_t num_active() const noexcept { return active_; }
    [[nodiscard]] std::int64_t num_occupied() const noexcept { return active_ - recycled_.size() - num_overflow_; }
    [[nodiscard]] std::int64_t num_free() const noexcept {
        return recycled_.size() + (target_ > active_ ? target_ - active_ : 0);
    }
    [[nodiscard]] std::int64_t num_overflow() const noexcept { return num_overflow_; }
    [[nodiscard]] bool shrink_in_progress() const noexcept { return target_ < capacity_; }

    // Grows to `capacity` ids.  LogicError while a shrink is pending; ArgumentError if smaller than now or above
    // 2^31.
    void expand(std::int64_t capacity);
    // From now on ids >= capacity are not handed out.  ArgumentError unless 0 <= capacity <= the present one;
    // LogicError while a shrink is pending.
    void prepare_for_shrink(std::int64_t capacity);
    // Ends the shrink if every id >= target has come back: true, and capacity == target.  Else false, nothing
    // changed.
    // True when none is pending.  The caller has made sure that the overflow slots' events are complete.
    [[nodiscard]] bool finish_shrink();
    // Occupied ids >= target, ascending: what still blocks the shrink.
    [[nodiscard]] std::vector<SlotId> slots_blocking_shrink() const;

    // Every occupied id, ascending.  O(active).
    [[nodiscard]] std::vector<SlotId> occupied_ids() const;
    // CorruptedError when an invariant is broken.  O(capacity).
    void audit() const;

private:
    std::int64_t capacity_;
    std::int64_t target_;
    std::int64_t active_ = 0;
    std::int64_t num_overflow_ = 0;
    SlotSet recycled_;
    LazyArray<std::uint64_t> occupied_;  // one bit an id

    [[nodiscard]] std::uint64_t& occupied_word(SlotId id) noexcept { return occupied_[id.index() >> 6]; }
    [[nodiscard]] static std::uint64_t mask(SlotId id) noexcept { return std::uint64_t{1} << (id.index() & 63); }
    [[nodiscard]] std::vector<SlotId> occupied_from(std::int64_t first) const;
};

}  // namespace kvpool
