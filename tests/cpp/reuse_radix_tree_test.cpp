#include "kvpool/reuse/radix_tree.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "kvpool/reuse/siblings.hpp"
#include "page_support.hpp"

namespace kvpool {
namespace {

using testing_pages::config_of;
using testing_pages::layer;
using testing_pages::Tokens;

struct Bed {
    explicit Bed(std::vector<LayerConfig> layers = {layer(0)}, std::int64_t tpb = 4)
        : rules(ReuseRules::make(build_layout(config_of(layers, tpb)), config_of(layers, tpb))) {
        journal.begin();
        root = tree.make_root({});
    }
    Journal journal;
    ReuseRules rules;
    DigestPool digests{journal};
    RadixTree tree{rules, digests, journal};
    NodeId root;

    [[nodiscard]] std::vector<Tokens> children(NodeId parent) const {
        std::vector<Tokens> all;
        for (NodeId c = tree.first_child(parent); c != kNoNode; c = tree.next_sibling(c)) {
            all.emplace_back(tree.tokens(c).begin(), tree.tokens(c).end());
        }
        return all;
    }
};

bool is_prefix(const Tokens& a, const Tokens& b) {
    return a.size() <= b.size() && std::equal(a.begin(), a.end(), b.begin());
}

std::int64_t shared(const Tokens& a, TokenSpan b) { return static_cast<std::int64_t>(common_prefix(a, b)); }

TEST(RadixTree, OneRootPerScope) {
    Bed bed;
    const NodeId other = bed.tree.make_root({.lora_id = 0, .salt = {}});
    const NodeId third = bed.tree.make_root({.lora_id = {}, .salt = 9});
    EXPECT_EQ(bed.tree.make_root({.lora_id = 0, .salt = {}}), other);
    EXPECT_EQ(bed.tree.find_root({}), bed.root);
    EXPECT_EQ(bed.tree.find_root({.lora_id = 1, .salt = {}}), kNoNode);
    EXPECT_EQ(bed.tree.roots_in_order(), (std::vector<NodeId>{bed.root, third, other}));
    bed.tree.remove(bed.root);
    EXPECT_EQ(bed.tree.find_root({}), kNoNode);
    EXPECT_EQ(bed.tree.nodes_in_order().size(), 2u);
    bed.tree.audit();
}

TEST(RadixTree, FindsEqualCoveringAndCoveredChildren) {
    Bed bed;
    const NodeId a = bed.tree.add(bed.root, Tokens{1, 2, 3, 4});
    const NodeId b = bed.tree.add(bed.root, Tokens{1, 2, 3, 5});
    const NodeId c = bed.tree.add(bed.root, Tokens{2, 7});
    EXPECT_EQ(bed.tree.child(bed.root, Tokens{1, 2, 3, 5}), b);
    EXPECT_EQ(bed.tree.child(bed.root, Tokens{1, 2, 3}), kNoNode);
    EXPECT_EQ(bed.tree.covering_child(bed.root, Tokens{1, 2, 3}), a);  // the first of two
    EXPECT_EQ(bed.tree.covering_child(bed.root, Tokens{2, 7}), c);
    EXPECT_EQ(bed.tree.covering_child(bed.root, Tokens{2, 7, 1}), kNoNode);
    EXPECT_EQ(bed.tree.covered_child(bed.root, Tokens{2, 7, 1}), c);
    EXPECT_EQ(bed.tree.covered_child(bed.root, Tokens{2, 7}), kNoNode);
    EXPECT_EQ(bed.tree.covered_child(bed.root, Tokens{1, 2, 3, 6}), kNoNode);
    EXPECT_EQ(bed.tree.only_child(bed.root), kNoNode);
    bed.tree.audit();
}

TEST(RadixTree, ChildrenAreInTokenOrderWithDigestsLast) {
    Bed bed;
    std::vector<Digest> digests(3);
    digests[0][0] = 9;
    digests[1][0] = 2;
    digests[2][31] = 1;
    Tokens d(3);
    bed.digests.intern(Tokens{-1, -2, -3}, digests, d.data());
    const std::vector<Tokens> expected{{0}, {5, 1}, {5, d[2]}, {5, d[1]}, {2147483647}, {d[2], 3}, {d[1]}, {d[0]}};
    std::vector<Tokens> shuffled = expected;
    std::mt19937 random(3);
    std::shuffle(shuffled.begin(), shuffled.end(), random);
    for (const Tokens& tokens : shuffled) {
        static_cast<void>(bed.tree.add(bed.root, tokens));
    }
    EXPECT_EQ(bed.children(bed.root), expected);
    EXPECT_EQ(bed.digests.refs(digests[0]), 2);
    bed.tree.audit();

    // A raw query has no digests: nothing with one equals it, whatever the numbers.
    const Tokens raw{d[0]};
    EXPECT_EQ(bed.tree.child(bed.root, {.tokens = raw, .raw = true, .unknown = {}, .name = ""}), kNoNode);
    EXPECT_NE(bed.tree.child(bed.root, Query::encoded(raw)), kNoNode);
}

TEST(RadixTree, SiblingsComeOutward) {
    std::mt19937 random(11);
    for (int round = 0; round < 300; ++round) {
        Bed bed;
        std::vector<Tokens> tokens;
        const auto draw = [&](std::size_t n) {
            Tokens t(n);
            for (Token& token : t) {
                token = static_cast<Token>(random() % 3);
            }
            return t;
        };
        for (int i = 0; i < 12; ++i) {
            const Tokens t = draw(1 + random() % 4);
            if (std::none_of(tokens.begin(), tokens.end(),
                             [&](const Tokens& o) { return is_prefix(o, t) || is_prefix(t, o); })) {
                static_cast<void>(bed.tree.add(bed.root, t));
                tokens.push_back(t);
            }
        }
        std::sort(tokens.begin(), tokens.end());
        const Tokens query = draw(1 + random() % 4);
        const NodeId except = random() % 2 == 0 ? bed.tree.child(bed.root, tokens[random() % tokens.size()]) : kNoNode;
        // The definition: by shared tokens; then smaller ones before larger ones than the query; then nearer ones.
        struct Candidate {
            std::int64_t shared;
            bool is_above;
            std::ptrdiff_t distance;
            Tokens tokens;
        };
        std::vector<Candidate> expected;
        const auto place = std::lower_bound(tokens.begin(), tokens.end(), query);
        for (auto it = tokens.begin(); it != tokens.end(); ++it) {
            if (shared(query, *it) > 0 && bed.tree.child(bed.root, *it) != except) {
                expected.push_back({shared(query, *it), it >= place, it >= place ? it - place : place - it, *it});
            }
        }
        std::sort(expected.begin(), expected.end(), [](const Candidate& a, const Candidate& b) {
            return std::tuple(-a.shared, a.is_above, a.distance) < std::tuple(-b.shared, b.is_above, b.distance);
        });
        Siblings siblings(bed.tree, bed.root, Level::all, Query::encoded(query), except);
        for (const Candidate& candidate : expected) {
            const Siblings::Sibling got = siblings.next();
            ASSERT_NE(got.node, kNoNode);
            ASSERT_EQ(got.shared, candidate.shared);
            ASSERT_TRUE(std::ranges::equal(bed.tree.tokens(got.node), candidate.tokens));
        }
        ASSERT_EQ(siblings.next().node, kNoNode);
    }
}

TEST(RadixTree, SummariesAndLevelsFollowThePages) {
    Bed bed({layer(0), layer(1, 8), layer(2, 8, 4), layer(3, 1), layer(4, std::nullopt, 0, true),
             testing_configs::ssm(5, 4096)});
    const NodeId a = bed.tree.add(bed.root, Tokens{1, 2, 3, 4});
    const NodeId b = bed.tree.add(a, Tokens{1, 2, 3, 4});
    const auto set = [&](NodeId node, int lc, std::int64_t coverage) {
        bed.tree.set_page(node, LifeCycleId(lc), coverage == 0 ? kBadSlot : SlotId(lc), coverage);
        bed.tree.audit();
    };
    EXPECT_EQ(bed.tree.at(a).summary.lacking_full_like,
              2);  // full attention, and the window of which this is a sink block
    EXPECT_EQ(bed.tree.at(b).summary.lacking_full_like, 1);
    EXPECT_FALSE(bed.tree.is_whole_down_to(a));
    set(a, 0, 4);
    set(a, 2, 3);
    EXPECT_FALSE(bed.tree.is_whole_down_to(a));
    set(a, 2, 4);
    EXPECT_TRUE(bed.tree.is_whole_down_to(a));
    EXPECT_FALSE(bed.tree.is_whole_down_to(b));
    EXPECT_EQ(bed.tree.at(bed.root).child(Level::attention), kNoNode);
    set(a, 1, 2);
    EXPECT_EQ(bed.tree.at(bed.root).child(Level::attention), a);  // the window of 1 and the optional one do not count
    EXPECT_EQ(bed.tree.at(bed.root).child(Level::usable), kNoNode);
    set(a, 5, 4);
    EXPECT_EQ(bed.tree.at(bed.root).child(Level::usable), a);
    set(b, 0, 4);
    EXPECT_TRUE(bed.tree.is_whole_down_to(b));
    set(a, 0, 0);
    EXPECT_EQ(bed.tree.at(bed.root).child(Level::usable), kNoNode);
    EXPECT_FALSE(bed.tree.is_whole_down_to(b));
    EXPECT_TRUE(bed.tree.at(b).summary.lacking_full_like == 0);
}

TEST(RadixTree, KeysFollowThePathAndAreForgottenWithTheNode) {
    Bed bed;
    const NodeId a = bed.tree.add(bed.root, Tokens{0, 1, 2, 3});
    const NodeId b = bed.tree.add(a, Tokens{4, 5, 6, 7});
    const BlockKey key = bed.tree.key(b);
    EXPECT_EQ(key, block_key(block_key(root_key({}), Query::encoded(Tokens{0, 1, 2, 3}), bed.digests),
                             Query::encoded(Tokens{4, 5, 6, 7}), bed.digests));
    EXPECT_TRUE(bed.tree.at(a).has_key);
    bed.tree.remove(b);
    bed.journal.begin();
    const NodeId c = bed.tree.add(a, Tokens{9, 9, 9, 9});
    EXPECT_EQ(c, b);  // the record is used again
    EXPECT_NE(bed.tree.key(c), key);
}

TEST(RadixTree, UndoRestoresNodesPagesAndLevels) {
    std::mt19937 random(5);
    Bed bed({layer(0), layer(1, 8), testing_configs::ssm(2, 4096)});
    const auto dump = [&] {
        std::vector<std::int64_t> all;
        for (const NodeId node : bed.tree.nodes_in_order()) {
            const Node& n = bed.tree.at(node);
            all.insert(all.end(),
                       {node.value(), n.parent.value(), n.num_children, n.summary.whole, n.summary.lacking_full_like});
            for (std::size_t level = 0; level < 3; ++level) {
                all.insert(all.end(), {n.roots[level], n.links[level].left, n.links[level].right});
            }
            for (int lc = 0; lc < 3 && !n.is_root(); ++lc) {
                all.push_back(bed.tree.page(node, LifeCycleId(lc)).value());
                all.push_back(bed.tree.coverage(node, LifeCycleId(lc)));
            }
        }
        return all;
    };
    for (int round = 0; round < 200; ++round) {
        const auto before = dump();
        bed.journal.begin();
        for (int step = 0; step < 30; ++step) {
            const std::vector<NodeId> nodes = bed.tree.nodes_in_order();
            const NodeId node = nodes[random() % nodes.size()];
            const Node& n = bed.tree.at(node);
            const auto choice = random() % 8;
            if (choice < 3 && (n.is_root() || n.num_tokens == 4) && n.num_children < 6) {
                const Tokens tokens{static_cast<Token>(random() % 1000), 1, 2, 3};
                if (bed.tree.child(node, tokens) == kNoNode) {
                    static_cast<void>(bed.tree.add(node, tokens));
                }
            } else if (choice == 3 && !n.is_root() && n.num_children == 0) {
                for (int lc = 0; lc < 3; ++lc) {
                    bed.tree.set_page(node, LifeCycleId(lc), kBadSlot, 0);
                }
                bed.tree.remove(node);
            } else if (!n.is_root()) {
                const auto coverage = static_cast<std::int64_t>(random() % 5);
                bed.tree.set_page(node, LifeCycleId(static_cast<int>(random() % 3)),
                                  coverage == 0 ? kBadSlot : SlotId(static_cast<int>(random() % 100)), coverage);
            }
        }
        bed.tree.audit();
        if (random() % 2 == 0) {
            bed.journal.roll_back();
            ASSERT_EQ(dump(), before);
        }
        bed.tree.audit();
    }
}

}  // namespace
}  // namespace kvpool
