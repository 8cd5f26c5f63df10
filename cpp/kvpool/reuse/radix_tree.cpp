#include "kvpool/reuse/radix_tree.hpp"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool {

static_assert(sizeof(Node) == 104, "the part of a node that a walk reads lies in 64 bytes");
static_assert(std::is_standard_layout_v<Node> && std::is_trivially_copyable_v<Node>);

namespace {

constexpr std::int64_t kManyNodes = 4096;  // whose records fill a good part of a huge page

}  // namespace

RadixTree::RadixTree(const ReuseRules& rules, DigestPool& digests, Journal& journal, std::int64_t expected_nodes)
    : rules_(&rules),
      digests_(&digests),
      journal_(&journal),
      tokens_per_block_(rules.tokens_per_block),
      tokens_offset_(sizeof(Node) + rules.life_cycles.size() * sizeof(Link)),
      num_required_(static_cast<std::uint16_t>(std::count_if(rules.required.begin(), rules.required.end(),
                                                             [](const auto& rule) { return rule.key.window != 1; }))),
      num_levels_(rules.has_ssm() ? 3 : 2),
      records_(
          (tokens_offset_ + static_cast<std::size_t>(rules.tokens_per_block) * sizeof(Token) + 7) & ~std::size_t{7},
          expected_nodes >= kManyNodes) {
    if (rules.life_cycles.size() > std::numeric_limits<std::uint16_t>::max()) {
        throw UnsupportedError("more than 65535 layer groups");
    }
}

// ---- look-up

NodeId RadixTree::find_root(const ReuseScope& scope) const noexcept {
    std::int32_t node = root_;
    while (node != kNil) {
        const Node& n = at(NodeId(node));
        const auto way = scope <=> scopes_[n.scope].scope;
        if (way == 0) {
            break;
        }
        node = way < 0 ? n.links[0].left : n.links[0].right;
    }
    return NodeId(node);
}

int RadixTree::compare(const Query& query, NodeId node) const noexcept {
    const TokenSpan theirs = tokens(node);
    const std::size_t i = common_prefix(query.tokens, theirs);
    if (i < query.tokens.size() && i < theirs.size()) {
        return digests_->compare(query.tokens[i], query, theirs[i]);
    }
    return query.tokens.size() < theirs.size() ? -1 : static_cast<int>(query.tokens.size() > theirs.size());
}

bool RadixTree::is_equal(const Query& query, NodeId node) const noexcept {
    const TokenSpan theirs = tokens(node);
    return query.tokens.size() == theirs.size() && !(query.raw && at(node).has_digests) &&
           equal_tokens(query.tokens.data(), theirs.data(), theirs.size());
}

NodeId RadixTree::child(NodeId parent, const Query& query) const noexcept {
    NodeId node = at(parent).child(Level::all);
    while (node != kNoNode && !is_equal(query, node)) {
        const TreapLinks& links = at(node).links[0];
        if (links.left == kNil && links.right == kNil) {
            return kNoNode;
        }
        const int way = compare(query, node);
        node = NodeId(way < 0 ? links.left : way > 0 ? links.right : kNil);
    }
    return node;
}

RadixTree::Followed RadixTree::follow(NodeId root, const Query& query, NodeId* chain) const noexcept {
    const auto tpb = static_cast<std::size_t>(tokens_per_block_);
    const std::size_t num_blocks = query.tokens.size() / tpb;
    const Token* block = query.tokens.data();
    Followed followed;
    NodeId node = root;
    const std::byte* place = record(root);
    for (std::size_t k = 0; k < num_blocks; ++k, block += tpb) {
        NodeId next = reinterpret_cast<const Node*>(place)->child(Level::all);
        if (next == kNoNode) {
            break;
        }
        // Nodes of a sequence were mostly made one behind the other. Looking there first, by a branch that is predicted, lets
        // the loads of one node begin before those of the one above have ended.
        const std::byte* const behind = records_.behind(node.value(), place);
        place = next.value() == node.value() + 1 && behind != nullptr ? behind : record(next);
        const auto* n = reinterpret_cast<const Node*>(place);
        if (n->num_tokens != tokens_per_block_ || (query.raw && n->has_digests) ||
            !equal_tokens(block, reinterpret_cast<const Token*>(place + tokens_offset_), tpb)) {
            next = child(node, query.block(k, tpb));  // among its siblings
            if (next == kNoNode) {
                break;
            }
            place = record(next);
            n = reinterpret_cast<const Node*>(place);
        }
        followed.whole_blocks += followed.whole_blocks == k && n->summary.lacking_full_like == 0 ? 1 : 0;
        followed.blocks = k + 1;
        chain[k] = next;
        node = next;
    }
    return followed;
}

TreapPlace RadixTree::place(NodeId parent, Level level, const Query& query) const noexcept {
    const Access<const RadixTree> access{*this, level};
    return treap_place(at(parent).child(level).value(), access,
                       [&](std::int32_t other) { return compare(query, NodeId(other)); });
}

NodeId RadixTree::covering_child(NodeId parent, TokenSpan tokens) const noexcept {
    const NodeId node(place(parent, Level::all, Query::encoded(tokens)).from);
    return node != kNoNode && common_prefix(tokens, this->tokens(node)) == tokens.size() ? node : kNoNode;
}

NodeId RadixTree::covered_child(NodeId parent, TokenSpan tokens) const noexcept {
    const NodeId node(place(parent, Level::all, Query::encoded(tokens)).before);
    return node != kNoNode && common_prefix(tokens, this->tokens(node)) == this->tokens(node).size() ? node : kNoNode;
}

NodeId RadixTree::first_child(NodeId parent) const noexcept {
    NodeId node = at(parent).child(Level::all);
    while (node != kNoNode && at(node).links[0].left != kNil) {
        node = NodeId(at(node).links[0].left);
    }
    return node;
}

NodeId RadixTree::next_sibling(NodeId node) const noexcept {
    if (at(at(node).parent).num_children == 1) {
        return kNoNode;
    }
    const Access<const RadixTree> access{*this, Level::all};
    const Query query = Query::encoded(tokens(node));
    return NodeId(treap_after(at(at(node).parent).child(Level::all).value(), access,
                              [&](std::int32_t other) { return compare(query, NodeId(other)); }));
}

std::vector<NodeId> RadixTree::roots_in_order() const {
    std::vector<NodeId> roots;
    std::vector<std::int32_t> stack;
    for (std::int32_t node = root_; node != kNil || !stack.empty();) {
        for (; node != kNil; node = at(NodeId(node)).links[0].left) {
            stack.push_back(node);
        }
        roots.emplace_back(stack.back());
        node = at(NodeId(stack.back())).links[0].right;
        stack.pop_back();
    }
    return roots;
}

std::vector<NodeId> RadixTree::nodes_in_order() const {
    std::vector<NodeId> nodes;
    std::vector<NodeId> stack = roots_in_order();
    std::reverse(stack.begin(), stack.end());
    while (!stack.empty()) {
        const NodeId node = stack.back();
        stack.pop_back();
        nodes.push_back(node);
        const auto first = static_cast<std::ptrdiff_t>(stack.size());
        for (NodeId c = first_child(node); c != kNoNode; c = next_sibling(c)) {
            stack.push_back(c);
        }
        std::reverse(stack.begin() + first, stack.end());
    }
    return nodes;
}

const ReuseScope& RadixTree::scope_of(NodeId node) const noexcept {
    while (!at(node).is_root()) {
        node = at(node).parent;
    }
    return scopes_[at(node).scope].scope;
}

void RadixTree::path_tokens(NodeId node, Token* out) const noexcept {
    for (; !at(node).is_root(); node = at(node).parent) {
        const TokenSpan block = tokens(node);
        std::memcpy(out + begin_of(node), block.data(), block.size_bytes());
    }
}

const BlockKey& RadixTree::key(NodeId node) {
    std::vector<NodeId> missing;
    for (NodeId upper = node; upper != kNoNode && !at(upper).has_key; upper = at(upper).parent) {
        missing.push_back(upper);
    }
    for (; !missing.empty(); missing.pop_back()) {
        Node& n = edit(missing.back());
        n.key = n.is_root() ? root_key(scopes_[n.scope].scope)
                            : block_key(at(n.parent).key, Query::encoded(tokens(missing.back())), *digests_);
        n.has_key = true;
    }
    return at(node).key;
}

bool RadixTree::is_whole_down_to(NodeId node) const noexcept {
    if (num_broken_ == 0) {
        return at(node).summary.lacking_full_like == 0;  // it may have no children
    }
    while (!at(node).is_root() && at(node).summary.lacking_full_like == 0) {
        node = at(node).parent;
    }
    return at(node).is_root();
}

// ---- nodes

// What is the same in every new node; the key and the links count only when set.
void RadixTree::clear(Node& node) noexcept {
    node.num_children = 0;
    node.holders = 0;
    node.marks = 0;
    node.has_key = false;
    node.roots.fill(kNil);
}

NodeId RadixTree::make_root(const ReuseScope& scope) {
    NodeId root = find_root(scope);
    if (root != kNoNode) {
        return root;
    }
    root = NodeId(records_.take(*journal_));
    Node& n = edit(root);  // nobody had the record in this call: written past the journal
    clear(n);
    n.parent = kNoNode;
    n.ordinal = -1;
    n.num_tokens = 0;
    n.has_digests = false;
    n.summary = {};
    n.scope = scopes_.take(*journal_);
    scopes_[n.scope].scope = scope;
    clear_links(root);
    Access<RadixTree> access{*this, Level::all};
    treap_insert(*journal_, root_, root.value(), access,
                 [&](std::int32_t other) { return scope < scopes_[at(NodeId(other)).scope].scope ? -1 : 1; });
    return root;
}

NodeId RadixTree::add(NodeId parent, TokenSpan tokens) {
    const NodeId node(records_.take(*journal_));
    Node& n = edit(node);  // nobody had the record in this call: written past the journal
    clear(n);
    n.parent = parent;
    n.ordinal = at(parent).ordinal + 1;
    n.num_tokens = static_cast<std::int32_t>(tokens.size());
    n.has_digests = has_digests(tokens);
    Journal::store(n.summary, {0, full_like_at(n.ordinal), num_required_});
    clear_links(node);
    std::memcpy(record(node) + tokens_offset_, tokens.data(), tokens.size_bytes());
    if (n.has_digests) {
        digests_->retain(tokens);
    }
    enter(node, Level::all);
    if (num_required_ == 0) {
        enter(node, Level::attention);
    }
    count_child(parent, 1);
    return node;
}

void RadixTree::remove(NodeId node) {
    Node& n = edit(node);
    if (n.is_root()) {
        Access<RadixTree> access{*this, Level::all};
        const ReuseScope& scope = scopes_[n.scope].scope;
        treap_erase(*journal_, root_, node.value(), access,
                    [&](std::int32_t other) { return scope < scopes_[at(NodeId(other)).scope].scope ? -1 : 1; });
        scopes_.give(*journal_, n.scope);
    } else {
        if (is_in(node, Level::attention)) {
            leave(node, Level::attention);
        }
        leave(node, Level::all);
        count_child(n.parent, -1);
        if (n.has_digests) {
            digests_->release(tokens(node));
        }
    }
    records_.give(*journal_, node.value());
}

void RadixTree::count_child(NodeId parent, std::int32_t n) {
    Node& node = edit(parent);
    const bool was_broken = counts_as_broken(node);
    journal_->add(node.num_children, n);
    if (was_broken != counts_as_broken(node)) {
        journal_->add(num_broken_, was_broken ? -1 : 1);
    }
}

void RadixTree::clear_links(NodeId node) noexcept {
    for (std::size_t i = 0; i < rules_->life_cycles.size(); ++i) {
        Link& l = link_of(node, make_id<LifeCycleId>(i));
        Journal::store(l.page, {kBadSlot, 0});
        l.tails = 0;
    }
}

void RadixTree::enter(NodeId node, Level level) {
    const auto i = static_cast<std::size_t>(level);
    Node& n = edit(node);
    std::int32_t& root = edit(n.parent).roots[i];
    if (root == kNil) {  // by far the most frequent
        journal_->set(root, node.value());
        journal_->set(n.links[i], {});
        return;
    }
    Access<RadixTree> access{*this, level};
    const Query query = Query::encoded(tokens(node));
    treap_insert(*journal_, root, node.value(), access,
                 [&](std::int32_t other) { return compare(query, NodeId(other)); });
}

void RadixTree::leave(NodeId node, Level level) {
    Access<RadixTree> access{*this, level};
    const Query query = Query::encoded(tokens(node));
    treap_erase(*journal_, edit(at(node).parent).roots[static_cast<std::size_t>(level)], node.value(), access,
                [&](std::int32_t other) { return compare(query, NodeId(other)); });
}

std::uint16_t RadixTree::full_like_at(std::int64_t ordinal) const noexcept {
    std::uint16_t n = 0;
    for (const ReuseRules::LifeCycleRule& rule : rules_->required) {
        n = static_cast<std::uint16_t>(n + (rule.is_full_like(ordinal) ? 1 : 0));
    }
    return n;
}

// ---- links

void RadixTree::set_page(NodeId node, LifeCycleId lc, SlotId slot, std::int64_t coverage) {
    Node& n = edit(node);
    Link& l = link_of(node, lc);
    const ReuseRules::LifeCycleRule& rule = rules_->of(lc);
    const bool had_page = l.page.slot != kBadSlot;
    const bool has_page = slot != kBadSlot;
    const bool was_whole = l.page.coverage == n.num_tokens;
    const bool is_whole = coverage == n.num_tokens;
    const bool is_required = !rule.key.is_ssm && !rule.key.optional;
    const Node::Summary before = n.summary;
    Node::Summary after = before;
    if (is_required && had_page != has_page && rule.key.window != 1) {
        after.lacking_required = static_cast<std::uint16_t>(before.lacking_required + (has_page ? -1 : 1));
    }
    if (was_whole != is_whole) {
        after.whole ^= rule.window_bit;
        if (is_required && rule.is_full_like(n.ordinal)) {
            after.lacking_full_like = static_cast<std::uint16_t>(before.lacking_full_like + (is_whole ? -1 : 1));
        }
    }
    const std::int64_t state_before = num_levels_ > 2 ? this->coverage(node, rules_->ssm) : 0;
    journal_->set(l.page, {slot, static_cast<std::int32_t>(coverage)});
    journal_->set(n.summary, after);
    if (n.num_children != 0 && (before.lacking_full_like != 0) != (after.lacking_full_like != 0)) {
        journal_->add(num_broken_, after.lacking_full_like != 0 ? 1 : -1);
    }
    update_level(node, Level::attention, belongs(before, 0, Level::attention), belongs(after, 0, Level::attention));
    if (num_levels_ > 2) {
        const std::int64_t state = rule.key.is_ssm ? coverage : state_before;
        update_level(node, Level::usable, belongs(before, state_before, Level::usable),
                     belongs(after, state, Level::usable));
    }
}

void RadixTree::update_level(NodeId node, Level level, bool was_in, bool is_in) {
    if (was_in != is_in) {
        is_in ? enter(node, level) : leave(node, level);
    }
}

}  // namespace kvpool
