#include "kvpool/manager/transaction.hpp"

#include <algorithm>

#include "kvpool/core/errors.hpp"

namespace kvpool {
namespace {

// Table changes in the journal: entry and slot in one number.
std::uint64_t pack(std::int64_t entry, SlotId slot) noexcept {
    return static_cast<std::uint64_t>(entry) << 32 | static_cast<std::uint32_t>(slot.value());
}

BlockTable& table_at(void* target) noexcept { return *static_cast<BlockTable*>(target); }

void undo_take(void* target, std::uint64_t packed) {
    table_at(target).put(static_cast<std::int64_t>(packed >> 32), SlotId(static_cast<std::int32_t>(packed)));
}
void undo_put(void* target, std::uint64_t entry) { table_at(target).take(static_cast<std::int64_t>(entry)); }
void undo_resize(void* target, std::uint64_t size) { table_at(target).resize(static_cast<std::int32_t>(size)); }
// Lengths and boxes: two int32 in one number.
std::uint64_t pair_up(std::int32_t first, std::int32_t second) noexcept {
    return std::uint64_t{static_cast<std::uint32_t>(first)} << 32 | static_cast<std::uint32_t>(second);
}
std::int32_t first_of(std::uint64_t pair) noexcept { return static_cast<std::int32_t>(pair >> 32); }
std::int32_t second_of(std::uint64_t pair) noexcept { return static_cast<std::int32_t>(pair); }

void undo_lengths(void* target, std::uint64_t old) {
    auto& cache = *static_cast<KvCache*>(target);
    cache.capacity = first_of(old);
    cache.history = second_of(old);
}
void undo_box_capacity(void* target, std::uint64_t old) {
    auto& box = *static_cast<LengthBox*>(target);
    box.capacity_floor = first_of(old);
    box.capacity_limit = second_of(old);
}
void undo_held(void* target, std::uint64_t n) { table_at(target).add_held(-static_cast<std::int32_t>(n)); }

}  // namespace

void Transaction::begin() noexcept {
    journal_->begin();
    copies_.clear();
}

void Transaction::commit() noexcept { journal_->commit(); }

void Transaction::roll_back_to(const Savepoint& savepoint) {
    try {
        journal_->roll_back_to(savepoint.journal);
    } catch (const Error& error) {
        throw CorruptedError(error.what());  // something was not where the log had put it
    }
    copies_.resize(savepoint.num_copies);
}

SlotId Transaction::take(BlockTable& table, std::int64_t i) {
    journal_->note(&undo_take, &table, pack(i, table[i]));
    return table.take(i);
}

void Transaction::put(BlockTable& table, std::int64_t i, SlotId slot) {
    journal_->note(&undo_put, &table, static_cast<std::uint64_t>(i));
    table.put(i, slot);
}

void Transaction::release(LifeCycleId life_cycle, BlockTable& table, std::int64_t i) {
    try {
        prefix_->release(life_cycle, take(table, i));
    } catch (const LogicError& error) {
        throw CorruptedError(error.what());  // the table named a slot that it does not own
    }
}

SlotId Transaction::allocate(LifeCycleId life_cycle, std::int32_t priority) {
    try {
        const SlotId slot = tier_->allocate(group_of(life_cycle));
        prefix_->new_page(life_cycle, slot, priority);
        return slot;
    } catch (const OutOfPagesError& error) {
        throw CorruptedError(error.what());  // the plan has counted the free slots
    }
}

SlotId Transaction::allocate(LifeCycleId life_cycle, BlockTable& table, std::int64_t i, std::int32_t priority) {
    const SlotId slot = allocate(life_cycle, priority);
    put(table, i, slot);
    return slot;
}

void Transaction::adopt(LifeCycleId life_cycle, BlockTable& table, std::int64_t i, SlotId slot, std::int32_t priority) {
    prefix_->adopt(life_cycle, slot, priority);
    put(table, i, slot);
}

void Transaction::resize(BlockTable& table, std::int64_t size) {
    if (size != table.size()) {
        journal_->note(&undo_resize, &table, static_cast<std::uint64_t>(table.size()));
        table.resize(static_cast<std::int32_t>(size));  // if it fails, nothing has changed and the undo does nothing
    }
}

void Transaction::add_held(BlockTable& table, std::int64_t n) {
    if (n != 0) {
        journal_->note(&undo_held, &table, static_cast<std::uint64_t>(n));
        table.add_held(static_cast<std::int32_t>(n));
    }
}

void Transaction::set_scratch(ScratchBlocks& scratch, HalfOpenRange blocks) {
    if (scratch.blocks != blocks) {
        journal_->set(scratch.blocks.beg, blocks.beg);
        journal_->set(scratch.blocks.end, blocks.end);
    }
}

void Transaction::set_lengths(KvCache& cache, Lengths lengths, const LengthBox& box) {
    journal_->note(&undo_lengths, &cache, pair_up(cache.capacity, cache.history));
    journal_->note(&undo_box_capacity, &cache.box, pair_up(cache.box.capacity_floor, cache.box.capacity_limit));
    journal_->save(cache.box.history_limit);
    cache.capacity = static_cast<std::int32_t>(lengths.capacity);
    cache.history = static_cast<std::int32_t>(lengths.history);
    cache.box = box;
}

void Transaction::rebind(KvCache& cache, StreamId stream) {
    if (cache.has_stream && cache.stream == stream) {
        return;
    }
    if (cache.has_stream) {
        device_->wait(stream, device_->record(cache.stream));
    }
    journal_->set(cache.stream, stream);
    journal_->set(cache.has_stream, true);
}

bool Transaction::collides(std::size_t begin, std::size_t end) const noexcept {
    const SlotCopy& next = copies_[end];
    return std::any_of(copies_.begin() + static_cast<std::ptrdiff_t>(begin),
                       copies_.begin() + static_cast<std::ptrdiff_t>(end), [&](const SlotCopy& earlier) {
                           return earlier.group == next.group &&
                                  (earlier.destination == next.destination || earlier.source == next.destination ||
                                   earlier.destination == next.source);
                       });
}

void Transaction::make_copies(StreamId stream) {
    std::size_t begin = 0;
    tasks_.clear();
    for (std::size_t i = 0; i < copies_.size(); ++i) {
        if (collides(begin, i)) {
            device_->copy(stream, tasks_);
            tasks_.clear();
            begin = i;
        }
        tier_->append_slot_copy(copies_[i].group, copies_[i].destination, copies_[i].source, tasks_);
    }
    if (!tasks_.empty()) {
        device_->copy(stream, tasks_);
    }
}

EventId Transaction::settle(StreamId stream, bool with_handed_out) {
    waits_.clear();
    tier_->events_to_wait_for(stream, waits_);
    for (const EventId event : waits_) {
        device_->wait(stream, event);
    }
    make_copies(stream);
    const bool has_event = tier_->has_finished() || (with_handed_out && tier_->has_handed_out());
    const EventId event = has_event ? device_->record(stream) : kCompleteEvent;
    tier_->settle(stream, event);
    return event;
}

void Transaction::settle(StreamId stream) { static_cast<void>(settle(stream, false)); }

EventId Transaction::settle_with_event(StreamId stream) { return settle(stream, true); }

void Transaction::settle_unused() { tier_->settle(kOwnStream, kCompleteEvent); }

}  // namespace kvpool
