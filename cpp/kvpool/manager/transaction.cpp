#include "kvpool/manager/transaction.hpp"

#include <algorithm>

#include "kvpool/core/errors.hpp"

namespace kvpool {
namespace {

// Ready event of slots that the transaction at work has released; no device gives this number to an event.
constexpr EventId kThisCall{~std::uint64_t{0}};

}  // namespace

void Transaction::begin() noexcept {
    log_.clear();
    waits_.clear();
    num_released_ = 0;
    num_allocated_ = 0;
}

void Transaction::commit() noexcept { log_.clear(); }

void Transaction::roll_back() {
    try {
        while (!log_.empty()) {
            undo(log_.back());
            log_.pop_back();
        }
    } catch (const Error& error) {
        throw CorruptedError(error.what());  // a slot was not where the log had put it
    }
}

void Transaction::release(PoolGroupId group, BlockTable& table, std::int64_t i) {
    const SlotId slot = table[i];
    log_.push_back({.kind = Kind::released,
                    .group = group,
                    .table = &table,
                    .position = i,
                    .value = slot.value(),
                    .ready = tier_->ready_event(group, slot)});
    try {
        tier_->release(group, slot, kThisCall);
    } catch (const LogicError& error) {
        log_.pop_back();
        throw CorruptedError(error.what());  // the table named a slot that it does not own
    }
    table.take(i);
    ++num_released_;
}

SlotId Transaction::allocate(PoolGroupId group, BlockTable& table, std::int64_t i) {
    log_.push_back({.kind = Kind::allocated, .group = group, .table = &table, .position = i});
    SlotId slot;
    try {
        waits_.push_back(kCompleteEvent);
        slot = tier_->allocate(group);
    } catch (const OutOfPagesError& error) {
        log_.pop_back();
        throw CorruptedError(error.what());  // the plan has counted the free slots
    } catch (...) {
        log_.pop_back();
        throw;
    }
    const EventId ready = tier_->ready_event(group, slot);
    if (ready == kCompleteEvent || ready == kThisCall) {
        waits_.pop_back();
    } else {
        waits_.back() = ready;
    }
    table.put(i, slot);
    ++num_allocated_;
    return slot;
}

void Transaction::resize(BlockTable& table, std::int64_t size) {
    if (size == table.size()) {
        return;
    }
    log_.push_back({.kind = Kind::resized, .table = &table, .position = table.size()});
    try {
        table.resize(static_cast<std::int32_t>(size));
    } catch (...) {
        log_.pop_back();
        throw;
    }
}

void Transaction::add_held(BlockTable& table, std::int64_t n) {
    if (n != 0) {
        log_.push_back({.kind = Kind::held, .table = &table, .position = n});
        table.add_held(static_cast<std::int32_t>(n));
    }
}

void Transaction::set_scratch(ScratchBlocks& scratch, HalfOpenRange blocks) {
    if (scratch.blocks != blocks) {
        log_.push_back(
            {.kind = Kind::scratch, .scratch = &scratch, .position = scratch.blocks.beg, .value = scratch.blocks.end});
        scratch.blocks = blocks;
    }
}

void Transaction::set_lengths(KvCache& cache, Lengths lengths, const LengthBox& box) {
    log_.push_back(
        {.kind = Kind::lengths, .cache = &cache, .position = cache.capacity, .value = cache.history, .box = cache.box});
    cache.capacity = static_cast<std::int32_t>(lengths.capacity);
    cache.history = static_cast<std::int32_t>(lengths.history);
    cache.box = box;
}

void Transaction::rebind(KvCache& cache, StreamId stream) {
    if (cache.has_stream && cache.stream == stream) {
        return;
    }
    log_.push_back(
        {.kind = Kind::stream, .had_stream = cache.has_stream, .cache = &cache, .position = cache.stream.value()});
    try {
        if (cache.has_stream) {
            device_->wait(stream, device_->record(cache.stream));
        }
    } catch (...) {
        log_.pop_back();
        throw;
    }
    cache.stream = stream;
    cache.has_stream = true;
}

void Transaction::wait_for_slots(StreamId stream) {
    std::sort(waits_.begin(), waits_.end());
    waits_.erase(std::unique(waits_.begin(), waits_.end()), waits_.end());
    for (const EventId event : waits_) {
        device_->wait(stream, event);
    }
}

void Transaction::set_ready_events(EventId event) noexcept {
    for (const Entry& entry : log_) {
        if (entry.kind == Kind::released) {
            tier_->set_ready_event(entry.group, SlotId(static_cast<std::int32_t>(entry.value)), event);
        }
    }
}

void Transaction::settle(StreamId stream) {
    const EventId event = num_released_ != 0 ? device_->record(stream) : kCompleteEvent;
    wait_for_slots(stream);
    if (num_released_ != 0) {
        set_ready_events(event);
    }
}

EventId Transaction::settle_with_event(StreamId stream) {
    wait_for_slots(stream);
    if (num_released_ == 0 && num_allocated_ == 0) {
        return kCompleteEvent;
    }
    const EventId event = device_->record(stream);
    set_ready_events(event);
    return event;
}

void Transaction::undo(const Entry& entry) {
    switch (entry.kind) {
        case Kind::released: {
            const SlotId slot(static_cast<std::int32_t>(entry.value));
            tier_->reoccupy(entry.group, slot, entry.ready);
            entry.table->put(entry.position, slot);
            return;
        }
        case Kind::allocated: {
            const SlotId slot = entry.table->take(entry.position);
            tier_->release(entry.group, slot, tier_->ready_event(entry.group, slot));
            return;
        }
        case Kind::resized:
            entry.table->resize(static_cast<std::int32_t>(entry.position));
            return;
        case Kind::held:
            entry.table->add_held(-static_cast<std::int32_t>(entry.position));
            return;
        case Kind::scratch:
            entry.scratch->blocks = {entry.position, entry.value};
            return;
        case Kind::lengths:
            entry.cache->capacity = static_cast<std::int32_t>(entry.position);
            entry.cache->history = static_cast<std::int32_t>(entry.value);
            entry.cache->box = entry.box;
            return;
        case Kind::stream:
            entry.cache->stream = StreamId(entry.position);
            entry.cache->has_stream = entry.had_stream;
            return;
    }
}

}  // namespace kvpool
