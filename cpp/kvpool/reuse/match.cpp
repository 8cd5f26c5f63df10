#include "kvpool/reuse/match.hpp"

#include <algorithm>

#include "kvpool/reuse/siblings.hpp"

namespace kvpool {

Matcher::Matcher(const RadixTree& tree)
    : tree_(&tree),
      rules_(&tree.rules()),
      tpb_(tree.tokens_per_block()),
      whole_from_(tree.rules().required_windowed.size()) {}

// ---- walk

NodeId Matcher::follow(const ReuseScope& scope, const Query& query, bool partial, MatchResult& out) {
    out.clear();
    const RadixTree& tree = *tree_;
    const auto tpb = static_cast<std::size_t>(tpb_);
    const NodeId root = tree.find_root(scope);
    RadixTree::Followed followed;
    if (root != kNoNode) {
        out.chain.resize(query.tokens.size() / tpb);
        followed = tree.follow(root, query, out.chain.data());
        out.chain.resize(followed.blocks);
    }
    const std::size_t k = followed.blocks;
    const NodeId node = k == 0 ? root : out.chain.back();
    whole_blocks_ = static_cast<std::int64_t>(followed.whole_blocks);
    query.check(k * tpb);
    out.end = static_cast<std::int64_t>(k) * tpb_;
    const Query rest = query.block(k, tpb);
    if (root != kNoNode && !rest.tokens.empty() && tree.at(node).num_children != 0) {
        if (partial) {
            const Siblings::Sibling best = Siblings(tree, node, Level::all, rest).next();
            out.source = best.node;
            out.end += best.shared;
        } else if (rest.tokens.size() < tpb) {
            out.source = tree.child(node, rest);
            out.end += out.source == kNoNode ? 0 : static_cast<std::int64_t>(rest.tokens.size());
        }
    }
    out.divergence = out.end;
    return root;
}

void Matcher::walk(const ReuseScope& scope, const Query& query, bool partial, MatchResult& out) {
    static_cast<void>(follow(scope, query, partial, out));
    out.hybrid = out.end;
}

void Matcher::match(const ReuseScope& scope, const Query& query, std::int64_t backoff, bool partial, MatchResult& out) {
    const NodeId root = follow(scope, query, partial, out);
    if (root == kNoNode) {
        return;
    }
    const auto choose = [&](bool with_state) {
        const Search search{query, out, root, backoff, partial, with_state};
        return rules_->longest ? longest(search) : reference(search);
    };
    const End best = choose(rules_->has_ssm());
    out.hybrid = rules_->has_ssm() ? choose(false).end : best.end;
    out.end = best.end;
    out.chain.resize(static_cast<std::size_t>(best.end / tpb_));
    out.source = best.end % tpb_ != 0 ? best.source : kNoNode;
}

// ---- longest

Matcher::End Matcher::longest(const Search& search) {
    std::fill(whole_from_.begin(), whole_from_.end(), search.walk.chain.size());
    for (std::int64_t ordinal = whole_blocks_; ordinal >= 0; --ordinal) {
        const End best = longest_in(search, ordinal);
        if (best.end != 0) {
            return best;
        }
    }
    return {};
}

Matcher::End Matcher::longest_in(const Search& search, std::int64_t ordinal) {
    const RadixTree& tree = *tree_;
    const std::vector<NodeId>& chain = search.walk.chain;
    const auto i = static_cast<std::size_t>(ordinal);
    const std::int64_t begin = ordinal * tpb_;
    const NodeId own = i < chain.size() ? chain[i] : kNoNode;
    End best;
    std::int64_t length = 0;
    const auto consider = [&](NodeId node, std::int64_t limit) {
        const std::int64_t m = end_in(node, limit, search.with_state);
        if (m > length && has_windows(search, ordinal, begin + m)) {
            length = m;
            best = {begin + m, node};
        }
    };
    if (own != kNoNode) {
        const std::int64_t limit = std::min(tpb_, search.walk.divergence - search.backoff - begin);
        if (limit <= 0) {
            return {};
        }
        consider(own, limit);
        if (length == tpb_) {
            return best;
        }
    }
    if (!search.partial) {
        if (own == kNoNode && search.walk.source != kNoNode) {
            const std::int64_t limit = tree.at(search.walk.source).num_tokens - search.backoff;
            if (limit > 0) {
                consider(search.walk.source, limit);
            }
        }
        return best;
    }
    const NodeId parent = i == 0 ? search.root : chain[i - 1];
    const Query block = search.query.block(i, static_cast<std::size_t>(tpb_));
    if (block.tokens.empty() || tree.at(parent).num_children == (own != kNoNode ? 1 : 0) ||
        !has_windows(search, ordinal, begin + tpb_)) {
        return best;  // nobody else, or not even the longest end in this block is legal
    }
    Siblings siblings(tree, parent, search.with_state ? Level::usable : Level::attention, block, own);
    for (Siblings::Sibling s = siblings.next(); s.node != kNoNode && s.shared - search.backoff > length;
         s = siblings.next()) {
        consider(s.node, s.shared - search.backoff);
    }
    return best;
}

bool Matcher::has_windows(const Search& search, std::int64_t ordinal, std::int64_t end) noexcept {
    const std::vector<NodeId>& chain = search.walk.chain;
    for (std::size_t w = 0; w < whole_from_.size(); ++w) {
        const ReuseRules::LifeCycleRule& rule = rules_->required_windowed[w];
        const std::int64_t first = rule.first_in_window(end, tpb_);
        std::int64_t& from = whole_from_[w];
        from = std::min(from, ordinal);
        while (from > first && is_whole(chain[static_cast<std::size_t>(from) - 1], rule)) {
            --from;
        }
        if (from > first) {
            return false;
        }
    }
    return true;
}

std::int64_t Matcher::end_in(NodeId node, std::int64_t limit, bool with_state) const noexcept {
    if (with_state) {  // a state is good for one length only
        const std::int64_t saved = tree_->coverage(node, rules_->ssm);
        return saved <= limit && covers(node, saved) ? saved : 0;
    }
    if (limit == tpb_ && covers(node, limit)) {
        return limit;
    }
    for (const ReuseRules::LifeCycleRule& rule : rules_->required) {
        limit = std::min(limit, tree_->coverage(node, rule.id));
    }
    return limit;
}

bool Matcher::covers(NodeId node, std::int64_t length) const noexcept {
    for (const ReuseRules::LifeCycleRule& rule : rules_->required) {
        const bool is_stale = length == tpb_ && rule.key.window == 1 && !rule.is_full_like(tree_->at(node).ordinal);
        if (!is_stale && tree_->coverage(node, rule.id) < length) {
            return false;
        }
    }
    return true;
}

// ---- reference

Matcher::End Matcher::reference(const Search& search) {
    path_.assign(search.walk.chain.begin(), search.walk.chain.end());
    if (search.walk.source != kNoNode) {
        path_.push_back(search.walk.source);
    }
    std::int64_t end = std::max<std::int64_t>(0, search.walk.divergence - search.backoff);
    while (end != 0) {
        std::int64_t shorter = search.with_state ? cut_at_state(end) : end;
        if (shorter != 0) {
            shorter = cut_at_page(shorter);
        }
        if (shorter == end) {
            return {end, path_[static_cast<std::size_t>((end - 1) / tpb_)]};
        }
        end = shorter;
    }
    return {};
}

std::int64_t Matcher::cut_at_state(std::int64_t end) const noexcept {
    for (std::int64_t ordinal = (end - 1) / tpb_; ordinal >= 0; --ordinal) {
        const std::int64_t saved = tree_->coverage(path_[static_cast<std::size_t>(ordinal)], rules_->ssm);
        if (saved > 0 && saved <= end - ordinal * tpb_) {
            return ordinal * tpb_ + saved;
        }
    }
    return 0;
}

std::int64_t Matcher::cut_at_page(std::int64_t end) const noexcept {
    const std::int64_t last = (end - 1) / tpb_;
    for (const ReuseRules::LifeCycleRule& rule : rules_->required) {
        const HalfOpenRange stale = stale_range(rule.key, tpb_, end);
        for (std::int64_t ordinal = 0; ordinal <= last; ++ordinal) {
            ordinal = ordinal == stale.beg ? std::max(ordinal, stale.end) : ordinal;
            if (ordinal > last) {
                break;
            }
            const std::int64_t covered = tree_->coverage(path_[static_cast<std::size_t>(ordinal)], rule.id);
            if (covered < std::min(tpb_, end - ordinal * tpb_)) {
                return ordinal * tpb_ + covered;
            }
        }
    }
    return end;
}

// ---- legality off a walk

bool Matcher::is_legal_above(NodeId parent, std::int64_t end) const noexcept {
    for (const ReuseRules::LifeCycleRule& rule : rules_->required_windowed) {
        const std::int64_t first = rule.first_in_window(end, tpb_);
        for (NodeId node = parent; tree_->at(node).ordinal >= first; node = tree_->at(node).parent) {
            if (!is_whole(node, rule)) {
                return false;
            }
        }
    }
    return tree_->is_whole_down_to(parent);
}

bool Matcher::serves_an_end(NodeId node) const noexcept {
    const std::int64_t top = tree_->end_of(node) - rules_->backoff;
    const std::int64_t floor = std::max<std::int64_t>(0, tree_->begin_of(node) - rules_->backoff);
    while (top > floor && !tree_->at(node).is_root()) {
        const std::int64_t begin = tree_->begin_of(node);
        if (top > begin) {
            const std::int64_t limit = std::min<std::int64_t>(tree_->at(node).num_tokens, top - begin);
            const std::int64_t end = begin + end_in(node, limit, rules_->has_ssm());
            if (end > std::max(begin, floor) && is_legal_above(tree_->at(node).parent, end)) {
                return true;
            }
        }
        if (begin <= floor) {
            return false;
        }
        node = tree_->at(node).parent;
    }
    return false;
}

}  // namespace kvpool
