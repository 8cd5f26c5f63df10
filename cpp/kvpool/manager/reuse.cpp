// What a new cache takes over from the tree, and the calls that look at the tree without a cache.
#include <algorithm>

#include "kvpool/core/errors.hpp"
#include "kvpool/manager/state.hpp"

namespace kvpool {

// create() -----------------------------------------------------------------------------------------------------------------

CacheHandle ManagerState::create(CreateInput& input) {
    match.clear();
    if (input.ids.has_value() && !input.ids->empty()) {
        prefix.match(input.scope, prefix.query(*input.ids, input.digests), match);
    }
    const CacheHandle handle = slab.open(context.num_life_cycles(), context.scratch_rewind.has_value());
    KvCache& cache = *slab.find(handle);
    cache.scope = input.scope;
    cache.prompt_length = input.prompt_length;
    cache.text_only = input.text_only;
    cache.priorities = std::move(input.priorities);
    try {
        transact([&] {
            take_over_match(cache, match);
            transaction.settle_unused();
        });
    } catch (...) {
        slab.close(handle);
        throw;
    }
    return handle;
}

void ManagerState::take_over_match(KvCache& cache, const MatchResult& found) {
    const std::int64_t tpb = tokens_per_block();
    const auto end = static_cast<std::int32_t>(found.end);
    cache.divergence = static_cast<std::int32_t>(found.divergence);
    cache.hybrid = static_cast<std::int32_t>(found.hybrid);
    cache.matched = cache.committed = cache.history = cache.capacity = end;
    cache.committed_blocks = static_cast<std::int32_t>(found.chain.size());
    for (const std::size_t i : context.attention) {
        if (layout.life_cycles[i].key.optional) {
            cache.optional.push_back(coverage_of(found, i));
        }
        adopt_pages(cache, found, i);
    }
    if (end == 0) {
        return;
    }
    const NodeId last = found.source != kNoNode ? found.source : found.chain.back();
    if (context.state.has_value()) {
        const auto id = make_id<LifeCycleId>(*context.state);
        cache.state_source = prefix.page(last, id);
        prefix.adopt(id, cache.state_source, cache.priority(*context.state, cache.committed_blocks));
    }
    cache.last_node = found.chain.empty() ? prefix.parent(last) : found.chain.back();
    prefix.hold_node(cache.last_node);
    const std::int64_t rest = end % tpb;
    cache.tail.reserve(rest, tpb);
    cache.tail.assign(prefix.tokens(last).first(static_cast<std::size_t>(rest)));
    prefix.retain_tokens(cache.tail.tokens());
}

void ManagerState::adopt_pages(KvCache& cache, const MatchResult& found, std::size_t life_cycle) {
    const auto id = make_id<LifeCycleId>(life_cycle);
    const auto blocks = static_cast<std::int32_t>(context.num_blocks(cache));
    BlockTable& table = cache.table(life_cycle, 0);
    table.resize(blocks);
    const HalfOpenRange stale_range_now = stale_blocks(cache, life_cycle);
    for (std::int64_t ordinal = 0; ordinal < blocks; ++ordinal) {
        if (stale_range_now.contains(ordinal)) {
            ordinal = stale_range_now.end - 1;
            continue;
        }
        const NodeId node =
            ordinal < cache.committed_blocks ? found.chain[static_cast<std::size_t>(ordinal)] : found.source;
        const SlotId slot = prefix.page(node, id);
        if (slot != kBadSlot) {  // else of an OPTIONAL group
            prefix.adopt(id, slot, cache.priority(life_cycle, ordinal));
            table.put(ordinal, slot);
        }
    }
}

OptionalReuse ManagerState::coverage_of(const MatchResult& found, std::size_t life_cycle) const {
    OptionalReuse reuse;
    reuse.life_cycle = make_id<LifeCycleId>(life_cycle);
    const std::int64_t tpb = tokens_per_block();
    const HalfOpenRange stale_range_now = stale_range(layout.life_cycles[life_cycle].key, tpb, found.end);
    const std::int64_t blocks = div_up(found.end, tpb);
    for (std::int64_t ordinal = 0; ordinal < blocks; ++ordinal) {
        if (stale_range_now.contains(ordinal)) {
            continue;
        }
        const bool is_full = ordinal < static_cast<std::int64_t>(found.chain.size());
        const NodeId node = is_full ? found.chain[static_cast<std::size_t>(ordinal)] : found.source;
        const std::int64_t beg = ordinal * tpb;
        const std::int64_t wanted = std::min(beg + tpb, found.end);
        const std::int64_t end = std::min(beg + prefix.coverage(node, reuse.life_cycle), wanted);
        reuse.complete = reuse.complete && end == wanted;
        if (end == beg) {
            continue;
        }
        if (!reuse.coverage.empty() && reuse.coverage.back().end == beg) {
            reuse.coverage.back().end = end;
        } else {
            reuse.coverage.push_back({beg, end});
        }
    }
    return reuse;
}

std::vector<ReuseStatus> ManagerState::reuse_status(const KvCache& cache) const {
    std::vector<ReuseStatus> rows;
    auto optional = cache.optional.begin();
    for (const std::size_t i : context.attention) {
        const LifeCycleKey& key = layout.life_cycles[i].key;
        ReuseStatus& row = rows.emplace_back();
        row.group = make_id<LifeCycleId>(i);
        row.optional = key.optional;
        row.endpoint = cache.matched;
        if (key.optional) {
            row.complete = optional->complete;
            row.coverage = (optional++)->coverage;
            continue;
        }
        // A REQUIRED group has everything that is live at the end point.
        const HalfOpenRange gone = stale_range(key, tokens_per_block(), cache.matched);
        HalfOpenRange before{0, std::min(gone.beg * tokens_per_block(), std::int64_t{cache.matched})};
        HalfOpenRange behind{gone.end * tokens_per_block(), cache.matched};
        if (gone.empty()) {
            before = {0, cache.matched};
            behind = {};
        }
        for (const HalfOpenRange& range : {before, behind}) {
            if (!range.empty()) {
                row.coverage.push_back(range);
            }
        }
    }
    return rows;
}

// What was committed -------------------------------------------------------------------------------------------------------

std::vector<BlockKey> ManagerState::block_keys(const KvCache& cache) {
    std::vector<BlockKey> keys(static_cast<std::size_t>(cache.committed_blocks));
    NodeId node = cache.last_node;
    for (std::size_t i = keys.size(); i-- > 0;) {
        keys[i] = prefix.key(node);
        node = prefix.parent(node);
    }
    return keys;
}

std::vector<Token> ManagerState::encoded_tokens(const KvCache& cache) const {
    std::vector<Token> out(static_cast<std::size_t>(cache.committed));
    if (cache.committed_blocks > 0) {
        prefix.path_tokens(cache.last_node, out.data());
    }
    const TokenSpan tail = cache.tail.tokens();
    std::copy(tail.begin(), tail.end(), out.end() - static_cast<std::ptrdiff_t>(tail.size()));
    return out;
}

std::pair<std::vector<Token>, std::vector<Digest>> ManagerState::committed_tokens(const KvCache& cache) const {
    const std::vector<Token> encoded = encoded_tokens(cache);
    std::pair<std::vector<Token>, std::vector<Digest>> out;
    out.first.resize(encoded.size());
    prefix.decode(encoded, out.first.data(), out.second);
    return out;
}

// Looking at the tree ------------------------------------------------------------------------------------------------------

std::int64_t ManagerState::probe_reuse(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests) {
    prefix.match(scope, prefix.query(ids, digests), match);
    return match.end;
}

std::optional<BlockKey> ManagerState::probe_first_new_block_key(const ReuseScope& scope, TokenSpan ids,
                                                                std::span<const Digest> digests) {
    const Query query = prefix.query(ids, digests);
    prefix.match(scope, query, match);
    const std::int64_t block_ordinal = match.end / tokens_per_block();
    if (static_cast<std::int64_t>(ids.size()) < (block_ordinal + 1) * tokens_per_block()) {
        return std::nullopt;
    }
    const NodeId parent = block_ordinal == 0 ? kNoNode : match.chain[static_cast<std::size_t>(block_ordinal) - 1];
    return prefix.key_on_top(scope, parent, query, block_ordinal);
}

PagesOnPath ManagerState::match_pages(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                                      std::int64_t life_cycle, bool partial) {
    check_life_cycle(life_cycle);
    const LifeCycleId id(static_cast<std::int32_t>(life_cycle));
    prefix.walk(scope, prefix.query(ids, digests), partial, match);
    PagesOnPath out;
    out.tokens = match.end;
    const auto add = [&](NodeId node) {
        const SlotId slot = prefix.page(node, id);
        out.pages.push_back(slot == kBadSlot ? std::nullopt
                                             : std::optional<PagesOnPath::Page>({slot, prefix.coverage(node, id)}));
    };
    std::for_each(match.chain.begin(), match.chain.end(), add);
    if (match.source != kNoNode) {
        add(match.source);
    }
    return out;
}

void ManagerState::clear_reusable_blocks() {
    if (slab.num_open() > 0) {
        throw LogicError("clear_reusable_blocks(): " + std::to_string(slab.num_open()) + " KV cache(s) still open");
    }
    transact([&] {
        prefix.clear();
        transaction.settle_unused();
    });
    planned_drops.clear();
}

// Planned drops ------------------------------------------------------------------------------------------------------------

std::optional<std::int64_t> ManagerState::plan_drop(const KvCache& cache) {
    if (cache.commit_allowed) {
        throw LogicError("plan_committed_block_drop(): committing has not stopped");
    }
    if (cache.committed == 0) {
        return std::nullopt;
    }
    const std::vector<Token> encoded = encoded_tokens(cache);
    prefix.match(cache.scope, Query::encoded(encoded), 0, false, match);
    if (match.end != cache.committed) {
        return std::nullopt;
    }
    std::vector<std::pair<NodeId, LifeCycleId>> wanted;
    if (!collect_planned_pages(cache, wanted)) {
        return std::nullopt;
    }
    PlannedDrops::Pages pages;
    pages.reserve(wanted.size());
    transact([&] {
        for (const auto& [node, life_cycle] : wanted) {
            pages.push_back(prefix.plan_page(node, life_cycle));
        }
        transaction.settle_unused();
        planned_drops.add(std::move(pages));
    });
    return planned_drops.last();
}

bool ManagerState::collect_planned_pages(const KvCache& cache,
                                         std::vector<std::pair<NodeId, LifeCycleId>>& wanted) const {
    const std::int64_t tpb = tokens_per_block();
    const std::int64_t blocks = div_up(std::int64_t{cache.committed}, tpb);
    const auto node_of = [&](std::int64_t ordinal) {
        return ordinal < cache.committed_blocks ? match.chain[static_cast<std::size_t>(ordinal)] : match.source;
    };
    const auto tokens_of = [&](std::int64_t ordinal) {
        return std::min(tpb, std::int64_t{cache.committed} - ordinal * tpb);
    };
    for (const std::size_t i : context.attention) {
        const LifeCycleKey& key = layout.life_cycles[i].key;
        if (!key.is_windowed()) {
            continue;
        }
        const auto id = make_id<LifeCycleId>(i);
        for (std::int64_t o = stale_range(key, tpb, cache.committed).end; o < blocks; ++o) {
            if (prefix.coverage(node_of(o), id) >= tokens_of(o)) {
                wanted.emplace_back(node_of(o), id);
            } else if (!key.optional) {
                return false;
            }
        }
    }
    if (context.state.has_value()) {
        const auto id = make_id<LifeCycleId>(*context.state);
        if (prefix.coverage(node_of(blocks - 1), id) != tokens_of(blocks - 1)) {
            return false;
        }
        wanted.emplace_back(node_of(blocks - 1), id);
    }
    return true;
}

bool ManagerState::drop_planned(std::int64_t plan_id) {
    const PlannedDrops::Pages* const pages = planned_drops.find(plan_id);
    if (pages == nullptr) {
        return false;
    }
    transact([&] {
        for (const PlannedPage& page : *pages) {
            prefix.drop_page(page);
        }
        transaction.settle_unused();
    });
    planned_drops.remove(plan_id);
    return true;
}

// Test hooks ---------------------------------------------------------------------------------------------------------------

NodeId ManagerState::find_parent(const ReuseScope& scope, TokenSpan encoded) const noexcept {
    const auto tpb = static_cast<std::size_t>(tokens_per_block());
    NodeId node = prefix.find_root(scope);
    for (std::size_t begin = 0; node != kNoNode && begin + tpb < encoded.size(); begin += tpb) {
        node = prefix.child(node, encoded.subspan(begin, tpb));
    }
    return node;
}

TokenSpan ManagerState::last_block(TokenSpan encoded) const noexcept {
    const auto tpb = static_cast<std::size_t>(tokens_per_block());
    return encoded.empty() ? encoded : encoded.subspan((encoded.size() - 1) / tpb * tpb);
}

void ManagerState::debug_insert_block(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                                      std::span<const std::int64_t> coverage) {
    DigestPool::check_ids(ids, digests.size(), "input_tokens");
    if (coverage.size() != context.num_life_cycles()) {
        throw ArgumentError("debug_insert_block(): a coverage for each layer group is needed");
    }
    transact([&] {
        const TokenSpan encoded = committer.encode(ids, digests);
        const TokenSpan last = last_block(encoded);
        NodeId parent = find_parent(scope, encoded);
        if (parent == kNoNode && !encoded.empty() && last.size() == encoded.size()) {
            parent = prefix.make_root(scope);
        }
        if (parent == kNoNode || encoded.empty()) {
            throw ArgumentError("debug_insert_block(): the blocks before are not in the tree");
        }
        prefix.hold_node(parent);
        std::vector<std::pair<LifeCycleId, SlotId>> pages;
        for (std::size_t i = 0; i < coverage.size(); ++i) {
            const auto id = make_id<LifeCycleId>(i);
            const NodeId target = prefix.covering_child(parent, last);
            if (coverage[i] <= 0 || (target != kNoNode && !prefix.can_install(target, id, coverage[i]))) {
                continue;
            }
            const PoolGroupId group = group_of(i);
            if (tier.free(group) + prefix.evictable(group) == 0) {
                throw OutOfPagesError("debug_insert_block(): there is no slot left");
            }
            transaction.make_room(group, 1);
            pages.emplace_back(id, transaction.allocate(id, kDefaultPriority));
        }
        const bool is_full = static_cast<std::int64_t>(last.size()) == tokens_per_block();
        const NodeId node = (is_full ? prefix.insert_full(parent, last) : prefix.insert_tail(parent, last)).node;
        for (const auto& [life_cycle, slot] : pages) {
            prefix.install(node, life_cycle, slot, coverage[life_cycle.index()]);
            prefix.release(life_cycle, slot);
        }
        prefix.let_go(parent);
        if (!digests.empty()) {
            prefix.release_tokens(encoded);
        }
        transaction.settle(device->own_stream());
    });
}

void ManagerState::debug_set_coverage(const ReuseScope& scope, TokenSpan ids, std::span<const Digest> digests,
                                      std::int64_t life_cycle, std::int64_t coverage) {
    check_life_cycle(life_cycle);
    const LifeCycleId id(static_cast<std::int32_t>(life_cycle));
    const Query query = prefix.query(ids, digests);
    query.check();
    const NodeId parent = ids.empty() ? kNoNode : find_parent(scope, query.tokens);
    const NodeId node = parent == kNoNode ? kNoNode : prefix.child(parent, last_block(query.tokens));
    const SlotId slot = node == kNoNode ? kBadSlot : prefix.page(node, id);
    if (slot == kBadSlot) {
        throw ArgumentError("debug_set_coverage(): the block is not in the tree");
    }
    if (coverage <= 0 && prefix.refs(id, slot) > 0 && prefix.rules().of(id).is_full_like(prefix.ordinal(node))) {
        throw ArgumentError("debug_set_coverage(): the blocks below are in use");
    }
    transact([&] {
        if (coverage > 0) {
            prefix.set_coverage(node, id, coverage);
        } else {
            prefix.remove_page(node, id);
        }
        transaction.settle_unused();
    });
}

}  // namespace kvpool
