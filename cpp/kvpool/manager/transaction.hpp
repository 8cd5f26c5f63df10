// Applies changes to slots, tables and lengths so that a failing device call takes all of them back.
//
// Use: begin(); changes; settle(); commit(). Whoever catches an error between calls roll_back(), which restores slots, ready
// events, tables, lengths and streams, newest change first. Slot ids come back exactly (SlotAllocator's undo promise).
// Device calls are made by rebind(), follow() and settle() alone: one wait per distinct ready event of the slots handed out,
// and at most one event behind all former work of the stream. Slots released and handed out again in one transaction need
// no wait: the stream is the same.
// Memory: the log keeps its capacity, so a steady state allocates nothing. Not thread safe: used under the manager's lock.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/device/device.hpp"
#include "kvpool/sequence/kv_cache.hpp"
#include "kvpool/storage/tier.hpp"

namespace kvpool {

class Transaction {
public:
    Transaction(Device& device, Tier& tier) noexcept : device_(&device), tier_(&tier) {}

    void begin() noexcept;
    // Ends the transaction; the log is forgotten.
    void commit() noexcept;
    // CorruptedError if the state is not the one the log left.
    void roll_back();

    // Takes the slot of entry i out of the table and frees it.
    void release(PoolGroupId group, BlockTable& table, std::int64_t i);
    // Puts the lowest free slot of the group into entry i, which has none. The caller has counted: it must be there.
    SlotId allocate(PoolGroupId group, BlockTable& table, std::int64_t i);
    // Cut entries have no slots.
    void resize(BlockTable& table, std::int64_t size);
    void add_held(BlockTable& table, std::int64_t n);
    void set_scratch(ScratchBlocks& scratch, HalfOpenRange blocks);
    void set_lengths(KvCache& cache, Lengths lengths, const LengthBox& box);
    // Moves the cache to another stream, which from now on runs after all that the old one has queued. A cache without a
    // stream just takes it.
    void rebind(KvCache& cache, StreamId stream);

    // If slots were released, records the event that they are usable after; then makes `stream` wait for the slots handed out.
    void settle(StreamId stream);
    // The other way round, and with an event also if slots were only handed out: it is the moment from which other streams
    // may use them. The event; 0 if no slot was moved.
    EventId settle_with_event(StreamId stream);

private:
    enum class Kind : std::uint8_t { released, allocated, resized, held, scratch, lengths, stream };
    struct Entry {
        Kind kind;
        bool had_stream = false;      // stream
        PoolGroupId group{0};         // released, allocated
        BlockTable* table = nullptr;  // released, allocated, resized, held
        ScratchBlocks* scratch = nullptr;
        KvCache* cache = nullptr;        // lengths, stream
        std::int64_t position = 0;       // entry, former size, number held, former first block, capacity or stream
        std::int64_t value = 0;          // slot, former end block or history
        EventId ready = kCompleteEvent;  // released: the slot's former ready event
        LengthBox box{};                 // lengths
    };

    void undo(const Entry& entry);
    void wait_for_slots(StreamId stream);
    void set_ready_events(EventId event) noexcept;

    Device* device_;
    Tier* tier_;
    std::vector<Entry> log_;
    std::vector<EventId> waits_;  // of slots handed out, with repetitions
    std::int64_t num_released_ = 0;
    std::int64_t num_allocated_ = 0;
};

}  // namespace kvpool
