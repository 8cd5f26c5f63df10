#include "kvpool/sequence/resize_plan.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "kvpool/core/math.hpp"

namespace kvpool {
namespace {

LifeCycle windowed(std::int64_t window, std::int64_t sinks = 0) {
    LifeCycle life_cycle;
    life_cycle.key = {.window = window, .sink_blocks = sinks};
    life_cycle.scratch_fraction = {1, 4};
    return life_cycle;
}

std::set<std::int64_t> blocks_of(const RangeList& ranges) {
    std::set<std::int64_t> out;
    for (const HalfOpenRange& range : ranges) {
        for (std::int64_t o = range.beg; o < range.end; ++o) {
            EXPECT_TRUE(out.insert(o).second) << "twice: " << o;
        }
    }
    return out;
}

// Blocks that have pages of their own at these lengths, one by one.
std::set<std::int64_t> live(const LifeCycle& life_cycle, const LengthRules& rules, Lengths lengths) {
    std::set<std::int64_t> out;
    const HalfOpenRange stale = stale_range(life_cycle.key, rules.tokens_per_block, lengths.history);
    const HalfOpenRange scratch = scratch_blocks(life_cycle, rules, lengths);
    for (std::int64_t o = 0; o < div_up(lengths.capacity, rules.tokens_per_block); ++o) {
        if (!stale.contains(o) && !scratch.contains(o)) {
            out.insert(o);
        }
    }
    return out;
}

TEST(ResizePlan, ResizeToHistoryAllocatesNoStaleBlock) {
    const LifeCyclePlan plan = plan_life_cycle(windowed(128), {32, std::nullopt}, {}, {1024, 1024});
    EXPECT_EQ(blocks_of(plan.allocate), (std::set<std::int64_t>{28, 29, 30, 31}));
    EXPECT_TRUE(plan.retired.empty());
    EXPECT_TRUE(plan.held.empty());
}

TEST(ResizePlan, FullAttentionTakesEveryNewBlock) {
    LifeCycle full;
    const LifeCyclePlan plan = plan_life_cycle(full, {32, 0}, {.lengths = {64, 64}}, {130, 64});
    EXPECT_EQ(blocks_of(plan.allocate), (std::set<std::int64_t>{2, 3, 4}));
    EXPECT_EQ(plan.scratch_slots, 0);
}

TEST(ResizePlan, SinksStay) {
    const LifeCyclePlan plan = plan_life_cycle(windowed(128, 2), {32, std::nullopt}, {.lengths = {512, 0}}, {512, 512});
    EXPECT_EQ(plan.retired, (HalfOpenRange{2, 12}));
}

TEST(ResizePlan, CommittedBlocksGoOthersAreHeld) {
    const LengthState before{.lengths = {512, 0}, .first_held = 7};
    const LifeCyclePlan plan = plan_life_cycle(windowed(128, 2), {32, std::nullopt}, before, {512, 512});
    EXPECT_EQ(plan.retired, (HalfOpenRange{2, 7}));
    EXPECT_EQ(plan.held, (HalfOpenRange{7, 12}));
    const LifeCyclePlan later =
        plan_life_cycle(windowed(128, 2), {32, std::nullopt}, {.lengths = {512, 320}, .first_held = 3}, {512, 512});
    EXPECT_TRUE(later.retired.empty());
    EXPECT_EQ(later.held, (HalfOpenRange{6, 12}));  // 5 and before were stale already
}

// A history that commits move takes no slots: scratch blocks that the window still sees stay scratch.
TEST(ResizePlan, CommittedHistoryKeepsLiveScratchBlocks) {
    const LengthRules rules{32, 0};
    const LifeCycle life_cycle = windowed(128);
    const HalfOpenRange scratch = scratch_blocks(life_cycle, rules, {1024, 0});
    ASSERT_EQ(scratch, (HalfOpenRange{0, 28}));
    const LengthState before{{1024, 0}, scratch, 0};
    const LifeCyclePlan halfway = plan_history(life_cycle, rules, before, 512);
    EXPECT_EQ(halfway.scratch, (HalfOpenRange{12, 28}));
    EXPECT_EQ(halfway.scratch_slots, 4);
    EXPECT_EQ(halfway.held, (HalfOpenRange{0, 12}));
    EXPECT_EQ(halfway.allocate.total(), 0);
    const LifeCyclePlan whole = plan_history(life_cycle, rules, before, 1024);
    EXPECT_TRUE(whole.scratch.empty());
    EXPECT_EQ(whole.scratch_slots, 0);
}

// B044: window 128, one chunk of 4096, rewind 3. The tail that may be taken back keeps pages of its own.
TEST(ResizePlan, ScratchSparesTheRewindTail) {
    const LengthRules rules{32, 3};
    const LifeCyclePlan plan = plan_life_cycle(windowed(128), rules, {}, {4096, 0});
    EXPECT_EQ(plan.scratch, (HalfOpenRange{0, (4093 + 1 - 128) / 32}));
    EXPECT_TRUE(blocks_of(plan.allocate).contains((4093 + 1 - 128) / 32));
    EXPECT_EQ(plan.scratch_slots, div_up(plan.scratch.size(), std::int64_t{4}));
}

// Going from one pair of lengths to another changes exactly the difference of the live sets, for any pair.
TEST(ResizePlan, ChangesAreTheDifferenceOfLiveSets) {
    std::mt19937 rng(7);
    const auto draw = [&](std::int64_t most) {
        return static_cast<std::int64_t>(rng() % static_cast<unsigned>(most + 1));
    };
    for (int turn = 0; turn < 20000; ++turn) {
        const LengthRules rules{1 + draw(7), draw(1) == 0 ? std::nullopt : std::optional<std::int64_t>(draw(9))};
        const LifeCycle life_cycle = windowed(1 + draw(40), draw(3));
        Lengths before;
        before.capacity = draw(120);
        before.history = draw(before.capacity);
        Lengths after;
        after.history = before.history + draw(40);
        after.capacity = after.history + draw(80);
        const auto scratch = scratch_blocks(life_cycle, rules, before);
        const LifeCyclePlan plan = plan_life_cycle(life_cycle, rules, {before, scratch, draw(20)}, after);
        std::set<std::int64_t> pages = live(life_cycle, rules, before);
        for (const HalfOpenRange& range : {plan.retired, plan.held, plan.into_scratch, plan.cut}) {
            for (std::int64_t o = range.beg; o < range.end; ++o) {
                pages.erase(o);
            }
        }
        for (const std::int64_t o : blocks_of(plan.allocate)) {
            EXPECT_TRUE(pages.insert(o).second) << "allocated although it has a page: " << o;
        }
        ASSERT_EQ(pages, live(life_cycle, rules, after)) << "turn " << turn;
        ASSERT_EQ(plan.scratch, scratch_blocks(life_cycle, rules, after));
    }
}

// Inside the box nothing but the lengths changes; and the box is not uselessly small: it holds the present lengths.
TEST(LengthBox, InsideItNothingChanges) {
    std::mt19937 rng(11);
    const auto draw = [&](std::int64_t most) {
        return static_cast<std::int64_t>(rng() % static_cast<unsigned>(most + 1));
    };
    int moved = 0;
    for (int turn = 0; turn < 20000; ++turn) {
        Layout layout;
        layout.tokens_per_block = 1 + draw(7);
        layout.life_cycles = {LifeCycle{}, windowed(1 + draw(40), draw(3)), windowed(1 + draw(40))};
        const LengthRules rules{layout.tokens_per_block,
                                draw(1) == 0 ? std::nullopt : std::optional<std::int64_t>(draw(9))};
        Lengths before;
        before.capacity = draw(120);
        before.history = draw(before.capacity);
        const LengthBox box = length_box(layout, rules, before);
        ASSERT_LT(box.capacity_floor, before.capacity);
        ASSERT_GE(box.capacity_limit, before.capacity);
        ASSERT_GE(box.history_limit, before.history);
        Lengths after;
        after.history = before.history + draw(std::min<std::int64_t>(20, box.history_limit - before.history));
        after.capacity = box.capacity_floor + 1 + draw(box.capacity_limit - box.capacity_floor - 1);
        if (after.capacity < after.history) {
            continue;
        }
        moved += before == after ? 0 : 1;
        for (const LifeCycle& life_cycle : layout.life_cycles) {
            ASSERT_EQ(live(life_cycle, rules, before), live(life_cycle, rules, after)) << "turn " << turn;
            ASSERT_EQ(scratch_blocks(life_cycle, rules, before), scratch_blocks(life_cycle, rules, after))
                << "turn " << turn;
        }
    }
    EXPECT_GT(moved, 5000);
}

// Decoding token by token leaves the box only where a block or a window is crossed.
TEST(LengthBox, ReachesAsFarAsTheNextCrossing) {
    Layout layout;
    layout.tokens_per_block = 32;
    layout.life_cycles = {LifeCycle{}, windowed(128)};
    const LengthBox box = length_box(layout, {32, std::nullopt}, {2049, 2048});
    EXPECT_EQ(box.capacity_floor, 2048);
    EXPECT_EQ(box.capacity_limit, 2080);
    EXPECT_EQ(stale_range(layout.life_cycles[1].key, 32, box.history_limit),
              stale_range(layout.life_cycles[1].key, 32, 2048));
    EXPECT_NE(stale_range(layout.life_cycles[1].key, 32, box.history_limit + 1),
              stale_range(layout.life_cycles[1].key, 32, 2048));
}

}  // namespace
}  // namespace kvpool
