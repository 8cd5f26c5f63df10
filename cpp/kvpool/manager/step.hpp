// One call for a whole batch: the lengths of many requests, and their rows of a page table.
//
// The call has four parts, each a loop over the batch or over those of it that need more than new lengths:
//   check    refuse the whole call for a wrong handle, row, token or length; sort requests into plain ones (same pages, row
//            intact, tokens that fill no block) and others. Changes nothing
//   serve    others in list order, inside one transaction: commit tokens, plan, and if the slots are there, apply; a shortage
//            takes the request back and leaves it alone
//   device   hand-overs from foreign streams, waits, one event. A failure takes `serve` back
//   write    lengths of the plain ones; rows or changed stretches of the others. Can not fail
// A plain request costs a few loads and stores in one cache line, in three with a token. All memory is kept from call to call.
// Used under the manager's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "kvpool/manager/state.hpp"

namespace kvpool {

// Arrays of the caller, all of the same length; request i is handles[i] in row rows[i].
struct StepInput {
    std::span<const CacheHandle> handles;
    std::span<const std::int32_t> rows;
    std::span<const std::int32_t> capacities;
    std::span<const std::int32_t> histories;
    TableView table;
    std::shared_ptr<void> table_memory;  // keeps the table's memory in place
    std::optional<StreamId> stream;      // empty: the device's own
    // Tokens that request i commits before its lengths change: values[offsets[i], offsets[i + 1]). Both empty: none for anybody;
    // else one offset more than requests (check_offsets).
    std::span<const Token> token_values = {};
    std::span<const std::int32_t> token_offsets = {};
};

// ArgumentError unless there is one offset more than requests, and they begin with 0, never decrease and end with the number of
// values; or for a negative value.
void check_step_tokens(std::size_t num_requests, std::span<const Token> values, std::span<const std::int32_t> offsets);

// `ok` and `dirty` are valid until the next step; their memory lives as long as the arrays' owner.
struct StepOutput {
    std::span<const std::uint8_t> ok;
    std::span<const DirtyRange> dirty;
    EventId event;                       // after it the pages may be used on other streams; 0: at once
    std::shared_ptr<void> former_table;  // kept another table in place so far; letting go may run the caller's code
};

class BatchStep {
public:
    // Errors as resize() has them, for the first request in the list, and of the arrays and handles before those.
    StepOutput run(ManagerState& state, const StepInput& input);

private:
    struct Plain {
        KvCache* cache;
        std::int32_t capacity;
        std::int32_t history;
    };
    // A request that is not plain.
    struct Other {
        KvCache* cache;
        std::size_t position;
        CacheHandle handle;
        std::int32_t row;  // kept here: the caller's arrays may lie in the table that `write` changes
        Lengths lengths;
        bool same_pages;  // only the row is not intact, or the stream is another; its tokens fill no block
        bool ok;
        std::size_t first_change;  // into changes_: one per life cycle, if ok and not same_pages
    };

    // Tokens that fill no block, of a request that is plain or has the same pages.
    struct Append {
        KvCache* cache;
        TokenSpan tokens;
    };

    void check(ManagerState& state, const StepInput& input);
    template <bool kWithTokens>
    void check_requests(ManagerState& state, const StepInput& input);
    // Errors of handles come before all others, whatever their positions.
    void check_handles(const ManagerState& state, const StepInput& input);
    void check_other(ManagerState& state, const StepInput& input, KvCache& cache, std::size_t i, Lengths lengths);
    // Errors of the tokens of request i.
    static void check_tokens(const ManagerState& state, const KvCache& cache, std::size_t i, std::int64_t num_tokens);
    // Whether committing them changes the tail alone: no block becomes full, and the history stays within `lengths`.
    [[nodiscard]] static bool fills_no_block(const ManagerState& state, const KvCache& cache, TokenSpan tokens,
                                             Lengths lengths) noexcept;
    void note_append(const ManagerState& state, KvCache& cache, TokenSpan tokens);
    [[noreturn]] void refuse_row(const StepInput& input, std::size_t i) const;
    EventId serve(ManagerState& state, const StepInput& input);
    void serve_one(ManagerState& state, Other& other, TokenSpan tokens);
    void hand_over(ManagerState& state, StreamId stream);
    void write(ManagerState& state, StreamId stream);
    void write_other(ManagerState& state, StreamId stream, const Other& other);

    [[nodiscard]] static TokenSpan tokens_of(const StepInput& input, std::size_t i) noexcept {
        if (input.token_offsets.empty()) {
            return {};
        }
        const auto begin = static_cast<std::size_t>(input.token_offsets[i]);
        return input.token_values.subspan(begin, static_cast<std::size_t>(input.token_offsets[i + 1]) - begin);
    }
    [[nodiscard]] static StreamId stream_of(const ManagerState& state, const StepInput& input) noexcept {
        return input.stream.value_or(state.device->own_stream());
    }

    std::uint64_t number_ = 0;  // of the call: the stamp of what it names
    std::vector<Plain> plain_;  // the first num_plain_ count
    std::size_t num_plain_ = 0;
    std::vector<Append> appends_;  // the first num_appends_ count
    std::size_t num_appends_ = 0;
    std::vector<Other> others_;
    std::vector<ChangedBlocks> changes_;
    std::vector<StreamId> foreign_;
    std::vector<std::uint64_t> row_stamps_;
    std::vector<std::uint8_t> ok_;
    std::vector<DirtyRange> dirty_;
};

}  // namespace kvpool
