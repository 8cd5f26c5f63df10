#include "kvpool/page/prefix_cache.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>
#include <string>
#include <vector>

#include "kvpool/core/errors.hpp"
#include "page_support.hpp"

namespace kvpool {
namespace {

using testing_pages::Bed;
using testing_pages::config_of;
using testing_pages::layer;
using testing_pages::range;
using testing_pages::Tokens;
using testing_pages::operator+;

constexpr LifeCycleId kFull{0};
constexpr LifeCycleId kWindow{1};

ManagerConfig two_groups(std::int64_t window = 9) { return config_of({layer(0), layer(1, window)}); }

// ---- owners

TEST(PrefixCache, APageIsOwnedThenCachedThenFree) {
    Bed bed(config_of({layer(0)}), 4);
    const NodeId node = bed.commit(range(0, 4));
    const SlotId slot = bed.cache.page(node, kFull);
    EXPECT_EQ(bed.cache.refs(kFull, slot), 0);
    EXPECT_EQ(bed.cache.evictable(PoolGroupId(0)), 1);
    bed.cache.adopt(kFull, slot, 50);
    bed.cache.adopt(kFull, slot, 20);
    EXPECT_EQ(bed.cache.evictable(PoolGroupId(0)), 0);
    EXPECT_EQ(bed.cache.priority(kFull, slot), 50);  // raised, never lowered
    EXPECT_EQ(bed.cache.refs(kFull, slot), 2);
    bed.cache.release(kFull, slot);
    EXPECT_FALSE(bed.cache.all_cached());
    bed.cache.release(kFull, slot);
    EXPECT_TRUE(bed.cache.all_cached());
    EXPECT_EQ(bed.tier.used(PoolGroupId(0)), 1);
    const SlotId loose = bed.take(kFull);
    EXPECT_EQ(bed.tier.used(PoolGroupId(0)), 2);
    bed.drop(kFull, loose);  // no node: free at once
    EXPECT_EQ(bed.tier.used(PoolGroupId(0)), 1);
    EXPECT_THROW(bed.cache.release(kFull, loose), CorruptedError);
    bed.audit();
}

TEST(PrefixCache, TheCallsEventConcernsWhatIsReleasedAndLinked) {
    Bed bed(config_of({layer(0)}), 4);
    const SlotId slot = bed.take(kFull);
    EXPECT_TRUE(bed.tier.has_handed_out());
    EXPECT_FALSE(bed.tier.has_finished());
    const NodeId node = bed.cache.insert_full(bed.cache.make_root({}), range(0, 4)).node;
    bed.cache.install(node, kFull, slot, 4);
    EXPECT_TRUE(bed.tier.has_finished());
    bed.next_call();
    EXPECT_FALSE(bed.tier.has_finished());
    bed.drop(kFull, slot);
    EXPECT_TRUE(bed.tier.has_finished());
    bed.next_call();
    bed.cache.make_room(PoolGroupId(0), 4);  // a victim keeps the events that it has
    EXPECT_FALSE(bed.tier.has_finished());
    bed.audit();
}

// ---- insertion

TEST(PrefixCache, EqualBlocksAreOneNode) {
    Bed bed(two_groups());
    const NodeId node = bed.commit(range(0, 8));
    const Inserted again = bed.cache.insert_full(bed.cache.parent(node), range(4, 4));
    EXPECT_EQ(again.node, node);
    EXPECT_TRUE(again.existed);
    EXPECT_EQ(bed.find(range(0, 8)), node);
    EXPECT_EQ(bed.commit(range(0, 8), {.lora_id = 1, .salt = {}}) == node, false);
    bed.audit();
}

TEST(PrefixCache, ATailIsCoveredByAnEqualOrLongerBlock) {
    Bed bed(two_groups());
    const NodeId full = bed.commit(range(0, 8));
    const NodeId parent = bed.cache.parent(full);
    EXPECT_EQ(bed.cache.insert_tail(parent, range(4, 2)).node, full);
    const Inserted other = bed.cache.insert_tail(parent, Tokens{4, 9});
    EXPECT_FALSE(other.existed);
    EXPECT_TRUE(bed.cache.insert_tail(parent, Tokens{4, 9}).existed);
    EXPECT_EQ(bed.cache.insert_tail(parent, Tokens{4}).node, full);  // the first of two in token order
    bed.cache.prune(other.node);
    bed.audit();
}

TEST(PrefixCache, ALongerBlockTakesThePagesOfItsPrefixOver) {
    Bed bed(two_groups());
    const NodeId tail = bed.commit(range(0, 6));
    const SlotId full_page = bed.cache.page(tail, kFull);
    const SlotId window_page = bed.cache.page(tail, kWindow);
    bed.cache.mark(tail, Mark::sequence);
    EXPECT_EQ(bed.cache.tails(tail, kWindow), 1);
    const NodeId parent = bed.cache.parent(tail);
    const Inserted longer = bed.cache.insert_tail(parent, range(4, 3));
    EXPECT_FALSE(longer.existed);
    EXPECT_EQ(bed.find(range(0, 6)), kNoNode);
    EXPECT_EQ(bed.cache.page(longer.node, kFull), full_page);
    EXPECT_EQ(bed.cache.coverage(longer.node, kFull), 2);  // as before
    EXPECT_EQ(bed.cache.node_of(kWindow, window_page), longer.node);
    EXPECT_EQ(bed.cache.marks(longer.node), 0u);
    EXPECT_EQ(bed.cache.tails(parent, kWindow), 0);
    bed.audit();

    // One that covers more replaces the page; a cached one is free then, one that covers as much is refused.
    const SlotId better = bed.take(kFull);
    const std::int64_t free = bed.tier.free(PoolGroupId(0));
    EXPECT_TRUE(bed.cache.can_install(longer.node, kFull, 3));
    EXPECT_TRUE(bed.cache.install(longer.node, kFull, better, 3));
    EXPECT_EQ(bed.tier.free(PoolGroupId(0)), free + 1);
    const SlotId as_good = bed.take(kFull);
    EXPECT_FALSE(bed.cache.install(longer.node, kFull, as_good, 3));
    EXPECT_EQ(bed.cache.node_of(kFull, as_good), kNoNode);
    bed.drop(kFull, as_good);
    bed.drop(kFull, better);
    bed.audit();
}

TEST(PrefixCache, AReplacedPageThatIsOwnedStaysItsOwners) {
    Bed bed(two_groups());
    const NodeId tail = bed.commit(range(0, 6));
    const SlotId old = bed.cache.page(tail, kFull);
    bed.cache.adopt(kFull, old, 35);
    bed.owned[{kFull, old}] = 1;
    const Inserted full = bed.cache.insert_full(bed.cache.parent(tail), range(4, 4));
    const SlotId mine = bed.take(kFull);
    EXPECT_TRUE(bed.cache.install(full.node, kFull, mine, 4));
    EXPECT_EQ(bed.cache.node_of(kFull, old), kNoNode);
    EXPECT_EQ(bed.cache.refs(kFull, old), 1);
    bed.drop(kFull, mine);
    bed.audit();
    const std::int64_t free = bed.tier.free(PoolGroupId(0));
    bed.drop(kFull, old);
    EXPECT_EQ(bed.tier.free(PoolGroupId(0)), free + 1);
    bed.audit();
}

// ---- removal

TEST(PrefixCache, APageThatAllLaterBlocksNeedTakesTheSubtreeAlong) {
    Bed bed(two_groups());
    bed.commit(range(0, 16));
    bed.commit(range(0, 8) + range(50, 6));
    bed.cache.remove_page(bed.find(range(0, 8)), kFull);
    EXPECT_EQ(bed.find(range(0, 8)), kNoNode);
    EXPECT_NE(bed.find(range(0, 4)), kNoNode);
    EXPECT_EQ(bed.tier.used(PoolGroupId(0)), 1);
    EXPECT_EQ(bed.tier.used(PoolGroupId(1)), 1);
    bed.audit();
    bed.cache.remove_page(bed.find(range(0, 4)), kFull);  // and with the last node the root
    EXPECT_EQ(bed.cache.find_root({}), kNoNode);
    bed.audit();
}

TEST(PrefixCache, SinkBlocksAreNeededByAllLaterOnes) {
    Bed bed(config_of({layer(0), layer(1, 5, 4)}));
    bed.commit(range(0, 16));
    bed.cache.remove_page(bed.find(range(0, 8)), kWindow);  // not a sink: only the page
    EXPECT_NE(bed.find(range(0, 16)), kNoNode);
    bed.cache.remove_page(bed.find(range(0, 4)), kWindow);
    EXPECT_EQ(bed.cache.find_root({}), kNoNode);
    bed.audit();
}

// Pages of the window life cycle on the path of 40 tokens (10 blocks), as text: 'x' or '.'.
std::string window_pages(Bed& bed, std::size_t blocks = 10) {
    std::string text;
    for (std::size_t i = 1; i <= blocks; ++i) {
        const NodeId node = bed.find(range(0, static_cast<std::int64_t>(4 * i)));
        text += node == kNoNode ? ' ' : bed.cache.page(node, kWindow) == kBadSlot ? '.' : 'x';
    }
    return text;
}

TEST(PrefixCache, RunsTooShortForAWindowGoToo) {
    Bed bed(two_groups(13));  // three blocks
    bed.commit(range(0, 40));
    EXPECT_EQ(window_pages(bed), "xxxxxxxxxx");
    const auto remove = [&](std::int64_t block) {
        bed.cache.remove_page(bed.find(range(0, 4 * block + 4)), kWindow);
        bed.audit();
    };
    remove(6);
    EXPECT_EQ(window_pages(bed), "xxxxxx.xxx");
    remove(2);
    EXPECT_EQ(window_pages(bed), "xx.xxx.xxx");  // the first two begin where sequences do
    remove(4);
    EXPECT_EQ(window_pages(bed), "xx.....xxx");
    remove(8);
    EXPECT_EQ(window_pages(bed, 9), "xx       ");  // nothing below serves an end: pruned
    EXPECT_EQ(bed.end(range(0, 40)), 8);
}

TEST(PrefixCache, ARunGoesOnlyUpToWhereItMayGoOnElsewhere) {
    Bed bed(two_groups(17));  // four blocks
    bed.commit(range(0, 40));
    bed.commit(range(0, 24) + range(90, 4));
    bed.cache.remove_page(bed.find(range(0, 16)), kWindow);  // blocks 0 to 2 begin where sequences do
    EXPECT_EQ(window_pages(bed), "xxx.xxxxxx");
    bed.cache.remove_page(bed.find(range(0, 32)), kWindow);
    // 4 to 6 are too few, but with the other branch block 5 may go on: only block 6 goes; 8 and 9 go with their nodes.
    EXPECT_EQ(window_pages(bed), "xxx.xx    ");
    EXPECT_EQ(bed.end(range(0, 24) + range(90, 4)), 12);
    bed.audit();
}

TEST(PrefixCache, NothingOfAnOpenCacheGoes) {
    Bed bed(two_groups(13));
    const NodeId last = bed.commit(range(0, 40));
    bed.cache.hold_node(last);
    bed.held.push_back(last);
    bed.cache.remove_page(bed.find(range(0, 28)), kWindow);
    bed.cache.remove_page(bed.find(range(0, 36)), kWindow);
    // Block 7 is too short a run, block 9 the last of a cache.
    EXPECT_EQ(window_pages(bed), "xxxxxx...x");
    bed.audit();
    bed.held.clear();
    bed.cache.let_go(last);
    EXPECT_EQ(window_pages(bed), "xxxxxx    ");
    bed.audit();
}

TEST(PrefixCache, PruneKeepsWhatABackOffStillReaches) {
    ManagerConfig config = config_of({layer(0), layer(1, 8)}, 8);
    for (const std::int64_t backoff : {0, 1, 8, 9}) {
        config.reuse_match_backoff = backoff;
        Bed bed(config);
        bed.commit(range(0, 24));
        bed.cache.remove_page(bed.find(range(0, 24)), kWindow);
        // Without block 2 nothing ends behind 16; with a back-off it is what makes 16 (or less) reachable.
        EXPECT_EQ(bed.find(range(0, 24)) != kNoNode, backoff > 0);
        EXPECT_EQ(bed.end(range(0, 24)), backoff > 8 ? 15 : 16);
        bed.audit();
    }
}

TEST(PrefixCache, TakingAPageOverLeavesItWithItsOwner) {
    Bed bed(two_groups());
    bed.commit(range(0, 12));
    const NodeId node = bed.find(range(0, 12));
    const SlotId full = bed.cache.page(node, kFull);
    const SlotId window = bed.cache.page(node, kWindow);
    for (const auto& [lc, slot] : {std::pair{kFull, full}, std::pair{kWindow, window}}) {
        bed.cache.adopt(lc, slot, 35);
        bed.owned[{lc, slot}] = 1;
    }
    bed.cache.take_over(kFull, full);
    EXPECT_EQ(bed.find(range(0, 12)), kNoNode);
    EXPECT_EQ(bed.cache.refs(kFull, full), 1);
    EXPECT_EQ(bed.cache.node_of(kWindow, window), kNoNode);
    bed.cache.take_over(kWindow, window);  // nothing left to do
    bed.audit();
    bed.drop(kFull, full);
    bed.drop(kWindow, window);
    bed.audit();
}

// ---- marks

TEST(PrefixCache, MarksCountInTheTailsOfTheirWindow) {
    ManagerConfig config = two_groups(9);  // two blocks before a boundary
    config.window_tail_slack = 6;
    Bed bed(config);
    const NodeId node = bed.commit(range(0, 24));
    const auto tails = [&] {
        std::string text;
        for (std::int64_t i = 1; i <= 6; ++i) {
            text += std::to_string(bed.cache.tails(bed.find(range(0, 4 * i)), kWindow));
        }
        return text;
    };
    bed.cache.mark(node, Mark::sequence);
    EXPECT_EQ(tails(), "000011");
    bed.cache.mark(node, Mark::sequence);  // set already
    bed.cache.mark(node, Mark::prompt);    // back to 18: from token 10
    EXPECT_EQ(tails(), "001122");
    bed.cache.unmark(node, Mark::sequence);
    EXPECT_EQ(tails(), "001111");
    bed.audit();
    bed.commit(range(0, 12) + Tokens{77});
    EXPECT_EQ(tails(), "012111");  // a fork behind block 2
    EXPECT_TRUE(bed.cache.is_marked(bed.find(range(0, 12)), Mark::fork));
    bed.cache.remove_page(bed.find(range(0, 12) + Tokens{77}), kFull);
    EXPECT_EQ(tails(), "001111");
    bed.cache.mark(bed.cache.find_root({}), Mark::sequence);  // roots have none
    bed.audit();
}

TEST(PrefixCache, TailsGiveWayAfterWindowPagesThatNobodyNeeds) {
    Bed bed(two_groups(9));
    const NodeId node = bed.commit(range(0, 24));
    const auto order = [&] {
        std::string text;
        for (const PrefixCache::Queued& page : bed.cache.queue_in_order(PoolGroupId(1))) {
            text += std::to_string(bed.cache.ordinal(bed.cache.node_of(kWindow, page.slot)));
            text += page.victim_class == 0 ? "a " : "b ";
        }
        return text;
    };
    EXPECT_EQ(order(), "0a 1a 2a 3a 4a 5a ");
    bed.cache.mark(node, Mark::sequence);  // from the node upward
    EXPECT_EQ(order(), "0a 1a 2a 3a 5b 4b ");
    bed.cache.touch(node, kWindow);
    EXPECT_EQ(order(), "0a 1a 2a 3a 4b 5b ");
    bed.cache.touch(bed.find(range(0, 4)), kWindow);  // no mark needs it
    EXPECT_EQ(order(), "0a 1a 2a 3a 4b 5b ");
    bed.cache.unmark(node, Mark::sequence);
    EXPECT_EQ(order(), "0a 1a 2a 3a 5a 4a ");
    bed.audit();
}

TEST(PrefixCache, WithoutRetentionThereAreNoMarks) {
    ManagerConfig config = two_groups(9);
    config.retain_window_tails = false;
    Bed bed(config);
    const NodeId node = bed.commit(range(0, 24));
    bed.commit(range(0, 12) + Tokens{77});
    bed.cache.mark(node, Mark::sequence);
    EXPECT_EQ(bed.cache.marks(node), 0u);
    EXPECT_EQ(bed.cache.marks(bed.find(range(0, 12))), 0u);
    for (const PrefixCache::Queued& page : bed.cache.queue_in_order(PoolGroupId(1))) {
        EXPECT_EQ(page.victim_class, 1);
    }
    bed.audit();
}

TEST(PrefixCache, WindowsBeforeAnIntervalGiveWayLate) {
    ManagerConfig config = two_groups(9);
    config.window_tail_interval = 11;  // of 12 tokens: three blocks
    Bed bed(config);
    bed.commit(range(0, 36));
    std::set<std::int64_t> late;
    for (const PrefixCache::Queued& page : bed.cache.queue_in_order(PoolGroupId(1))) {
        if (page.victim_class == 1) {
            late.insert(bed.cache.ordinal(bed.cache.node_of(kWindow, page.slot)));
        }
    }
    EXPECT_EQ(late, (std::set<std::int64_t>{1, 2, 4, 5, 7, 8}));
    bed.audit();
}

// ---- room

TEST(PrefixCache, VictimsGoByPriorityThenClassThenAge) {
    ManagerConfig config = config_of({layer(0), layer(1, 9)});
    config.merge_equal_pools = true;  // one pool group
    Bed bed(config, 12);
    const auto all = [](std::size_t, std::size_t) { return true; };
    bed.commit(range(0, 12), all, {}, 35);
    bed.commit(range(50, 4), all, {}, 20);
    EXPECT_EQ(bed.cache.evictable(PoolGroupId(0)), 8);
    bed.cache.make_room(PoolGroupId(0), 5);
    EXPECT_EQ(bed.find(range(50, 4)), kNoNode);  // its window page went, with it the end, and the other page
    EXPECT_EQ(bed.tier.free(PoolGroupId(0)), 6);
    const SlotId oldest = bed.cache.page(bed.find(range(0, 4)), kWindow);
    bed.cache.make_room(PoolGroupId(0), 7);
    EXPECT_EQ(bed.cache.page(bed.find(range(0, 4)), kWindow), kBadSlot);
    EXPECT_EQ(bed.cache.refs(kWindow, oldest), 0);
    EXPECT_EQ(bed.end(range(0, 12)), 12);    // the window before it is whole
    bed.cache.make_room(PoolGroupId(0), 8);  // one page of that window, so the end goes, and nothing else serves one
    EXPECT_EQ(bed.cache.find_root({}), kNoNode);
    EXPECT_EQ(bed.tier.free(PoolGroupId(0)), 12);
    EXPECT_THROW(bed.cache.make_room(PoolGroupId(0), 13), CorruptedError);
    bed.audit();
}

TEST(PrefixCache, AUsedPrefixOutlivesAnUnusedOne) {
    Bed bed(config_of({layer(0)}), 6);
    const NodeId first = bed.commit(range(0, 12));
    bed.commit(range(50, 12));
    for (NodeId node = first; !bed.cache.is_root(node); node = bed.cache.parent(node)) {
        bed.cache.adopt(kFull, bed.cache.page(node, kFull), 35);
    }
    for (NodeId node = first; !bed.cache.is_root(node); node = bed.cache.parent(node)) {
        bed.cache.release(kFull, bed.cache.page(node, kFull));
    }
    bed.cache.make_room(PoolGroupId(0), 1);
    EXPECT_EQ(bed.end(range(0, 12)), 12);
    EXPECT_EQ(bed.end(range(50, 12)), 0);  // its first block was the oldest
    bed.audit();
}

// ---- planned drops

TEST(PrefixCache, APlannedPageGoesWithTheLastPlan) {
    Bed bed(two_groups(9));
    const NodeId node = bed.commit(range(0, 24));
    const SlotId slot = bed.cache.page(node, kWindow);
    const PlannedPage first = bed.cache.plan_page(node, kWindow);
    const PlannedPage second = bed.cache.plan_page(node, kWindow);
    EXPECT_EQ(bed.cache.plans(kWindow, slot), 2);
    bed.cache.drop_page(first);
    EXPECT_NE(bed.find(range(0, 24)), kNoNode);
    bed.cache.drop_page(second);
    EXPECT_EQ(bed.find(range(0, 24)), kNoNode);
    bed.cache.drop_page(second);  // gone already
    bed.audit();

    const NodeId again = bed.commit(range(0, 24));
    EXPECT_EQ(bed.cache.page(again, kWindow), slot);  // the slot, but another page
    EXPECT_EQ(bed.cache.plans(kWindow, slot), 0);
    bed.cache.drop_page(first);
    EXPECT_NE(bed.find(range(0, 24)), kNoNode);
    bed.audit();
}

TEST(PrefixCache, APlannedPageThatIsOwnedIsOnlyCounted) {
    Bed bed(two_groups(9));
    const NodeId node = bed.commit(range(0, 24));
    const PlannedPage plan = bed.cache.plan_page(node, kWindow);
    bed.cache.adopt(kWindow, plan.slot, 35);
    bed.owned[{kWindow, plan.slot}] = 1;
    bed.cache.drop_page(plan);
    EXPECT_EQ(bed.cache.plans(kWindow, plan.slot), 0);
    EXPECT_EQ(bed.cache.page(node, kWindow), plan.slot);
    bed.audit();
}

// ---- the whole

TEST(PrefixCache, ClearRemovesEveryTree) {
    Bed bed(two_groups());
    bed.commit(range(0, 30));
    bed.commit(range(0, 12) + range(100, 9));
    bed.commit(range(0, 12), {.lora_id = {}, .salt = 1});
    bed.cache.clear();
    EXPECT_TRUE(bed.cache.nodes_in_order().empty());
    EXPECT_EQ(bed.tier.used(PoolGroupId(0)), 0);
    EXPECT_EQ(bed.tier.used(PoolGroupId(1)), 0);
    bed.audit();
}

TEST(PrefixCache, TheKeyOfTheNextBlockNeedsNoNode) {
    Bed bed(config_of({layer(0)}));
    const Tokens tokens = range(0, 12);
    const Query query{.tokens = tokens, .raw = true, .unknown = {}, .name = ""};
    const BlockKey without = bed.cache.key_on_top({}, kNoNode, query, 0);
    bed.commit(tokens);
    EXPECT_EQ(bed.cache.key(bed.find(range(0, 4))), without);
    EXPECT_EQ(bed.cache.key(bed.find(tokens)), bed.cache.key_on_top({}, bed.find(range(0, 8)), query, 2));
}

// Random requests, calls that are taken back in part or as a whole, audits throughout.
TEST(PrefixCache, UndoRestoresEverything) {
    for (unsigned seed = 0; seed < 60; ++seed) {
        std::mt19937 random(seed);
        std::vector<LayerConfig> layers{layer(0), layer(1, 1 + random() % 14, random() % 3 == 0 ? 4 : 0)};
        if (random() % 2 == 0) {
            layers.push_back(layer(2, 6, 0, random() % 2 == 0));
        }
        if (random() % 2 == 0) {
            layers.push_back(testing_configs::ssm(3, 4096));
        }
        ManagerConfig config = config_of(layers);
        config.reuse_match_backoff = random() % 3 == 0 ? 3 : 0;
        Bed bed(config, 24);
        std::vector<Tokens> paths{range(0, 4)};
        for (int call = 0; call < 60; ++call) {
            bed.journal.commit();
            const std::string before = bed.dump();
            bed.journal.begin();
            Journal::Savepoint savepoint = bed.journal.savepoint();
            std::string at_savepoint = before;
            for (int step = 0; step < 6; ++step) {
                const std::vector<NodeId> nodes = bed.cache.nodes_in_order();
                const NodeId node = nodes.empty() ? kNoNode : nodes[random() % nodes.size()];
                const auto lc = make_id<LifeCycleId>(random() % bed.num_life_cycles());
                const std::size_t choice = random() % 10;
                if (choice < 5) {
                    Tokens path = paths[random() % paths.size()];
                    path.resize(random() % (path.size() + 1));
                    path = path + range(static_cast<Token>(random() % 3), 1 + static_cast<std::int64_t>(random() % 13));
                    bed.commit(
                        path, [&](std::size_t, std::size_t) { return random() % 8 != 0; }, {},
                        static_cast<std::int32_t>(random() % 3) * 10);
                    paths.push_back(path);
                } else if (choice == 5) {
                    const auto group = make_id<PoolGroupId>(random() % bed.layout.pool_groups.size());
                    bed.cache.make_room(group, std::min<std::int64_t>(24, bed.tier.free(group) + 3));
                } else if (node != kNoNode && choice == 6) {
                    bed.cache.remove_page(node, lc);
                } else if (node != kNoNode && choice == 7) {
                    bed.cache.mark(node, random() % 2 == 0 ? Mark::sequence : Mark::prompt);
                } else if (node != kNoNode && choice == 8) {
                    bed.cache.unmark(node, random() % 2 == 0 ? Mark::sequence : Mark::prompt);
                } else if (node != kNoNode && !bed.cache.is_root(node)) {
                    bed.cache.touch(node, lc);
                }
                bed.audit();
                if (random() % 4 == 0) {
                    savepoint = bed.journal.savepoint();
                    at_savepoint = bed.dump();
                }
            }
            if (random() % 3 == 0) {
                bed.journal.roll_back_to(savepoint);
                ASSERT_EQ(bed.dump(), at_savepoint) << "seed " << seed;
                bed.audit();
            }
            if (random() % 3 == 0) {
                bed.journal.roll_back();
                ASSERT_EQ(bed.dump(), before) << "seed " << seed;
                bed.audit();
            }
        }
    }
}

}  // namespace
}  // namespace kvpool
