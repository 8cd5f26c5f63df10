// Committing: a request's tokens become blocks of the tree, its pages become pages that others may share.
//
// Order of a commit (it decides victims, so it is part of the contract of the twins): the history moves, and pages behind the window
// go; full blocks ascending; the last node and the tail; the mark of the prompt's end; snapshots; the end of committing.
// Words
//   tail       committed tokens behind the last full block; part of the tree only as a snapshot, or once committing has ended
//   snapshot   (commit_min_snapshot) copies of the tail's pages and of the state, as they are after this commit
// Used under the manager's lock; its memory is kept from call to call.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/core/tokens.hpp"
#include "kvpool/manager/where.hpp"
#include "kvpool/sequence/commit_plan.hpp"
#include "kvpool/sequence/kv_cache.hpp"
#include "kvpool/sequence/request_plan.hpp"

namespace kvpool {

struct ManagerState;

class Committer {
public:
    explicit Committer(ManagerState& state) noexcept : state_(state) {}

    // The calls themselves.
    void commit(KvCache& cache, TokenSpan ids, std::span<const Digest> digests, bool is_end);
    void stop_committing(KvCache& cache);

    // Parts of other calls -----------------------------------------------------------------------------------------------
    // ArgumentError, beginning with `where`, unless n tokens can be committed at the present lengths.
    void check_lengths(const KvCache& cache, std::int64_t n, Where where) const;
    // Memory for the tail after n more tokens.
    void reserve_tail(KvCache& cache, std::int64_t n) const;
    // All that committing encoded tokens means, inside a transaction. Their digests stay the caller's; memory of the tail is there.
    void apply(KvCache& cache, TokenSpan added, bool is_end);
    // What the last apply() has changed in the tables.
    [[nodiscard]] const RequestPlan& changes() const noexcept { return plan_; }
    // The end of committing, inside a transaction: the tail is committed as far as that is possible, held pages go. Idempotent.
    void apply_stop(KvCache& cache);
    // Encodes raw ids, which then own a reference per digest; without digests they are themselves. Valid until the next call.
    [[nodiscard]] TokenSpan encode(TokenSpan ids, std::span<const Digest> digests);

private:
    struct Copy {
        LifeCycleId life_cycle;
        SlotId slot;
    };

    void commit_full_blocks(KvCache& cache, TokenSpan added, const CommitPlan& commit);
    NodeId commit_full_block(KvCache& cache, NodeId parent, TokenSpan tokens, std::int64_t ordinal);
    void release_held(KvCache& cache, std::size_t life_cycle, std::int64_t ordinal);
    void move_tail(KvCache& cache, TokenSpan added, const CommitPlan& commit);
    void set_last_node(KvCache& cache, NodeId node);
    // last_node, which becomes the root of the scope if there is none.
    NodeId node_before_tail(KvCache& cache);
    void mark_prompt(const KvCache& cache, std::int64_t ordinal);
    // Copies go into the tree as far as there is room. All slots are taken first: making room may take a page of the very node
    // that the copies are for.
    void copy_snapshot(KvCache& cache);
    void take_copy(KvCache& cache, std::size_t life_cycle, SlotId source, std::int64_t coverage);
    // Links the tail's pages while the cache owns them; with_state: gives the state away, also that of a full block.
    void commit_tail(KvCache& cache, bool with_state);
    void stop(KvCache& cache);
    // Tokens that a page of the block behind the full ones covers; of the last full one if there is no tail.
    [[nodiscard]] std::int64_t coverage_of_end(const KvCache& cache) const noexcept;

    ManagerState& state_;
    RequestPlan plan_;
    std::vector<Token> encoded_;
    std::vector<Token> begun_;          // a block that begins in the tail
    std::vector<HalfOpenRange> stale_;  // by life cycle
    std::vector<Copy> copies_;
};

}  // namespace kvpool
