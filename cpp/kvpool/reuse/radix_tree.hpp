// The tree of committed blocks: one root per scope, a node per block, the path from the root spells the tokens before it.
//
// Words
//   full, partial  a node with tokens_per_block tokens, or fewer; only full ones have children
//   child order    by tokens; no child's tokens are a prefix of another's
//   link           what a node knows of a page: slot, coverage (leading tokens of the block that the page holds; a state: after
//                  exactly so many) and tails (marks that need the page, see retention)
//   level          a set of a node's children: all of them; those usable for attention, which have pages of every required life
//                  cycle but windows of 1; those usable, which have a state besides if there is a state life cycle
// Invariants
//   a record lives exactly while its node is attached;  an ancestor of a held node has children, so neither is removed
//   bit rule.window_bit of `whole` is set  <=>  coverage of that life cycle == num_tokens
//   lacking_full_like = full-like life cycles of the ordinal whose coverage != num_tokens
//   num_broken_ = nodes with children and with lacking_full_like != 0
// A node is one record: Node, a Link per life cycle, the tokens; under 4 * tokens_per_block + 12 * life cycles + 112 bytes.
// Walking down a chain takes the same instructions whatever else is in the tree; among n siblings O(log n) comparisons.  Nodes
// name pages by slot ids; whose slots they are is not the tree's business.  All changes but cached keys go through the journal.
// Not thread safe: used under the manager's lock.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <vector>

#include "kvpool/core/digest_pool.hpp"
#include "kvpool/core/ids.hpp"
#include "kvpool/core/journal.hpp"
#include "kvpool/core/slab.hpp"
#include "kvpool/core/tokens.hpp"
#include "kvpool/core/treap.hpp"
#include "kvpool/reuse/keys.hpp"
#include "kvpool/reuse/rules.hpp"

namespace kvpool {

// Why an end in a node is likely to be asked for again; bits of Node::marks.
enum class Mark : std::uint8_t {
    sequence = 1,  // a closed cache ended here
    prompt = 2,    // a prompt ended here
    fork = 4,      // sequences go apart here
};

enum class Level : std::uint8_t { all, attention, usable };

struct Node {
    NodeId parent;  // kNoNode: a root
    std::int32_t ordinal;
    std::int32_t num_tokens;  // 0: a root
    std::int32_t num_children;
    std::int32_t holders;  // caches whose last node this is
    std::uint8_t marks;
    bool has_digests;  // among its tokens
    bool has_key;
    std::array<std::int32_t, 3> roots;  // children, by level
    std::array<TreapLinks, 3> links;    // among the parent's children, by level; [0] of a root: among the roots
    // Changed together: one entry of the journal.
    struct Summary {
        std::uint32_t whole;              // required windowed life cycles whose page covers the block
        std::uint16_t lacking_full_like;  // 0: a prefix can go on behind this block
        std::uint16_t lacking_required;   // required attention life cycles without a page, windows of 1 aside
    } summary;
    std::int32_t scope;  // roots: of the tree's scopes
    BlockKey key;        // counts if has_key

    [[nodiscard]] bool is_root() const noexcept { return parent == kNoNode; }
    [[nodiscard]] bool has(Mark mark) const noexcept { return (marks & static_cast<std::uint8_t>(mark)) != 0; }
    [[nodiscard]] NodeId child(Level level) const noexcept { return NodeId(roots[static_cast<std::size_t>(level)]); }
};

class RadixTree {
public:
    // Rules, digests and journal outlive the tree.  `expected_nodes`: about how many there may be.  UnsupportedError for more
    // than 65535 life cycles.
    RadixTree(const ReuseRules& rules, DigestPool& digests, Journal& journal, std::int64_t expected_nodes = 0);

    [[nodiscard]] std::int64_t tokens_per_block() const noexcept { return tokens_per_block_; }
    [[nodiscard]] const ReuseRules& rules() const noexcept { return *rules_; }
    [[nodiscard]] const DigestPool& digests() const noexcept { return *digests_; }
    [[nodiscard]] const Node& at(NodeId node) const noexcept { return *reinterpret_cast<const Node*>(record(node)); }
    [[nodiscard]] const Token* token_data(NodeId node) const noexcept {
        return reinterpret_cast<const Token*>(record(node) + tokens_offset_);
    }
    [[nodiscard]] TokenSpan tokens(NodeId node) const noexcept {
        return {token_data(node), static_cast<std::size_t>(at(node).num_tokens)};
    }
    [[nodiscard]] SlotId page(NodeId node, LifeCycleId lc) const noexcept { return link(node, lc).page.slot; }
    [[nodiscard]] std::int64_t coverage(NodeId node, LifeCycleId lc) const noexcept {
        return link(node, lc).page.coverage;
    }
    [[nodiscard]] std::int32_t tails(NodeId node, LifeCycleId lc) const noexcept { return link(node, lc).tails; }
    [[nodiscard]] std::int64_t begin_of(NodeId node) const noexcept { return at(node).ordinal * tokens_per_block_; }
    // Tokens from the root to the end of the node.
    [[nodiscard]] std::int64_t end_of(NodeId node) const noexcept {
        const Node& n = at(node);
        return n.is_root() ? 0 : n.ordinal * tokens_per_block_ + n.num_tokens;
    }

    // ---- look-up

    [[nodiscard]] NodeId find_root(const ReuseScope& scope) const noexcept;
    // The child with exactly these tokens; kNoNode without.
    [[nodiscard]] NodeId child(NodeId parent, TokenSpan tokens) const noexcept {
        return child(parent, Query::encoded(tokens));
    }
    [[nodiscard]] NodeId child(NodeId parent, const Query& query) const noexcept;
    // Full nodes that equal the query's blocks, from a root downward, into chain[0 .. number of full blocks); how many, and how
    // many before the first that a prefix can not go on behind.
    struct Followed {
        std::size_t blocks = 0;
        std::size_t whole_blocks = 0;
    };
    [[nodiscard]] Followed follow(NodeId root, const Query& query, NodeId* chain) const noexcept;
    // The first child in token order that has these tokens or begins with them; kNoNode without.
    [[nodiscard]] NodeId covering_child(NodeId parent, TokenSpan tokens) const noexcept;
    // The child whose tokens are a strict prefix of these: at most one, a leaf; kNoNode without.
    [[nodiscard]] NodeId covered_child(NodeId parent, TokenSpan tokens) const noexcept;
    // Children of one level in token order: the first one, and the one behind `node`; kNoNode without.
    [[nodiscard]] NodeId first_child(NodeId parent) const noexcept;
    [[nodiscard]] NodeId next_sibling(NodeId node) const noexcept;
    // The only child, if there is exactly one; kNoNode else.
    [[nodiscard]] NodeId only_child(NodeId node) const noexcept {
        return at(node).num_children == 1 ? at(node).child(Level::all) : kNoNode;
    }
    // Roots in the order of their scopes; all nodes, depth first, scopes and children in order.
    [[nodiscard]] std::vector<NodeId> roots_in_order() const;
    [[nodiscard]] std::vector<NodeId> nodes_in_order() const;
    [[nodiscard]] const ReuseScope& scope_of(NodeId node) const noexcept;
    void path_tokens(NodeId node, Token* out) const noexcept;
    // Chain key; made when first asked for.
    [[nodiscard]] const BlockKey& key(NodeId node);

    // Order of the query's tokens against the node's.
    [[nodiscard]] int compare(const Query& query, NodeId node) const noexcept;
    [[nodiscard]] bool is_equal(const Query& query, NodeId node) const noexcept;

    // ---- nodes

    [[nodiscard]] NodeId make_root(const ReuseScope& scope);
    // A new child without pages; the caller has looked for one that it may not stand beside.
    [[nodiscard]] NodeId add(NodeId parent, TokenSpan tokens);
    // Takes a node out that has no children, links, marks or holders; also a root.
    void remove(NodeId node);
    void add_holder(NodeId node, std::int32_t n) { journal_->add(edit(node).holders, n); }
    void set_marks(NodeId node, std::uint8_t marks) { journal_->set(edit(node).marks, marks); }

    // ---- links

    // Slot kBadSlot and coverage 0: no page.
    void set_page(NodeId node, LifeCycleId lc, SlotId slot, std::int64_t coverage);
    void add_tail(NodeId node, LifeCycleId lc, std::int32_t n) { journal_->add(link_of(node, lc).tails, n); }

    // Whether every full-like page of the node and all above it covers its block.  O(1) if that is so in the whole tree.
    [[nodiscard]] bool is_whole_down_to(NodeId node) const noexcept;

    // CorruptedError if an invariant is broken.
    void audit() const;

private:
    friend class Siblings;

    struct Link {
        // Changed together: one entry of the journal.
        struct Page {
            SlotId slot;
            std::int32_t coverage;
        } page;
        std::int32_t tails;
    };
    struct Scope {
        std::int32_t link;  // the slab's
        ReuseScope scope;
    };
    template <class Tree>
    struct Access {
        Tree& tree;
        Level level;
        [[nodiscard]] auto& links(std::int32_t node) const noexcept {
            return tree.edit(NodeId(node)).links[static_cast<std::size_t>(level)];
        }
    };

    [[nodiscard]] std::byte* record(NodeId node) const noexcept { return records_.at(node.value()); }
    [[nodiscard]] Node& edit(NodeId node) noexcept { return *reinterpret_cast<Node*>(record(node)); }
    [[nodiscard]] const Node& edit(NodeId node) const noexcept { return at(node); }
    [[nodiscard]] Link& link_of(NodeId node, LifeCycleId lc) noexcept {
        return reinterpret_cast<Link*>(record(node) + sizeof(Node))[lc.index()];
    }
    [[nodiscard]] const Link& link(NodeId node, LifeCycleId lc) const noexcept {
        return reinterpret_cast<const Link*>(record(node) + sizeof(Node))[lc.index()];
    }
    [[nodiscard]] TreapPlace place(NodeId parent, Level level, const Query& query) const noexcept;
    static void clear(Node& node) noexcept;
    void clear_links(NodeId node) noexcept;
    void enter(NodeId node, Level level);
    void leave(NodeId node, Level level);
    // Whether a node with this summary and state belongs to a level.
    [[nodiscard]] bool belongs(const Node::Summary& summary, std::int64_t state, Level level) const noexcept {
        return summary.lacking_required == 0 && (level != Level::usable || state > 0);
    }
    [[nodiscard]] bool is_in(NodeId node, Level level) const noexcept {
        return belongs(at(node).summary, rules_->has_ssm() ? coverage(node, rules_->ssm) : 0, level);
    }
    void update_level(NodeId node, Level level, bool was_in, bool is_in);
    [[nodiscard]] std::uint16_t full_like_at(std::int64_t ordinal) const noexcept;
    void count_child(NodeId parent, std::int32_t n);
    [[nodiscard]] static bool counts_as_broken(const Node& node) noexcept {
        return node.summary.lacking_full_like != 0 && node.num_children != 0;
    }
    void audit_children(NodeId parent) const;
    void audit_node(NodeId node) const;

    const ReuseRules* rules_;
    DigestPool* digests_;
    Journal* journal_;
    std::int64_t tokens_per_block_;
    std::size_t tokens_offset_;
    std::uint16_t num_required_;  // as Node::lacking_required of a node without pages
    std::size_t num_levels_;      // all, attention, and usable if there is a state life cycle
    RecordSlab records_;
    Slab<Scope> scopes_;
    std::int32_t root_ = kNil;  // roots, by scope
    std::int64_t num_broken_ = 0;
};

}  // namespace kvpool
