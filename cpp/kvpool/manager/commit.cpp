#include "kvpool/manager/commit.hpp"

#include <algorithm>

#include "kvpool/core/errors.hpp"
#include "kvpool/manager/state.hpp"

namespace kvpool {

// Checks -------------------------------------------------------------------------------------------------------------------

void Committer::check_lengths(const KvCache& cache, std::int64_t n, Where where) const {
    const std::int64_t after = cache.committed + n;
    if (after > cache.capacity) {
        throw ArgumentError(where.text() + ": " + std::to_string(n) + " tokens after " +
                            std::to_string(cache.committed) + " exceed the capacity " + std::to_string(cache.capacity));
    }
    if (state_.context.commit_min_snapshot && cache.history != cache.committed && cache.history != after) {
        throw ArgumentError(where.text() + ": commit_min_snapshot needs a history of " +
                            std::to_string(cache.committed) + " or " + std::to_string(after) + " tokens, not " +
                            std::to_string(cache.history));
    }
}

// The call -----------------------------------------------------------------------------------------------------------------

void Committer::commit(KvCache& cache, TokenSpan ids, std::span<const Digest> digests, bool is_end) {
    ManagerState::require(cache, CacheStatus::active, "commit");
    if (ids.empty()) {
        if (is_end) {
            stop_committing(cache);
        }
        return;
    }
    if (cache.beam_width != 1) {
        throw LogicError("commit(): beam_width is " + std::to_string(cache.beam_width) +
                         "; only one beam can be committed");
    }
    if (!cache.commit_allowed) {
        throw LogicError("Cannot commit tokens after stop_committing()");
    }
    if (cache.text_only && !digests.empty()) {
        throw ArgumentError("commit(): a digest, but text_only was promised");
    }
    DigestPool::check_ids(ids, digests.size(), "tokens");
    check_lengths(cache, static_cast<std::int64_t>(ids.size()), {"commit"});
    reserve_tail(cache, static_cast<std::int64_t>(ids.size()));
    state_.changed.reserve(state_.context.num_life_cycles());
    state_.transact([&] {
        const TokenSpan added = encode(ids, digests);
        apply(cache, added, is_end);
        if (!digests.empty()) {
            state_.prefix.release_tokens(added);
        }
        state_.settle(cache);
    });
    if (!plan_.changes_nothing()) {
        state_.publish(cache, state_.changes_of(plan_));
        cache.unbind();
    }
}

TokenSpan Committer::encode(TokenSpan ids, std::span<const Digest> digests) {
    if (digests.empty()) {
        return ids;
    }
    encoded_.resize(ids.size());
    state_.prefix.encode(ids, digests, encoded_.data());
    return encoded_;
}

void Committer::reserve_tail(KvCache& cache, std::int64_t n) const {
    const std::int64_t tpb = state_.layout.tokens_per_block;
    cache.tail.reserve(plan_commit(cache.committed, n, 0, tpb).tail, tpb);
}

void Committer::apply(KvCache& cache, TokenSpan added, bool is_end) {
    const CommitPlan commit = plan_commit(cache.committed, static_cast<std::int64_t>(added.size()), cache.prompt_length,
                                          state_.layout.tokens_per_block);
    const std::int64_t history = std::max(std::int64_t{cache.history}, commit.after);
    if (plan_.make_commit(state_.context, cache, history)) {
        state_.apply_plan(cache, plan_);
    } else {
        state_.journal.set(cache.history, static_cast<std::int32_t>(history));
    }
    state_.journal.set(cache.committed, static_cast<std::int32_t>(commit.after));
    if (commit.fills_blocks()) {
        commit_full_blocks(cache, added, commit);
    }
    move_tail(cache, added, commit);
    if (commit.prompt != CommitPlan::kNone) {
        mark_prompt(cache, commit.prompt);
    }
    const bool with_snapshot = state_.context.commit_min_snapshot;
    if (with_snapshot && is_end) {
        commit_tail(cache, true);
        stop(cache);
    } else if (with_snapshot) {
        copy_snapshot(cache);
    } else if (is_end) {
        apply_stop(cache);
    }
}

// Full blocks --------------------------------------------------------------------------------------------------------------

void Committer::commit_full_blocks(KvCache& cache, TokenSpan added, const CommitPlan& commit) {
    const std::int64_t tpb = state_.layout.tokens_per_block;
    stale_.assign(state_.context.num_life_cycles(), {});
    for (const std::size_t i : state_.context.attention) {
        stale_[i] = state_.stale_blocks(cache, i);
    }
    NodeId node = node_before_tail(cache);
    std::int64_t ordinal = commit.first;
    if (commit.old_tail != 0) {
        const TokenSpan tail = cache.tail.tokens();
        begun_.assign(tail.begin(), tail.end());
        begun_.insert(begun_.end(), added.begin(), added.begin() + (tpb - commit.old_tail));
        node = commit_full_block(cache, node, begun_, ordinal++);
    }
    for (; ordinal < commit.end; ++ordinal) {
        const std::int64_t offset = ordinal * tpb - commit.before;
        node = commit_full_block(
            cache, node, added.subspan(static_cast<std::size_t>(offset), static_cast<std::size_t>(tpb)), ordinal);
    }
    state_.journal.set(cache.committed_blocks, static_cast<std::int32_t>(commit.end));
    set_last_node(cache, node);
}

NodeId Committer::commit_full_block(KvCache& cache, NodeId parent, TokenSpan tokens, std::int64_t ordinal) {
    PrefixCache& prefix = state_.prefix;
    Transaction& transaction = state_.transaction;
    const std::int64_t tpb = state_.layout.tokens_per_block;
    const auto [node, existed] = prefix.insert_full(parent, tokens);
    bool any_stale = false;
    for (const std::size_t i : state_.context.attention) {
        const auto id = make_id<LifeCycleId>(i);
        BlockTable& table = cache.table(i, 0);
        if (table[ordinal] == kBadSlot) {
            continue;
        }
        const bool is_stale = stale_[i].contains(ordinal);
        if (!existed || prefix.can_install(node, id, tpb)) {
            prefix.install(node, id, table[ordinal], tpb);
            any_stale = any_stale || is_stale;
        } else if (is_stale) {
            release_held(cache, i, ordinal);
        } else {  // the same tokens, computed twice: the other one's page serves both
            const SlotId other = prefix.page(node, id);
            transaction.release(id, table, ordinal);
            transaction.adopt(id, table, ordinal, other, cache.priority(i, ordinal));
            transaction.use(id, other);
            plan_.add_change(i, ordinal);
        }
    }
    for (std::size_t k = 0; any_stale && k < state_.context.attention.size(); ++k) {
        const std::size_t i = state_.context.attention[k];
        if (stale_[i].contains(ordinal) && cache.table(i, 0)[ordinal] != kBadSlot) {
            release_held(cache, i, ordinal);
        }
    }
    return node;
}

void Committer::release_held(KvCache& cache, std::size_t life_cycle, std::int64_t ordinal) {
    BlockTable& pages = cache.table(life_cycle, 0);
    state_.transaction.release(make_id<LifeCycleId>(life_cycle), pages, ordinal);
    state_.transaction.add_held(pages, -1);
}

NodeId Committer::node_before_tail(KvCache& cache) {
    if (cache.last_node == kNoNode) {
        set_last_node(cache, state_.prefix.make_root(cache.scope));
    }
    return cache.last_node;
}

void Committer::set_last_node(KvCache& cache, NodeId node) {
    const NodeId former = cache.last_node;
    state_.prefix.hold_node(node);
    state_.journal.set(cache.last_node, node);
    if (former != kNoNode) {
        state_.prefix.let_go(former);
    }
}

void Committer::move_tail(KvCache& cache, TokenSpan added, const CommitPlan& commit) {
    if (!commit.fills_blocks()) {
        state_.prefix.retain_tokens(added);
        cache.tail.append(state_.journal, added);
        return;
    }
    const TokenSpan left = added.last(static_cast<std::size_t>(commit.tail));
    state_.prefix.retain_tokens(left);
    state_.prefix.release_tokens(cache.tail.tokens());
    cache.tail.replace(state_.journal, left);
}

void Committer::mark_prompt(const KvCache& cache, std::int64_t ordinal) {
    NodeId node = cache.last_node;
    while (state_.prefix.ordinal(node) > ordinal) {
        node = state_.prefix.parent(node);
    }
    state_.prefix.mark(node, Mark::prompt);
}

// Snapshots ----------------------------------------------------------------------------------------------------------------

std::int64_t Committer::coverage_of_end(const KvCache& cache) const noexcept {
    return cache.tail.empty() ? state_.layout.tokens_per_block : std::int64_t{cache.tail.size()};
}

void Committer::take_copy(KvCache& cache, std::size_t life_cycle, SlotId source, std::int64_t coverage) {
    const auto id = make_id<LifeCycleId>(life_cycle);
    const PoolGroupId group = state_.group_of(life_cycle);
    // Looked up for each slot: making room for the one before may have taken the node away.
    const NodeId target = cache.tail.empty()
                              ? cache.last_node
                              : state_.prefix.covering_child(node_before_tail(cache), cache.tail.tokens());
    const bool is_needed = target == kNoNode || state_.prefix.can_install(target, id, coverage);
    if (source == kBadSlot || !is_needed || state_.tier.free(group) + state_.prefix.evictable(group) == 0) {
        return;
    }
    state_.transaction.make_room(group, 1);
    const SlotId slot = state_.transaction.allocate(id, cache.priority(life_cycle, cache.committed_blocks));
    state_.transaction.copy(id, slot, source);
    copies_.push_back({id, slot});
}

void Committer::copy_snapshot(KvCache& cache) {
    const SequenceContext& context = state_.context;
    const std::int64_t coverage = coverage_of_end(cache);
    copies_.clear();
    for (std::size_t k = 0; !cache.tail.empty() && k < context.attention.size(); ++k) {
        const std::size_t i = context.attention[k];
        take_copy(cache, i, cache.table(i, 0)[cache.committed_blocks], coverage);
    }
    if (context.state.has_value()) {
        take_copy(cache, *context.state, cache.table(*context.state, 0)[0], coverage);
    }
    if (copies_.empty()) {
        return;
    }
    const NodeId node = cache.tail.empty()
                            ? cache.last_node
                            : state_.prefix.insert_tail(node_before_tail(cache), cache.tail.tokens()).node;
    for (const Copy& copy : copies_) {
        state_.prefix.install(node, copy.life_cycle, copy.slot, coverage);
        state_.prefix.release(copy.life_cycle, copy.slot);
    }
    state_.prefix.prune(node);
}

void Committer::commit_tail(KvCache& cache, bool with_state) {
    const std::int64_t coverage = coverage_of_end(cache);
    NodeId node = cache.last_node;
    if (!cache.tail.empty()) {
        node = state_.prefix.insert_tail(node_before_tail(cache), cache.tail.tokens()).node;
        for (const std::size_t i : state_.context.attention) {
            const SlotId slot = cache.table(i, 0)[cache.committed_blocks];
            if (slot != kBadSlot) {
                state_.prefix.install(node, make_id<LifeCycleId>(i), slot, coverage);
            }
        }
    }
    if (with_state && state_.context.state.has_value()) {
        const auto id = make_id<LifeCycleId>(*state_.context.state);
        BlockTable& state = cache.table(*state_.context.state, 0);
        if (state[0] != kBadSlot && state_.prefix.install(node, id, state[0], coverage)) {
            state_.transaction.release(id, state, 0);
        }
    }
    state_.prefix.prune(node);
}

// The end of committing ----------------------------------------------------------------------------------------------------

void Committer::stop(KvCache& cache) {
    state_.journal.set(cache.commit_allowed, false);
    for (const std::size_t i : state_.context.attention) {
        for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
            BlockTable& pages = cache.table(i, beam);
            if (pages.held() > 0) {
                state_.release_pages(i, pages, state_.stale_blocks(cache, i));
                state_.transaction.add_held(pages, -std::int64_t{pages.held()});
            }
        }
    }
}

void Committer::apply_stop(KvCache& cache) {
    if (!cache.commit_allowed) {
        return;
    }
    if (!cache.tail.empty() && cache.was_resumed && cache.beam_width == 1) {
        commit_tail(cache, false);
    }
    stop(cache);
}

void Committer::stop_committing(KvCache& cache) {
    if (cache.commit_allowed) {
        state_.transact([&] {
            apply_stop(cache);
            state_.settle(cache);
        });
    }
}

}  // namespace kvpool
