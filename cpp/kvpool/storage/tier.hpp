// Level 0: the pools of every pool group, who has which slot, and when a slot may be touched.
//
// Words
//   ready set    of a slot: at most one event per stream: work on the slot that may still run.  A later event of a stream takes
//                the place of its earlier one; event 0 is never stored
//   handed out   in the running call: its stream waits for the whole ready set, which is empty afterwards
//   borrowed     the call starts to use a page beside its owner: its stream waits for the ready set, which stays for others
//   finished     the call has used, and now released or linked, the page: the call's own event joins the ready set
//   note         a remark of the journal that one of the three happened in the running call; settle() goes through them in order
// A stream never waits for its own events.
// Invariant: total = free + used + overflow of pending shrinks, per pool group.  Metadata: under 25 bytes a slot.
// Slots and notes are changed through the journal.  Not thread safe: used under the manager's lock.
#pragma once

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/core/journal.hpp"
#include "kvpool/core/slab.hpp"
#include "kvpool/device/device.hpp"
#include "kvpool/storage/layout.hpp"
#include "kvpool/storage/pool.hpp"
#include "kvpool/storage/slot_allocator.hpp"

namespace kvpool {

class Tier {
public:
    // Maps all pools; `slot_counts` per pool group, as plan_pools() gave them.  Throws what the device throws;
    // nothing stays mapped then.  Device and journal must outlive the tier, which does not move.
    Tier(Device& device, Journal& journal, const Layout& layout, std::span<const std::int64_t> slot_counts,
         std::int64_t grain);
    Tier(const Tier&) = delete;
    Tier& operator=(const Tier&) = delete;

    [[nodiscard]] std::size_t num_pool_groups() const noexcept { return groups_.size(); }
    [[nodiscard]] std::int64_t total(PoolGroupId g) const noexcept { return at(g).allocator.capacity(); }
    [[nodiscard]] std::int64_t free(PoolGroupId g) const noexcept { return at(g).allocator.num_free(); }
    [[nodiscard]] std::int64_t used(PoolGroupId g) const noexcept { return at(g).allocator.num_occupied(); }

    // ---- slots

    // The lowest free slot, handed out to the running call.  OutOfPagesError when there is none.
    [[nodiscard]] SlotId allocate(PoolGroupId g);
    // Takes the slot back; its ready set stays.  LogicError unless it is occupied.
    void free_slot(PoolGroupId g, SlotId slot);

    // ---- who waits for whom

    void finish(PoolGroupId g, SlotId slot) { journal_->remark({kFinished, g, slot}); }
    void borrow(PoolGroupId g, SlotId slot) {
        if (at(g).ready[slot.index()].first.event != 0) {
            journal_->remark({kBorrowed, g, slot});
        }
    }
    // What `stream` has to wait for, ascending and distinct.
    void events_to_wait_for(StreamId stream, std::vector<EventId>& out) const;
    [[nodiscard]] bool has_finished() const noexcept { return has_note(kFinished); }
    [[nodiscard]] bool has_handed_out() const noexcept { return has_note(kHandedOut); }
    // Brings the ready sets up to date when the call's device work is queued, once, as the last change of the call: `event` was
    // recorded on `stream` behind all of it; 0 without one.  A set of more than kManyEvents loses the complete ones of other
    // streams.
    void settle(StreamId stream, EventId event);

    static constexpr std::size_t kManyEvents = 8;
    // The ready set of a slot, in no particular order.
    void append_ready_set(PoolGroupId g, SlotId slot, std::vector<std::pair<StreamId, EventId>>& out) const;

    [[nodiscard]] const SlotAllocator& allocator(PoolGroupId g) const noexcept { return at(g).allocator; }
    [[nodiscard]] std::span<const Pool> pools(PoolGroupId g) const noexcept { return at(g).pools; }
    [[nodiscard]] std::int64_t mapped_bytes() const;

    // Appends the copies of one whole slot: one task per pool.
    void append_slot_copy(PoolGroupId g, SlotId dst, SlotId src, std::vector<CopyTask>& tasks) const;

    // CorruptedError when an invariant is broken.  O(slots).
    void audit() const;

private:
    struct StreamEvent {
        std::int64_t stream;
        std::uint64_t event;  // 0: none
    };
    // The first event lies with the slot; those of other streams are rare and hang on it as a list.
    struct ReadySet {
        StreamEvent first;
        std::int32_t more;  // 0: none; else an index of `more_` plus one
    };
    struct More {
        std::int32_t next;  // as ReadySet::more; the slab's while free
        StreamEvent event;
    };
    struct Group {
        SlotAllocator allocator;
        LazyArray<ReadySet> ready;  // by slot
        std::vector<Pool> pools;
    };
    // Kinds of remarks.
    static constexpr std::int32_t kFinished = 0;
    static constexpr std::int32_t kHandedOut = 1;
    static constexpr std::int32_t kBorrowed = 2;

    [[nodiscard]] Group& at(PoolGroupId g) noexcept { return groups_[g.index()]; }
    [[nodiscard]] const Group& at(PoolGroupId g) const noexcept { return groups_[g.index()]; }

    [[nodiscard]] bool has_note(std::int32_t kind) const noexcept;
    static void undo_allocate(void* group, std::uint64_t slot);
    static void undo_free(void* group, std::uint64_t slot);
    void clear(ReadySet& set);
    void add(ReadySet& set, StreamEvent event);
    void drop_complete(ReadySet& set, std::int64_t except_stream);

    Device* device_;
    Journal* journal_;
    std::vector<Group> groups_;
    Slab<More> more_;
};

}  // namespace kvpool
