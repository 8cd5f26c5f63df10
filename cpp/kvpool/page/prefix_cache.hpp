// The prefix cache: the tree of committed blocks, the pages it knows, and the order in which they give way.
//
// The one class through which sequence and manager code touches pages and the tree.
// Words
//   page     the record of an occupied slot, named by (life cycle, slot); `refs` is the number of its owners (caches)
//   linked   a node of the tree names the page
//   cached   linked and refs == 0: then, and only then, it waits in the eviction queue of its pool group and may be taken
//   held     a node is held by each cache whose last node it is; a held node and its ancestors never leave the tree
// Invariants
//   a page that is neither owned nor linked does not exist: its slot is free
//   node.page[lc] == slot  <=>  page(lc, slot).node == node
// Order of a call: make_room() before tier.allocate(); new_page() for each slot handed out; at close release the pages first and
// let_go() of the last node last.  A caller that has inserted a node which nobody holds and has linked its last page into it
// prunes it.
// Every change goes through the manager's journal.  Nothing here calls the device; which slots the call's event concerns is
// noted in the tier (Tier::finish, Tier::borrow).  Not thread safe: used under the manager's lock.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "kvpool/core/digest_pool.hpp"
#include "kvpool/core/ids.hpp"
#include "kvpool/core/journal.hpp"
#include "kvpool/core/tokens.hpp"
#include "kvpool/page/page_store.hpp"
#include "kvpool/page/reclaim.hpp"
#include "kvpool/reuse/keys.hpp"
#include "kvpool/reuse/match.hpp"
#include "kvpool/reuse/radix_tree.hpp"
#include "kvpool/reuse/retention.hpp"
#include "kvpool/reuse/rules.hpp"
#include "kvpool/storage/layout.hpp"
#include "kvpool/storage/tier.hpp"

namespace kvpool {

// The node of an insertion, and whether it was there before.
struct Inserted {
    NodeId node;
    bool existed = false;
};

// Names a page for a planned drop: it is skipped when it is gone, even if its slot has been linked again since.
struct PlannedPage {
    LifeCycleId life_cycle;
    SlotId slot;
    std::uint64_t serial = 0;
};

class PrefixCache {
public:
    // Tier and journal outlive the cache, which does not move.
    PrefixCache(const Layout& layout, ReuseRules rules, Tier& tier, Journal& journal);
    PrefixCache(const PrefixCache&) = delete;
    PrefixCache& operator=(const PrefixCache&) = delete;

    [[nodiscard]] const ReuseRules& rules() const noexcept { return rules_; }
    [[nodiscard]] std::int64_t tokens_per_block() const noexcept { return tree_.tokens_per_block(); }

    // ---- tokens.  Look-ups take a Query, all else encoded tokens.

    // A look-up of raw tokens; see DigestPool::encode.  A view, valid until the next query() or change.
    [[nodiscard]] Query query(TokenSpan ids, std::span<const Digest> digests, const char* name = "input_tokens") {
        return digests_.encode(ids, digests, name, query_scratch_);
    }
    // Encodes tokens for committing into out[0 .. ids.size()), which the caller owns: one reference per digest (release_tokens).
    // The ids have been checked (DigestPool::check_ids).
    void encode(TokenSpan ids, std::span<const Digest> digests, Token* out) { digests_.intern(ids, digests, out); }
    // One more owner, one owner less (a cache's tail, a call's tokens) of the digests in encoded tokens.  Nodes retain theirs.
    void retain_tokens(TokenSpan tokens) { digests_.retain(tokens); }
    void release_tokens(TokenSpan tokens) { digests_.release(tokens); }
    // Back to raw tokens, see DigestPool::decode.
    void decode(TokenSpan tokens, Token* out, std::vector<Digest>& digests) const {
        digests_.decode(tokens, out, digests);
    }

    // ---- look-up.  Pure but for cached keys; no journal entries.

    // The longest legal prefix, with the configured back-off and partial reuse, or with those given.  ArgumentError for a
    // negative token of a raw query, which has been excluded as a whole then.
    void match(const ReuseScope& scope, const Query& query, MatchResult& out) {
        match(scope, query, rules_.backoff, rules_.partial, out);
    }
    void match(const ReuseScope& scope, const Query& query, std::int64_t backoff, bool partial, MatchResult& out) {
        matcher_.match(scope, query, backoff, partial, out);
    }
    // The walk alone, whatever pages there are: chain = all full nodes that match, source = the node of the best partial
    // agreement behind them (kNoNode without), end = divergence.
    void walk(const ReuseScope& scope, const Query& query, bool partial, MatchResult& out) {
        matcher_.walk(scope, query, partial, out);
    }

    // Root of a scope; kNoNode without.
    [[nodiscard]] NodeId find_root(const ReuseScope& scope) const noexcept { return tree_.find_root(scope); }
    [[nodiscard]] NodeId make_root(const ReuseScope& scope) { return tree_.make_root(scope); }
    // The child with exactly these tokens; kNoNode without.
    [[nodiscard]] NodeId child(NodeId parent, TokenSpan tokens) const noexcept { return tree_.child(parent, tokens); }
    // The first child in token order that has these tokens or begins with them: where a tail would go; kNoNode without.
    [[nodiscard]] NodeId covering_child(NodeId parent, TokenSpan tokens) const noexcept {
        return tree_.covering_child(parent, tokens);
    }

    [[nodiscard]] NodeId parent(NodeId node) const noexcept { return tree_.at(node).parent; }
    [[nodiscard]] bool is_root(NodeId node) const noexcept { return tree_.at(node).is_root(); }
    // Block ordinal; -1 for a root.
    [[nodiscard]] std::int64_t ordinal(NodeId node) const noexcept { return tree_.at(node).ordinal; }
    // Encoded tokens of the block; none for a root.
    [[nodiscard]] TokenSpan tokens(NodeId node) const noexcept { return tree_.tokens(node); }
    // Writes the encoded tokens of all blocks from the root down to `node`: (ordinal + 1) * tpb of them if it is full.
    void path_tokens(NodeId node, Token* out) const noexcept { tree_.path_tokens(node, out); }

    // Chain key of a node; keys are made when first asked for and kept.  UnsupportedError if there is no SHA-256.
    [[nodiscard]] const BlockKey& key(NodeId node) { return tree_.key(node); }
    // Key of the query's full block `ordinal` on top of `parent`, the node of the block before (kNoNode: the root of the scope,
    // which may not exist).
    [[nodiscard]] BlockKey key_on_top(const ReuseScope& scope, NodeId parent, const Query& query, std::int64_t ordinal);

    // ---- nodes

    // The child of `parent` (a root or a full node) with these tokens_per_block tokens.  A new one takes over the pages of a
    // partial sibling that is a prefix of it.
    Inserted insert_full(NodeId parent, TokenSpan tokens);
    // The node for a partial block, 0 < tokens.size() < tokens_per_block: covering_child(), else a new one.
    Inserted insert_tail(NodeId parent, TokenSpan tokens);
    // A cache's last node.  Let go of the old one afterwards, and after its pages have been released: let_go() prunes.
    void hold_node(NodeId node) { tree_.add_holder(node, 1); }
    void let_go(NodeId node) {
        tree_.add_holder(node, -1);
        reclaim_.prune(node);
    }
    // Removes `node` and then its ancestors as far as they have no children, nobody holds them or owns a page of them, and no
    // look-up could end in them; also roots.
    void prune(NodeId node) { reclaim_.prune(node); }

    // ---- pages

    // Record of a slot that was just handed out: one owner, no node.
    void new_page(LifeCycleId lc, SlotId slot, std::int32_t priority) { pages_.add(lc, slot, priority); }
    // One more owner of a linked page: it leaves the queue, and its priority rises to `priority` if lower.  The caller's stream
    // waits for it when it starts to use it (Tier::borrow), not now.
    void adopt(LifeCycleId lc, SlotId slot, std::int32_t priority) { pages_.own(lc, slot, priority); }
    // One owner less.  After the last one a linked page is cached (newest), the slot of another is free.  The call's event
    // becomes a ready event of the slot in every case.
    void release(LifeCycleId lc, SlotId slot) {
        tier_->finish(pages_.group_of(lc), slot);
        pages_.disown(lc, slot);
    }
    [[nodiscard]] std::int32_t refs(LifeCycleId lc, SlotId slot) const noexcept {
        return pages_.at(lc, slot).head.refs;
    }
    [[nodiscard]] std::int32_t priority(LifeCycleId lc, SlotId slot) const noexcept {
        return pages_.at(lc, slot).head.priority;
    }
    // The node that names the page; kNoNode without.
    [[nodiscard]] NodeId node_of(LifeCycleId lc, SlotId slot) const noexcept { return pages_.at(lc, slot).node(); }

    // The node's page of a life cycle; kBadSlot without, and for roots.
    [[nodiscard]] SlotId page(NodeId node, LifeCycleId lc) const noexcept { return tree_.page(node, lc); }
    // Leading tokens of the block that the page holds (a state: after exactly so many); 0 without a page.
    [[nodiscard]] std::int64_t coverage(NodeId node, LifeCycleId lc) const noexcept { return tree_.coverage(node, lc); }
    // Whether install() would link: the node has no page there, or one that covers less.
    [[nodiscard]] bool can_install(NodeId node, LifeCycleId lc, std::int64_t coverage) const noexcept {
        return tree_.coverage(node, lc) < coverage;
    }
    // Links a page that has a record and no node; false, and nothing done, unless can_install().  The call's event becomes a
    // ready event of the slot.  A page that is replaced loses its node; a cached one is freed.
    bool install(NodeId node, LifeCycleId lc, SlotId slot, std::int64_t coverage);
    // Takes a cached page away for good, and what is useless without it: below a page that every later block needs the whole
    // subtree; window pages around it that can serve no end any more; nodes that can serve none.
    // Nothing without a page.
    void remove_page(NodeId node, LifeCycleId lc);
    // The only owner of a page takes it out of the tree, with the effects of remove_page, and keeps it.  Nothing when no node has
    // it (any more: taking over the page of another life cycle may have removed the node).
    void take_over(LifeCycleId lc, SlotId slot) {
        if (node_of(lc, slot) != kNoNode) {
            reclaim_.remove_page(node_of(lc, slot), lc);
        }
    }
    // Test hook: the node's page covers so many tokens from now on, at least 1.
    void set_coverage(NodeId node, LifeCycleId lc, std::int64_t coverage) {
        tree_.set_page(node, lc, tree_.page(node, lc), coverage);
    }

    // ---- room

    // Cached pages of a pool group.
    [[nodiscard]] std::int64_t evictable(PoolGroupId group) const noexcept { return pages_.queue(group).size(); }
    // Takes victims until `wanted` slots are free.  The caller has checked that free + evictable suffice.  A victim may take
    // nodes along that nobody holds.
    void make_room(PoolGroupId group, std::int64_t wanted) { reclaim_.make_room(group, wanted); }

    // ---- retention

    // SEQUENCE or PROMPT (FORK is kept by the tree): an end in this node keeps its window tail longer.  Nothing when set already,
    // on a root, and without retain_window_tails.
    void mark(NodeId node, Mark bit) { retention_.mark(node, bit); }
    void unmark(NodeId node, Mark bit) { retention_.unmark(node, bit); }
    [[nodiscard]] bool is_marked(NodeId node, Mark bit) const noexcept { return tree_.at(node).has(bit); }
    // At close: a cached page that a mark needs becomes the newest of its queue; nothing for others.
    void touch(NodeId node, LifeCycleId lc) {
        if (tree_.tails(node, lc) > 0) {
            pages_.requeue(node, lc);
        }
    }

    // ---- planned drops

    // Counts one plan on the node's page, which there is.
    [[nodiscard]] PlannedPage plan_page(NodeId node, LifeCycleId lc);
    // One plan is due; at the last one a cached page is removed.  Nothing when that very page is gone.
    void drop_page(const PlannedPage& planned);

    // ---- the whole

    // Removes every tree; nobody holds a node or owns a linked page.
    void clear();
    // Whether nobody owns a page of the tree.  O(nodes).
    [[nodiscard]] bool all_cached() const;

    // For snapshots: every node, roots too, depth first, children in token order, scopes ascending.
    [[nodiscard]] std::vector<NodeId> nodes_in_order() const { return tree_.nodes_in_order(); }
    [[nodiscard]] const ReuseScope& scope_of(NodeId node) const noexcept { return tree_.scope_of(node); }
    [[nodiscard]] std::uint32_t marks(NodeId node) const noexcept { return tree_.at(node).marks; }
    [[nodiscard]] std::int32_t tails(NodeId node, LifeCycleId lc) const noexcept { return tree_.tails(node, lc); }
    [[nodiscard]] std::int32_t plans(LifeCycleId lc, SlotId slot) const noexcept { return pages_.at(lc, slot).plans; }
    // Cached pages of a group in victim order.
    struct Queued {
        std::int32_t priority;
        std::int32_t victim_class;  // 0: A, 1: B
        SlotId slot;
    };
    [[nodiscard]] std::vector<Queued> queue_in_order(PoolGroupId group) const;
    [[nodiscard]] const DigestPool& digests() const noexcept { return digests_; }

    // What the open caches own, for audit().
    struct Owners {
        std::vector<std::vector<std::int32_t>> refs;  // [pool group][slot]: owners; 0 also for slots that are no pages
        std::vector<NodeId> last_nodes;               // of every open cache that has one; repeated
        std::vector<TokenSpan> tails;                 // encoded tokens that caches keep
    };
    // CorruptedError unless everything here fits together and fits the caches.  O(slots + nodes).
    void audit(const Owners& owners) const;

private:
    NodeId insert(NodeId parent, TokenSpan tokens);

    Tier* tier_;
    ReuseRules rules_;
    DigestPool digests_;
    RadixTree tree_;
    PageStore pages_;
    Retention retention_;
    Matcher matcher_;
    Reclaim reclaim_;
    std::vector<Token> query_scratch_;
};

}  // namespace kvpool
