#include "kvpool/manager/step.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "kvpool/core/errors.hpp"
#include "kvpool/manager/guard.hpp"

namespace kvpool {
namespace {

std::string request(std::size_t i) { return ManagerState::Where{"step", static_cast<std::int64_t>(i)}.text(); }

}  // namespace

StepOutput BatchStep::run(ManagerState& state, const StepInput& input) {
    check(state, input);
    const EventId event = serve(state, input);
    state.former_table = state.page_table.adopt(input.table, input.table_memory);
    write(state, stream_of(state, input));
    return {ok_, dirty_, event, std::move(state.former_table)};
}

void BatchStep::check(ManagerState& state, const StepInput& input) {
    const std::size_t n = input.handles.size();
    if (input.table.groups != static_cast<std::int64_t>(state.context.num_life_cycles())) {
        throw ArgumentError("step(): table has " + std::to_string(input.table.groups) +
                            " layer groups, the manager has " + std::to_string(state.context.num_life_cycles()));
    }
    constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
    if (input.table.rows > most || input.table.blocks > most) {
        throw ArgumentError("step(): table has " + std::to_string(input.table.rows) + " rows of " +
                            std::to_string(input.table.blocks) + " blocks; neither may exceed 2147483647");
    }
    ++number_;
    plain_.clear();
    others_.clear();
    changes_.clear();
    dirty_.clear();
    plain_.reserve(n);
    if (row_stamps_.size() < static_cast<std::size_t>(input.table.rows)) {
        row_stamps_.resize(static_cast<std::size_t>(input.table.rows));
    }
    try {
        check_requests(state, input);
    } catch (const Error&) {
        check_handles(state, input);
        throw;
    }
    ok_.assign(n, 1);
    changes_.reserve(others_.size() * state.context.num_life_cycles());
    dirty_.reserve(2 * others_.size() * state.context.num_life_cycles());
}

void BatchStep::check_requests(ManagerState& state, const StepInput& input) {
    const StreamId stream = stream_of(state, input);
    const std::uint64_t serial = state.page_table.serial_of(input.table);
    for (std::size_t i = 0; i < input.handles.size(); ++i) {
        KvCache* const found = state.slab.find(input.handles[i]);
        if (found == nullptr || found->stamp == number_ || found->busy.load(std::memory_order_relaxed) != 0) {
            check_handles(state, input);
            throw LogicError("the KV cache was in use by another thread");  // no longer, when looked at again
        }
        KvCache& cache = *found;
        cache.stamp = number_;
        const std::int32_t row = input.rows[i];
        if (row < 0 || row >= input.table.rows || row_stamps_[static_cast<std::size_t>(row)] == number_) {
            refuse_row(input, i);
        }
        row_stamps_[static_cast<std::size_t>(row)] = number_;
        const std::int32_t capacity = input.capacities[i];
        const std::int32_t history = input.histories[i];
        const bool same_pages = capacity > cache.box.capacity_floor && capacity <= cache.box.capacity_limit &&
                                history >= cache.history && history <= cache.box.history_limit && history <= capacity;
        if (same_pages && PageTable::is_bound(cache, row, serial) && cache.stream == stream && cache.is_active() &&
            cache.beam_width == 1) {
            plain_.push_back({&cache, capacity, history});
        } else {
            check_other(state, input, cache, i, {capacity, history});
        }
    }
}

void BatchStep::check_handles(const ManagerState& state, const StepInput& input) {
    ++number_;
    for (std::size_t i = 0; i < input.handles.size(); ++i) {
        KvCache* const cache = state.slab.find(input.handles[i]);
        if (cache == nullptr) {
            throw LogicError(request(i) + ": " + describe_handle(input.handles[i]) + " is closed or unknown");
        }
        if (cache->stamp == number_) {
            throw ArgumentError(request(i) + ": " + describe_handle(input.handles[i]) + " is given twice");
        }
        cache->stamp = number_;
        if (cache->busy.load(std::memory_order_relaxed) != 0) {
            throw LogicError(request(i) + ": " + describe_handle(input.handles[i]) + " is in use by another thread");
        }
    }
}

void BatchStep::refuse_row(const StepInput& input, std::size_t i) const {
    const std::int32_t row = input.rows[i];
    if (row < 0 || row >= input.table.rows) {
        throw ArgumentError(request(i) + ": rows: " + std::to_string(row) + " is not within 0.." +
                            std::to_string(input.table.rows - 1));
    }
    throw ArgumentError(request(i) + ": rows: " + std::to_string(row) + " is given twice");
}

void BatchStep::check_other(ManagerState& state, const StepInput& input, KvCache& cache, std::size_t i,
                            Lengths lengths) {
    const ManagerState::Where where{"step", static_cast<std::int64_t>(i)};
    if (!cache.is_active()) {
        throw LogicError(where.text() + ": the KV cache is not ACTIVE");
    }
    if (cache.beam_width != 1) {
        throw LogicError(where.text() + ": beam_width is " + std::to_string(cache.beam_width) +
                         ", the table has room for 1");
    }
    state.check_lengths(cache, lengths, where);
    const std::int64_t blocks = div_up(lengths.capacity, state.layout.tokens_per_block);
    if (blocks > input.table.blocks) {
        throw ArgumentError(where.text() + ": capacity " + std::to_string(lengths.capacity) + " needs " +
                            std::to_string(blocks) + " blocks, the table has " + std::to_string(input.table.blocks));
    }
    const bool same_pages = lengths.capacity > cache.box.capacity_floor &&
                            lengths.capacity <= cache.box.capacity_limit && lengths.history <= cache.box.history_limit;
    if (!same_pages && blocks > state.most_blocks_that_always_fit) {
        state.plan.make(state.context, cache, lengths, false);
        state.check_ever_fits(where);
    }
    others_.push_back({&cache, i, input.handles[i], input.rows[i], lengths, same_pages, true, 0});
}

EventId BatchStep::serve(ManagerState& state, const StepInput& input) {
    if (others_.empty()) {
        return kCompleteEvent;
    }
    EventId event = kCompleteEvent;
    state.transact([&] {
        for (Other& other : others_) {
            if (!other.same_pages) {
                serve_one(state, other);
            }
        }
        hand_over(state, stream_of(state, input));
        event = state.transaction.settle_with_event(stream_of(state, input));
    });
    return event;
}

void BatchStep::serve_one(ManagerState& state, Other& other) {
    state.plan.make(state.context, *other.cache, other.lengths, false);
    other.ok = state.fits_now();
    if (!other.ok) {
        return;
    }
    state.apply_plan(*other.cache);
    other.first_change = changes_.size();
    for (std::size_t i = 0; i < state.context.num_life_cycles(); ++i) {
        changes_.push_back(state.plan.changed(i));
    }
}

// The step's stream runs after all that the served requests' streams were given so far: one event per stream.
void BatchStep::hand_over(ManagerState& state, StreamId stream) {
    foreign_.clear();
    for (const Other& other : others_) {
        if (other.ok && other.cache->stream != stream &&
            std::find(foreign_.begin(), foreign_.end(), other.cache->stream) == foreign_.end()) {
            foreign_.push_back(other.cache->stream);
            state.device->wait(stream, state.device->record(other.cache->stream));
        }
    }
}

void BatchStep::write(ManagerState& state, StreamId stream) {
    for (const Plain& plain : plain_) {
        plain.cache->capacity = plain.capacity;
        plain.cache->history = plain.history;
    }
    for (const Other& other : others_) {
        if (other.ok) {
            write_other(state, stream, other);
        } else {
            ok_[other.position] = 0;
        }
    }
}

void BatchStep::write_other(ManagerState& state, StreamId stream, const Other& other) {
    KvCache& cache = *other.cache;
    cache.stream = stream;
    std::span<const ChangedBlocks> changed;
    if (other.same_pages) {
        cache.capacity = static_cast<std::int32_t>(other.lengths.capacity);
        cache.history = static_cast<std::int32_t>(other.lengths.history);
    } else {
        changed = {changes_.data() + other.first_change, state.context.num_life_cycles()};
        state.publish(cache, changed);
    }
    if (!PageTable::is_bound(cache, other.row, state.page_table.serial())) {
        state.page_table.bind(state.slab, other.handle, cache, other.row);
        state.page_table.write_row(state.context, cache, dirty_);
        return;
    }
    for (std::size_t group = 0; group < changed.size(); ++group) {
        state.page_table.write_blocks(state.context, cache, group, changed[group].first, dirty_);
        state.page_table.write_blocks(state.context, cache, group, changed[group].second, dirty_);
    }
}

}  // namespace kvpool
