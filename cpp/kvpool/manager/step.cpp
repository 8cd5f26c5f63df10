#include "kvpool/manager/step.hpp"

#include <algorithm>
#include <limits>
#include <utility>

#include "kvpool/core/errors.hpp"
#include "kvpool/manager/guard.hpp"

namespace kvpool {
namespace {

std::string request(std::size_t i) { return Where{"step", static_cast<std::int64_t>(i)}.text(); }

}  // namespace

void check_step_tokens(std::size_t num_requests, std::span<const Token> values, std::span<const std::int32_t> offsets) {
    if (offsets.size() != num_requests + 1) {
        throw ArgumentError("step(): offsets has " + std::to_string(offsets.size()) + " entries, " +
                            std::to_string(num_requests + 1) + " are needed");
    }
    if (offsets.front() != 0 || static_cast<std::size_t>(offsets.back()) != values.size() ||
        !std::is_sorted(offsets.begin(), offsets.end())) {
        throw ArgumentError("step(): offsets must begin with 0, never decrease and end with " +
                            std::to_string(values.size()));
    }
    const std::size_t negative = find_negative(values);
    if (negative != values.size()) {
        const auto behind = std::upper_bound(offsets.begin(), offsets.end(), static_cast<std::int32_t>(negative));
        throw_bad_token(request(static_cast<std::size_t>(behind - offsets.begin()) - 1) + ": tokens", negative,
                        values[negative]);
    }
}

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
    num_plain_ = 0;
    num_appends_ = 0;
    others_.clear();
    changes_.clear();
    dirty_.clear();
    if (plain_.size() < n) {
        plain_.resize(n);
    }
    if (!input.token_offsets.empty() && appends_.size() < n) {
        appends_.resize(n);
    }
    if (row_stamps_.size() < static_cast<std::size_t>(input.table.rows)) {
        row_stamps_.resize(static_cast<std::size_t>(input.table.rows));
    }
    try {
        if (input.token_offsets.empty()) {
            check_requests<false>(state, input);
        } else {
            check_requests<true>(state, input);
        }
    } catch (const Error&) {
        check_handles(state, input);
        throw;
    }
    ok_.assign(n, 1);
    changes_.reserve(others_.size() * state.context.num_life_cycles());
    dirty_.reserve(2 * others_.size() * state.context.num_life_cycles());
}

inline bool BatchStep::fills_no_block(const ManagerState& state, const KvCache& cache, TokenSpan tokens,
                                      Lengths lengths) noexcept {
    const auto n = static_cast<std::int64_t>(tokens.size());
    return n == 0 || (cache.tail.size() + n < state.layout.tokens_per_block && cache.commit_allowed &&
                      cache.committed + n <= std::min(std::int64_t{cache.capacity}, lengths.history) &&
                      !state.context.commit_min_snapshot);
}

inline void BatchStep::note_append(const ManagerState& state, KvCache& cache, TokenSpan tokens) {
    if (tokens.empty()) {
        return;
    }
    const auto size = cache.tail.size() + static_cast<std::int64_t>(tokens.size());
    if (!cache.tail.has_room_for(size)) {
        cache.tail.reserve(size, state.layout.tokens_per_block);
    }
    appends_[num_appends_++] = {&cache, tokens};
}

template <bool kWithTokens>
void BatchStep::check_requests(ManagerState& state, const StepInput& input) {
    // Copies, which the compiler can keep in registers: nothing in the loop changes them.
    const StreamId stream = stream_of(state, input);
    const std::uint64_t serial = state.page_table.serial_of(input.table);
    const std::uint64_t number = number_;
    const std::span<const CacheHandle> handles = input.handles;
    const std::int32_t* const rows = input.rows.data();
    const std::int32_t* const capacities = input.capacities.data();
    const std::int32_t* const histories = input.histories.data();
    const std::span<std::uint64_t> row_stamps =
        std::span(row_stamps_).first(static_cast<std::size_t>(input.table.rows));
    Plain* plain = plain_.data();
    for (std::size_t i = 0; i < handles.size(); ++i) {
        KvCache* const found = state.slab.find(handles[i]);
        if (found == nullptr || found->stamp == number || found->busy.load(std::memory_order_relaxed) != 0) {
            check_handles(state, input);
            throw LogicError("the KV cache was in use by another thread");  // no longer, when looked at again
        }
        KvCache& cache = *found;
        cache.stamp = number;
        const std::int32_t row = rows[i];
        const auto place = static_cast<std::size_t>(row);  // a negative one is beyond any table
        if (place >= row_stamps.size() || row_stamps[place] == number) {
            refuse_row(input, i);
        }
        row_stamps[place] = number;
        const std::int32_t capacity = capacities[i];
        const std::int32_t history = histories[i];
        const bool is_plain = capacity > cache.box.capacity_floor && capacity <= cache.box.capacity_limit &&
                              history >= cache.history && history <= cache.box.history_limit && history <= capacity &&
                              PageTable::is_bound(cache, row, serial) && cache.stream == stream && cache.is_active() &&
                              cache.beam_width == 1;
        if constexpr (kWithTokens) {
            const TokenSpan tokens = tokens_of(input, i);
            if (!is_plain || !fills_no_block(state, cache, tokens, {capacity, history})) {
                check_other(state, input, cache, i, {capacity, history});
                continue;
            }
            note_append(state, cache, tokens);
        } else if (!is_plain) {
            check_other(state, input, cache, i, {capacity, history});
            continue;
        }
        *plain++ = {&cache, capacity, history};
    }
    num_plain_ = static_cast<std::size_t>(plain - plain_.data());
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
    const Where where{"step", static_cast<std::int64_t>(i)};
    if (!cache.is_active()) {
        throw LogicError(where.text() + ": the KV cache is not ACTIVE");
    }
    if (cache.beam_width != 1) {
        throw LogicError(where.text() + ": beam_width is " + std::to_string(cache.beam_width) +
                         ", the table has room for 1");
    }
    const TokenSpan tokens = tokens_of(input, i);
    if (!tokens.empty()) {
        check_tokens(state, cache, i, static_cast<std::int64_t>(tokens.size()));
        state.committer.reserve_tail(cache, static_cast<std::int64_t>(tokens.size()));
    }
    state.check_lengths(cache, lengths, where,
                        tokens.empty() ? 0 : cache.committed + static_cast<std::int64_t>(tokens.size()));
    const std::int64_t blocks = div_up(lengths.capacity, state.layout.tokens_per_block);
    if (blocks > input.table.blocks) {
        throw ArgumentError(where.text() + ": capacity " + std::to_string(lengths.capacity) + " needs " +
                            std::to_string(blocks) + " blocks, the table has " + std::to_string(input.table.blocks));
    }
    const bool same_pages = lengths.capacity > cache.box.capacity_floor &&
                            lengths.capacity <= cache.box.capacity_limit &&
                            lengths.history <= cache.box.history_limit && fills_no_block(state, cache, tokens, lengths);
    if (same_pages) {
        note_append(state, cache, tokens);
    }
    if (!same_pages && blocks > state.most_blocks_that_always_fit) {
        state.plan.make(state.context, cache, lengths);
        state.check_ever_fits(where);
    }
    others_.push_back({&cache, i, input.handles[i], input.rows[i], lengths, same_pages, true, 0});
}

void BatchStep::check_tokens(const ManagerState& state, const KvCache& cache, std::size_t i, std::int64_t num_tokens) {
    if (!cache.commit_allowed) {
        throw LogicError(request(i) + ": Cannot commit tokens after stop_committing()");
    }
    state.committer.check_lengths(cache, num_tokens, {"step", static_cast<std::int64_t>(i)});
}

EventId BatchStep::serve(ManagerState& state, const StepInput& input) {
    if (others_.empty()) {
        return kCompleteEvent;
    }
    EventId event = kCompleteEvent;
    state.transact([&] {
        for (Other& other : others_) {
            if (!other.same_pages) {
                serve_one(state, other, tokens_of(input, other.position));
            }
        }
        hand_over(state, stream_of(state, input));
        event = state.transaction.settle_with_event(stream_of(state, input));
    });
    return event;
}

void BatchStep::serve_one(ManagerState& state, Other& other, TokenSpan tokens) {
    const Transaction::Savepoint before = state.transaction.savepoint();
    if (!tokens.empty()) {
        state.committer.apply(*other.cache, tokens, false);
    }
    state.plan.make(state.context, *other.cache, other.lengths);
    other.ok = state.fits_now();
    if (!other.ok) {
        state.transaction.roll_back_to(before);
        return;
    }
    if (!tokens.empty()) {
        state.plan.add_changes_of(state.committer.changes());
    }
    state.apply_plan(*other.cache, state.plan);
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
    for (const Append& append : std::span(appends_).first(
             num_appends_)) {  // first: the caller's tokens may lie in the table that is written below
        append.cache->tail.append(append.tokens);
        append.cache->committed += static_cast<std::int32_t>(append.tokens.size());
    }
    for (const Plain& plain : std::span(plain_).first(num_plain_)) {
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
