#include "kvpool/storage/demand.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <limits>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"
#include "storage_configs.hpp"

namespace kvpool {
namespace {

using testing_configs::attention;
using testing_configs::config_of;
using testing_configs::ssm;

using Counts = std::vector<std::int64_t>;

constexpr LifeCycleKey window(std::int64_t w, std::int64_t sinks = 0) { return {false, w, sinks}; }

TEST(StaleRange, FollowsTheWindow) {
    EXPECT_EQ(stale_range(window(32), 32, 31), (HalfOpenRange{0, 0}));
    EXPECT_EQ(stale_range(window(32), 32, 63), (HalfOpenRange{0, 1}));  // query at 63 sees 32..63
    EXPECT_EQ(stale_range(window(32), 32, 62), (HalfOpenRange{0, 0}));
    EXPECT_EQ(stale_range(window(1), 32, 32), (HalfOpenRange{0, 1}));
    EXPECT_EQ(stale_range(window(32, 1), 32, 200), (HalfOpenRange{1, 5}));
    EXPECT_EQ(stale_range(window(32, 8), 32, 64), (HalfOpenRange{2, 2}));
    EXPECT_TRUE(stale_range(LifeCycleKey{}, 32, 1000).empty());
    EXPECT_EQ(stale_range(LifeCycleKey{.is_ssm = true}, 32, 100), (HalfOpenRange{0, 3}));
    EXPECT_TRUE(stale_range(window(kHuge), 32, 5).empty());
}

// B002: a window of 11 tokens never touches more than two blocks of 16.
TEST(StaleRange, StraddlingWindowHasTwoBlocks) {
    std::int64_t peak = 0;
    for (std::int64_t h = 0; h <= 200; ++h) {
        const HalfOpenRange stale = stale_range(window(11), 16, h);
        peak = std::max(peak, div_up(h + 1, std::int64_t{16}) - stale.size());
    }
    EXPECT_EQ(peak, 2);
}

TEST(ScratchRange, IsWhatThisChunkWillLeaveBehind) {
    // Scenario 83: window 32, prompt 256, tpb 32.
    EXPECT_EQ(scratch_range(window(32), 32, 0, 256, 0), (HalfOpenRange{0, 7}));
    EXPECT_EQ(scratch_range(window(32), 32, 0, 256, 64), (HalfOpenRange{0, 5}));
    EXPECT_EQ(scratch_range(window(32), 32, 70, 256, 0), (HalfOpenRange{3, 7}));
    EXPECT_TRUE(scratch_range(window(32), 32, 256, 288, 0).empty());
    EXPECT_TRUE(scratch_range(LifeCycleKey{}, 32, 0, 256, 0).empty());
    EXPECT_TRUE(scratch_range(LifeCycleKey{.is_ssm = true}, 32, 0, 256, 0).empty());
    EXPECT_TRUE(scratch_range(window(32), 32, 0, 256, 1000).empty());
}

TEST(Demand, CountsLiveBlocks) {
    const Layout layout = build_layout(config_of({attention(0, {64}, 128), attention(1, {64}), ssm(2, 64)}));
    EXPECT_EQ(batch_demand(layout, {{{2049, 2048}}, 0}, std::nullopt), (Counts{5, 65, 1}));
    EXPECT_EQ(batch_demand(layout, {{{256, 128}, {64, 63}}, 0}, std::nullopt), (Counts{10, 10, 2}));
    EXPECT_EQ(batch_demand(layout, {{}, 0}, std::nullopt), (Counts{0, 0, 0}));
    EXPECT_EQ(batch_demand(layout, {{{0, 0}}, 0}, std::nullopt), (Counts{0, 0, 1}));
}

TEST(Demand, SharedBlocksCountOnce) {
    const Layout layout = build_layout(config_of({attention(0, {64}, 128), attention(1, {64})}));
    // 320 tokens in common; both requests have gone on by 64 tokens.
    const Batch batch{{{384, 383}, {384, 383}}, 320};
    // full: 10 shared + 2 * 2 own. window 128: stale [0, 8), live 8..11, of which 8 and 9 are shared.
    EXPECT_EQ(batch_demand(layout, batch, std::nullopt), (Counts{2 + 2 * 2, 10 + 2 * 2}));
    // A shared block is live while one request reads it.
    const Batch mixed{{{384, 383}, {384, 0}}, 320};
    EXPECT_EQ(batch_demand(layout, mixed, std::nullopt), (Counts{10 + 2 + 2, 10 + 2 + 2}));
}

// Scenario 79: four fresh prompts of 512 tokens with scratch.
TEST(Demand, ScratchCountsAtItsFraction) {
    std::vector<LayerConfig> layers;
    for (std::int64_t i = 0; i < 12; ++i) {
        layers.push_back(attention(i, {64, 64}, 128));
    }
    const Layout layout = build_layout(config_of(layers));
    const Batch batch{{{512, 0}, {512, 0}, {512, 0}, {512, 0}}, 0};
    EXPECT_EQ(batch_demand(layout, batch, std::nullopt), Counts{4 * 16});
    EXPECT_EQ(batch_demand(layout, batch, 0), Counts{4 * (4 + 1)});
}

TEST(Demand, RefusesImpossibleBatches) {
    const Layout layout = build_layout(config_of({attention(0, {64})}));
    EXPECT_THROW((void)batch_demand(layout, {{{10, 11}}, 0}, std::nullopt), ConfigError);
    EXPECT_THROW((void)batch_demand(layout, {{{10, -1}}, 0}, std::nullopt), ConfigError);
    EXPECT_THROW((void)batch_demand(layout, {{}, -1}, std::nullopt), ConfigError);
}

TEST(Demand, SaturatesInsteadOfOverflowing) {
    ManagerConfig config = config_of({attention(0, {64})});
    config.tokens_per_block = 1;
    const Layout layout = build_layout(config);
    EXPECT_EQ(batch_demand(layout, {{{kHuge, 0}, {kHuge, 0}, {kHuge, 0}}, 0}, std::nullopt), Counts{kHuge});
    config.constraints = {{{{kHuge, 0}, {kHuge, 0}}, 0}};
    EXPECT_EQ(pool_group_floors(layout, config), Counts{kHuge});
}

// B001 and the structural floors.
TEST(Floors, AreWhatOneRequestNeeds) {
    EXPECT_EQ(structural_floors(build_layout(config_of({attention(0, {64}, 16)}))), Counts{2});
    EXPECT_EQ(structural_floors(build_layout(config_of({attention(0, {64}, 1)}))), Counts{1});
    EXPECT_EQ(structural_floors(build_layout(config_of({attention(0, {64}, 128, 32), attention(1, {8}), ssm(2, 8)}))),
              (Counts{1 + 4 + 1, 6, 1}));
    EXPECT_EQ(structural_floors(build_layout(config_of({attention(0, {64})}))), Counts{1});

    ManagerConfig config = config_of({attention(0, {64}, 16)});
    for (int i = 0; i < 8; ++i) {
        config.constraints.resize(1);
        config.constraints[0].requests.push_back({50, 40});
    }
    EXPECT_EQ(pool_group_floors(build_layout(config), config), Counts{17});  // ceil(8 * 2 / 0.97)
    config.max_util_for_resume = 1.0;
    EXPECT_EQ(pool_group_floors(build_layout(config), config), Counts{16});
}

// Scenario 67.
TEST(Floors, StateGroupsIgnoreTheResumeLimit) {
    ManagerConfig config = config_of({attention(0, {64}), ssm(1, 4096)});
    config.max_util_for_resume = 0.5;
    config.constraints = {{{{64, 63}, {0, 0}}, 0}};
    EXPECT_EQ(pool_group_floors(build_layout(config), config), (Counts{4, 2}));
}

// Scenario 73.
TEST(Floors, RefuseAnImpossibleLimit) {
    ManagerConfig config = config_of({attention(0, {64})});
    for (const double limit : {0.0, -0.1, 1.1, std::numeric_limits<double>::quiet_NaN()}) {
        config.max_util_for_resume = limit;
        EXPECT_THROW((void)pool_group_floors(build_layout(config), config), ConfigError);
    }
}

}  // namespace
}  // namespace kvpool
