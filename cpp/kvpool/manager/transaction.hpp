// Applies changes to slots, pages, tables and lengths so that a failing device call takes all of them back.
//
// Use: begin(); changes; settle(); commit(). Whoever catches an error between calls roll_back(), which restores everything that
// went through the manager's journal, newest change first. Slot ids come back exactly (SlotAllocator's undo promise).
// Device calls are made by rebind() and settle() alone, in this order: the hand-over from the old stream; one wait per distinct
// ready event of the slots handed out and of others' pages that are used from now on (but for those of the very same stream);
// the copies; at most one event behind all of it, which becomes the ready event of what was released or linked.
// Copies: in the order noted, in as few batches as possible: one begins anew where a slot would be written that the batch reads
// or writes already, or read that it writes.
// Memory: logs keep their capacity, so a steady state allocates nothing. Not thread safe: used under the manager's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/core/journal.hpp"
#include "kvpool/device/device.hpp"
#include "kvpool/page/prefix_cache.hpp"
#include "kvpool/sequence/kv_cache.hpp"
#include "kvpool/storage/tier.hpp"

namespace kvpool {

class Transaction {
public:
    Transaction(Device& device, const Layout& layout, Tier& tier, PrefixCache& prefix, Journal& journal)
        : device_(&device), layout_(&layout), tier_(&tier), prefix_(&prefix), journal_(&journal) {}

    struct Savepoint {
        Journal::Savepoint journal;
        std::size_t num_copies;
    };

    void begin() noexcept;
    // Ends the transaction; the log is forgotten.
    void commit() noexcept;
    // CorruptedError if the state is not the one the log left.
    void roll_back() { roll_back_to({{0}, 0}); }
    [[nodiscard]] Savepoint savepoint() const noexcept { return {journal_->savepoint(), copies_.size()}; }
    // Takes part of the transaction back.
    void roll_back_to(const Savepoint& savepoint);

    // Takes the page of entry i out of the table and lets go of it.
    void release(LifeCycleId life_cycle, BlockTable& table, std::int64_t i);
    // Puts the lowest free slot of the group into entry i, which has none, as a page of this cache alone. The caller has made room.
    SlotId allocate(LifeCycleId life_cycle, BlockTable& table, std::int64_t i, std::int32_t priority);
    // The same without a table: the caller installs the page and releases it.
    SlotId allocate(LifeCycleId life_cycle, std::int32_t priority);
    // Takes a linked page as entry i, which has none, without a use yet: use() says when.
    void adopt(LifeCycleId life_cycle, BlockTable& table, std::int64_t i, SlotId slot, std::int32_t priority);
    // The stream starts to use a page that another one may still write.
    void use(LifeCycleId life_cycle, SlotId slot) { tier_->borrow(group_of(life_cycle), slot); }
    // Puts a slot that the cache owns already into entry i, or takes it out.
    void put(BlockTable& table, std::int64_t i, SlotId slot);
    SlotId take(BlockTable& table, std::int64_t i);
    // Evicts until so many slots are free.
    void make_room(PoolGroupId group, std::int64_t wanted) {
        if (wanted > tier_->free(group)) {
            prefix_->make_room(group, wanted);
        }
    }

    // Cut entries have no slots.
    void resize(BlockTable& table, std::int64_t size);
    void add_held(BlockTable& table, std::int64_t n);
    void set_scratch(ScratchBlocks& scratch, HalfOpenRange blocks);
    void set_lengths(KvCache& cache, Lengths lengths, const LengthBox& box);
    // Moves the cache to another stream, which from now on runs after all that the old one has queued. A cache without a
    // stream just takes it.
    void rebind(KvCache& cache, StreamId stream);
    // The bytes of `source` go to `destination`, in all pools of the group.
    void copy(LifeCycleId life_cycle, SlotId destination, SlotId source) {
        copies_.push_back({group_of(life_cycle), destination, source});
    }

    // Device calls of the transaction; an event if anything was released or linked.
    void settle(StreamId stream);
    // With an event also if slots were only handed out: it is the moment from which other streams may use them. The event; 0
    // if no slot was moved.
    EventId settle_with_event(StreamId stream);
    // Without device calls: for a cache whose pages no stream has ever used.
    void settle_unused();

private:
    struct SlotCopy {
        PoolGroupId group;
        SlotId destination;
        SlotId source;
    };

    [[nodiscard]] PoolGroupId group_of(LifeCycleId life_cycle) const noexcept {
        return layout_->life_cycle(life_cycle).pool_group;
    }
    EventId settle(StreamId stream, bool with_handed_out);
    void make_copies(StreamId stream);
    // Whether the copy can not be made together with copies_[begin, end).
    [[nodiscard]] bool collides(std::size_t begin, std::size_t end) const noexcept;

    Device* device_;
    const Layout* layout_;
    Tier* tier_;
    PrefixCache* prefix_;
    Journal* journal_;
    std::vector<SlotCopy> copies_;
    std::vector<CopyTask> tasks_;
    std::vector<EventId> waits_;
};

}  // namespace kvpool
