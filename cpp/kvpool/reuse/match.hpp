// Which prefix of a query the tree can serve: the walk along equal blocks, and an end point at which every page that the next
// token needs is there.  A pure function of tree and query.
//
// Words
//   chain        nodes of the full blocks that equal the query's, from the scope's root
//   divergence   tokens that equal the query's, whatever pages there are: the chain, and the best agreement with a child behind
//   back-off D   tokens that a match stays away from the divergence
//   source       the node whose pages serve the block in which the end lies
//   legal end e  in block i: of block i the source covers the tokens below e, of every earlier block that is not stale at e a
//                page covers all, for each required life cycle; and the source's state is the one after exactly e tokens
// Policies
//   longest      the largest legal end, in whichever branch it lies: the last block that has one, the most tokens of it
//   reference    the divergence without D tokens, cut until it is legal
// Invariant: end <= hybrid <= divergence <= query.  Never shorter with longest than with reference.
// Cost of longest: one pass over the query's bytes, and as many nodes back as the first end that is legal needs.
#pragma once

#include <cstdint>
#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/core/tokens.hpp"
#include "kvpool/reuse/keys.hpp"
#include "kvpool/reuse/radix_tree.hpp"
#include "kvpool/reuse/rules.hpp"

namespace kvpool {

// Filled again by each match; keeps its capacity.
struct MatchResult {
    std::int64_t end = 0;         // tokens reused
    std::vector<NodeId> chain;    // nodes of the end's full blocks: chain.size() == end / tpb
    NodeId source = kNoNode;      // node that serves the last, partial block; kNoNode if end is a multiple of tpb
    std::int64_t divergence = 0;  // tokens
    std::int64_t hybrid = 0;      // end of the attention life cycles alone; == end without SSM

    void clear() noexcept {
        end = divergence = hybrid = 0;
        chain.clear();
        source = kNoNode;
    }
};

class Matcher {
public:
    // The tree outlives the matcher.
    explicit Matcher(const RadixTree& tree);

    // The prefix that the policy chooses.  ArgumentError for a negative token of a raw query.
    void match(const ReuseScope& scope, const Query& query, std::int64_t backoff, bool partial, MatchResult& out);
    // The walk alone: chain = all full nodes, source = the child behind them that shares most tokens with the query's next block
    // (without `partial`: one that equals the query's short last block), end = divergence.
    void walk(const ReuseScope& scope, const Query& query, bool partial, MatchResult& out);

    // Whether prompts can end where they could not without this node: in it, or with a back-off further up: some legal end on
    // the node's own path, back-off taken off, lies behind what the parent alone would give.  Not for roots.
    [[nodiscard]] bool serves_an_end(NodeId node) const noexcept;

private:
    struct End {
        std::int64_t end = 0;
        NodeId source = kNoNode;
    };
    // What a search has found out about one walk.
    struct Search {
        const Query& query;
        const MatchResult& walk;
        NodeId root;
        std::int64_t backoff;
        bool partial;
        bool with_state;  // whether the state life cycle counts
    };

    NodeId follow(const ReuseScope& scope, const Query& query, bool partial, MatchResult& out);

    [[nodiscard]] End longest(const Search& search);
    [[nodiscard]] End longest_in(const Search& search, std::int64_t ordinal);
    [[nodiscard]] End reference(const Search& search);
    [[nodiscard]] std::int64_t cut_at_state(std::int64_t end) const noexcept;
    [[nodiscard]] std::int64_t cut_at_page(std::int64_t end) const noexcept;

    // Whether an end in block `ordinal` of the walk finds the window pages that it needs.
    [[nodiscard]] bool has_windows(const Search& search, std::int64_t ordinal, std::int64_t end) noexcept;
    // The same, and more, for an end in a child of `parent`, whatever the walk.
    [[nodiscard]] bool is_legal_above(NodeId parent, std::int64_t end) const noexcept;
    // Most leading tokens of the block, up to `limit`, that its own pages can serve; 0: none.
    [[nodiscard]] std::int64_t end_in(NodeId node, std::int64_t limit, bool with_state) const noexcept;
    [[nodiscard]] bool covers(NodeId node, std::int64_t length) const noexcept;
    [[nodiscard]] bool is_whole(NodeId node, const ReuseRules::LifeCycleRule& rule) const noexcept {
        return rule.window_bit != 0 ? (tree_->at(node).summary.whole & rule.window_bit) != 0
                                    : tree_->coverage(node, rule.id) == tree_->at(node).num_tokens;
    }

    const RadixTree* tree_;
    const ReuseRules* rules_;
    std::int64_t tpb_;
    std::int64_t whole_blocks_ = 0;  // of the walk: behind that many blocks a prefix can not go on
    std::vector<std::int64_t>
        whole_from_;            // by required windowed life cycle: from here on to the block at hand all is there
    std::vector<NodeId> path_;  // of the reference policy
};

}  // namespace kvpool
