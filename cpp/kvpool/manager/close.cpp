// close(): what a request had computed stays behind for later prompts, as far as there is room.
//
// Order: committing stops; the end of the sequence is marked, and marks that it supersedes are cleared; pages go from the last block
// to the first, so that the start of a prompt, which most prompts share, gives way last; scratch slots; states.
#include "kvpool/manager/state.hpp"

namespace kvpool {

NodeId ManagerState::end_node(const KvCache& cache) const noexcept {
    if (cache.last_node == kNoNode) {
        return kNoNode;
    }
    const NodeId with_tail = cache.tail.empty() ? kNoNode : prefix.child(cache.last_node, cache.tail.tokens());
    if (with_tail != kNoNode) {
        return with_tail;
    }
    return prefix.is_root(cache.last_node) ? kNoNode : cache.last_node;
}

void ManagerState::mark_end(KvCache& cache, NodeId end) {
    prefix.mark(end, Mark::sequence);
    // The prompt's own end only if it is on the path.
    const std::int64_t prompt = prompt_block(cache.prompt_length, tokens_per_block());
    const bool has_prompt = prompt < cache.committed_blocks;
    for (NodeId node = prefix.parent(end); !prefix.is_root(node); node = prefix.parent(node)) {
        prefix.unmark(node, Mark::sequence);
        if (has_prompt && prefix.ordinal(node) < prompt) {
            prefix.unmark(node, Mark::prompt);
        }
    }
}

void ManagerState::release_everything(KvCache& cache, NodeId end) {
    NodeId node = end;
    for (std::int64_t ordinal = context.num_blocks(cache); ordinal-- > 0;) {
        while (node != kNoNode && prefix.ordinal(node) > ordinal) {
            node = prefix.parent(node);
        }
        const bool is_committed = node != kNoNode && prefix.ordinal(node) == ordinal;
        for (const std::size_t i : context.close_order) {
            const auto id = make_id<LifeCycleId>(i);
            if (is_committed && cache.table(i, 0)[ordinal] == kBadSlot) {
                prefix.touch(node, id);
            }
            for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
                release_pages(i, cache.table(i, beam), {ordinal, ordinal + 1});
            }
        }
    }
    for (std::size_t i = 0; i < context.num_life_cycles(); ++i) {
        release_scratch(cache, i, 0);
    }
    if (!context.state.has_value()) {
        return;
    }
    const auto id = make_id<LifeCycleId>(*context.state);
    if (cache.state_source != kBadSlot) {
        prefix.release(id, cache.state_source);
        journal.set(cache.state_source, kBadSlot);
    }
    for (std::int32_t beam = 0; beam < cache.beam_width; ++beam) {
        BlockTable& states = cache.table(*context.state, beam);
        release_pages(*context.state, states, {0, states.size()});
    }
}

void ManagerState::close(CacheHandle handle, KvCache& cache) {
    transact([&] {
        committer.apply_stop(cache);
        const NodeId end = end_node(cache);
        if (end != kNoNode) {
            mark_end(cache, end);
        }
        release_everything(cache, end);
        if (end != kNoNode && end != cache.last_node) {
            prefix.prune(end);
        }
        if (cache.last_node != kNoNode) {
            prefix.let_go(cache.last_node);
            journal.set(cache.last_node, kNoNode);
        }
        prefix.release_tokens(cache.tail.tokens());
        settle(cache);
    });
    num_active -= cache.is_active() ? 1 : 0;
    detach(cache, 0);
    slab.close(handle);
}

}  // namespace kvpool
