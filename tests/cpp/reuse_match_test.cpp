#include "kvpool/reuse/match.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kvpool/core/errors.hpp"
#include "page_support.hpp"

namespace kvpool {
namespace {

using testing_pages::config_of;
using testing_pages::layer;
using testing_pages::Tokens;

// A tree with pages of arbitrary coverage, and the definition of a legal end, read off the specification.
struct Bed {
    explicit Bed(const ManagerConfig& config) : rules(ReuseRules::make(build_layout(config), config)) {
        journal.begin();
        root = tree.make_root({});
    }
    Journal journal;
    ReuseRules rules;
    DigestPool digests{journal};
    RadixTree tree{rules, digests, journal};
    Matcher matcher{tree};
    NodeId root;

    [[nodiscard]] std::int64_t tpb() const { return rules.tokens_per_block; }

    [[nodiscard]] MatchResult match(const Tokens& tokens) {
        MatchResult result;
        matcher.match({}, {.tokens = tokens, .raw = true, .unknown = {}, .name = "input_tokens"}, rules.backoff,
                      rules.partial, result);
        return result;
    }

    // Whether block `i`, of which `node` holds the first m tokens that count, can be the last of a prefix.
    [[nodiscard]] bool is_legal(const std::vector<NodeId>& chain, std::int64_t i, NodeId node, std::int64_t m,
                                bool with_state) const {
        const std::int64_t end = i * tpb() + m;
        for (const ReuseRules::LifeCycleRule& rule : rules.life_cycles) {
            if (rule.key.is_ssm) {
                if (with_state && tree.coverage(node, rule.id) != m) {
                    return false;
                }
                continue;
            }
            if (rule.key.optional) {
                continue;
            }
            const HalfOpenRange stale = stale_range(rule.key, tpb(), end);
            for (std::int64_t j = 0; j < i; ++j) {
                if (!stale.contains(j) && tree.coverage(chain[static_cast<std::size_t>(j)], rule.id) != tpb()) {
                    return false;
                }
            }
            if (!stale.contains(i) && tree.coverage(node, rule.id) < m) {
                return false;
            }
        }
        return true;
    }
    [[nodiscard]] bool is_usable(NodeId node, bool with_state) const {
        return std::all_of(rules.life_cycles.begin(), rules.life_cycles.end(), [&](const auto& rule) {
            const bool matters = rule.key.is_ssm ? with_state : !rule.key.optional && rule.key.window != 1;
            return !matters || tree.coverage(node, rule.id) > 0;
        });
    }

    // The longest legal end by trying all.
    [[nodiscard]] std::int64_t longest(const Tokens& query, bool with_state) const {
        std::vector<NodeId> chain;
        NodeId node = root;
        const auto block = [&](std::int64_t i) {
            const std::int64_t begin = std::min<std::int64_t>(i * tpb(), std::ssize(query));
            const std::int64_t end = std::min<std::int64_t>(begin + tpb(), std::ssize(query));
            return TokenSpan(query).subspan(static_cast<std::size_t>(begin), static_cast<std::size_t>(end - begin));
        };
        while (true) {
            const TokenSpan t = block(std::ssize(chain));
            const NodeId child = std::ssize(t) == tpb() ? tree.child(node, t) : kNoNode;
            if (child == kNoNode) {
                break;
            }
            chain.push_back(node = child);
        }
        const std::int64_t k = std::ssize(chain);
        const auto best_shared = [&](NodeId parent, TokenSpan t) {
            std::int64_t best = 0;
            for (NodeId c = tree.first_child(parent); c != kNoNode; c = tree.next_sibling(c)) {
                const auto n = static_cast<std::int64_t>(common_prefix(tree.tokens(c), t));
                if (rules.partial || (n == std::ssize(t) && n == tree.at(c).num_tokens)) {
                    best = std::max(best, n);
                }
            }
            return best;
        };
        const std::int64_t divergence = k * tpb() + best_shared(node, block(k));
        std::int64_t best = 0;
        for (std::int64_t i = 0; i <= k; ++i) {
            const NodeId parent = i == 0 ? root : chain[static_cast<std::size_t>(i) - 1];
            for (NodeId c = tree.first_child(parent); c != kNoNode; c = tree.next_sibling(c)) {
                const auto p = static_cast<std::int64_t>(common_prefix(tree.tokens(c), block(i)));
                const bool is_own = i < k && c == chain[static_cast<std::size_t>(i)];
                const bool is_exact = p == std::ssize(block(i)) && p == tree.at(c).num_tokens;
                if (p == 0 || (!is_own && (rules.partial ? !is_usable(c, with_state) : !is_exact))) {
                    continue;
                }
                const std::int64_t limit =
                    is_own ? std::min(tpb(), divergence - rules.backoff - i * tpb()) : p - rules.backoff;
                for (std::int64_t m = 1; m <= limit; ++m) {
                    if (is_legal(chain, i, c, m, with_state)) {
                        best = std::max(best, i * tpb() + m);
                    }
                }
            }
        }
        return best;
    }
};

// Layers of every kind, so many and such as the draw says.
ManagerConfig draw_config(std::mt19937& random) {
    std::vector<LayerConfig> layers;
    const std::int64_t tpb = 2 + static_cast<std::int64_t>(random() % 4);
    if (random() % 4 != 0) {
        layers.push_back(layer(0));
    }
    if (random() % 2 == 0) {
        layers.push_back(layer(1, 1 + random() % (4 * tpb), random() % 3 == 0 ? tpb : 0));
    }
    if (random() % 3 == 0) {
        layers.push_back(layer(2, 1 + random() % (2 * tpb), 0, random() % 2 == 0));
    }
    if (random() % 5 == 0) {
        layers.push_back(layer(3, 1, random() % 2 == 0 ? 2 * tpb : 0));
    }
    if (random() % 4 == 0) {
        layers.push_back(layer(4, std::nullopt, 0, true));
    }
    if (random() % 3 == 0 || layers.empty()) {
        layers.push_back(testing_configs::ssm(5, 4096));
    }
    ManagerConfig config = config_of(layers, tpb);
    config.enable_partial_reuse = random() % 4 != 0;
    config.reuse_match_backoff = random() % 3 == 0 ? static_cast<std::int64_t>(random() % (2 * tpb + 2)) : 0;
    return config;
}

void fill(Bed& bed, std::mt19937& random, std::vector<Tokens>& paths) {
    const auto tpb = static_cast<std::size_t>(bed.tpb());
    const bool is_rich = random() % 2 == 0;  // few pages lack
    for (int n = 0; n < 8; ++n) {
        // A new path: the beginning of an old one, or none, and new tokens from a small alphabet behind it.
        Tokens path;
        if (!paths.empty()) {
            path = paths[random() % paths.size()];
            path.resize(random() % (path.size() + 1));
        }
        for (std::size_t more = 1 + random() % (3 * tpb); more > 0; --more) {
            path.push_back(static_cast<Token>(random() % 2));
        }
        NodeId node = bed.root;
        for (std::size_t i = 0; i < path.size(); i += tpb) {
            const TokenSpan block = TokenSpan(path).subspan(i, std::min(tpb, path.size() - i));
            NodeId child = bed.tree.covering_child(node, block);
            if (child == kNoNode && bed.tree.covered_child(node, block) != kNoNode) {
                break;  // would have to take a sibling's place; that is not the tree's business
            }
            if (child == kNoNode) {
                child = bed.tree.add(node, block);
                for (const ReuseRules::LifeCycleRule& rule : bed.rules.life_cycles) {
                    const auto size = static_cast<std::int64_t>(block.size());
                    std::int64_t coverage = size;
                    if (random() % (is_rich ? 12 : 3) == 0) {
                        coverage = static_cast<std::int64_t>(random() % (block.size() + 1));
                    }
                    bed.tree.set_page(child, rule.id, coverage == 0 ? kBadSlot : SlotId(1), coverage);
                }
            }
            node = child;
            if (block.size() < tpb) {
                break;
            }
        }
        paths.push_back(path);
    }
    bed.tree.audit();
}

TEST(Match, FindsTheLongestLegalEndOfAll) {
    std::int64_t longer_than_reference = 0;
    for (unsigned seed = 0; seed < 3000; ++seed) {
        std::mt19937 random(seed);
        ManagerConfig config = draw_config(random);
        Bed bed(config);
        std::vector<Tokens> paths;
        fill(bed, random, paths);
        for (int n = 0; n < 12; ++n) {
            Tokens query = paths[random() % paths.size()];
            query.resize(query.size() - random() % (query.size() + 1));
            for (std::size_t more = random() % 6; more > 0; --more) {
                query.push_back(static_cast<Token>(random() % 2));
            }
            SCOPED_TRACE("seed " + std::to_string(seed) + ", query " + std::to_string(n));
            bed.rules.longest = true;
            const MatchResult result = bed.match(query);
            const bool has_state = bed.rules.has_ssm();
            ASSERT_EQ(result.end, bed.longest(query, has_state));
            ASSERT_EQ(result.hybrid, has_state ? bed.longest(query, false) : result.end);
            ASSERT_LE(result.end, result.hybrid);
            ASSERT_LE(result.hybrid, result.divergence);
            ASSERT_LE(result.divergence, std::ssize(query));
            ASSERT_EQ(std::ssize(result.chain), result.end / bed.tpb());
            ASSERT_EQ(result.source == kNoNode, result.end % bed.tpb() == 0);
            for (std::size_t i = 0; i < result.chain.size(); ++i) {
                ASSERT_TRUE(std::ranges::equal(bed.tree.tokens(result.chain[i]),
                                               TokenSpan(query).subspan(i * static_cast<std::size_t>(bed.tpb()),
                                                                        static_cast<std::size_t>(bed.tpb()))));
            }
            if (result.source != kNoNode) {
                const std::int64_t i = result.end / bed.tpb();
                const std::int64_t m = result.end % bed.tpb();
                ASSERT_TRUE(bed.is_legal(result.chain, i, result.source, m, has_state));
                ASSERT_GE(common_prefix(bed.tree.tokens(result.source),
                                        TokenSpan(query).subspan(static_cast<std::size_t>(i * bed.tpb()))),
                          static_cast<std::size_t>(m));
            }
            bed.rules.longest = false;
            const MatchResult reference = bed.match(query);
            ASSERT_LE(reference.end, result.end);
            ASSERT_LE(reference.end, reference.hybrid);
            ASSERT_EQ(reference.divergence, result.divergence);
            longer_than_reference += result.end > reference.end ? 1 : 0;
        }
    }
    EXPECT_GT(longer_than_reference, 100);
}

TEST(Match, OfAFullPromptIsTheFullPrompt) {
    Bed bed(config_of({layer(0), layer(1, 6)}));
    NodeId node = bed.root;
    for (int i = 0; i < 10; ++i) {
        node = bed.tree.add(node, testing_pages::range(4 * i, 4));
        bed.tree.set_page(node, LifeCycleId(0), SlotId(i), 4);
        if (i >= 7) {
            bed.tree.set_page(node, LifeCycleId(1), SlotId(i), 4);
        }
    }
    const Tokens all = testing_pages::range(0, 40);
    EXPECT_EQ(bed.match(all).end, 40);
    EXPECT_EQ(bed.match(all).chain.size(), 10u);
    EXPECT_EQ(bed.match(all).source, kNoNode);
    Tokens most = all;
    most.resize(39);
    EXPECT_EQ(bed.match(most).end, 39);
    EXPECT_EQ(bed.match(most).source, node);
    most.resize(34);  // the window before 34 reaches into block 7
    EXPECT_EQ(bed.match(most).end, 34);
    most.resize(33);  // and the one before 33 to token 28, where block 7 begins
    EXPECT_EQ(bed.match(most).end, 33);
    most.resize(32);
    EXPECT_EQ(bed.match(most).end, 0);
}

TEST(Match, RefusesNegativesThatAreNoDigests) {
    Bed bed(config_of({layer(0)}));
    Tokens tokens = testing_pages::range(0, 9);
    const NodeId node = bed.tree.add(bed.root, TokenSpan(tokens).first(4));
    bed.tree.set_page(node, LifeCycleId(0), SlotId(0), 4);
    tokens[8] = -3;
    EXPECT_THROW(static_cast<void>(bed.match(tokens)), ArgumentError);
    tokens[8] = 8;
    EXPECT_EQ(bed.match(tokens).end, 4);
}

}  // namespace
}  // namespace kvpool
