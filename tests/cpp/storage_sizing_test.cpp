#include "kvpool/storage/sizing.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"
#include "storage_configs.hpp"

namespace kvpool {
namespace {

using testing_configs::attention;
using testing_configs::config_of;
using testing_configs::gpt_oss_120b;
using testing_configs::ssm;

using Counts = std::vector<std::int64_t>;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr std::int64_t kGiB = std::int64_t{1} << 30;

PoolPlan plan(const ManagerConfig& config) { return plan_pools(build_layout(config), config, 2 * kMiB); }

SizingGroup group(Counts slot_sizes, std::int64_t floor, std::int64_t need, std::int64_t window = 1) {
    return {std::move(slot_sizes), floor, need, {false, window, 0}, ""};
}

std::int64_t cost(const std::vector<SizingGroup>& groups, const Counts& counts, std::int64_t grain) {
    std::int64_t sum = 0;
    for (std::size_t i = 0; i < groups.size(); ++i) {
        for (const std::int64_t size : groups[i].slot_sizes) {
            sum += round_up(counts[i] * size, grain);
        }
    }
    return sum;
}

// The rule, word by word and step by step.
Counts solve_slowly(std::int64_t quota, std::int64_t grain, const std::vector<SizingGroup>& groups) {
    std::int64_t most = 0;
    for (const SizingGroup& g : groups) {
        most = std::max(most, g.need);
    }
    Counts counts;
    for (std::int64_t m = 0;; ++m) {
        Counts next;
        for (const SizingGroup& g : groups) {
            next.push_back(std::max(g.floor, m * g.need / most));
        }
        if (cost(groups, next, grain) > quota) {
            break;
        }
        counts = next;
    }
    std::vector<bool> open(groups.size(), true);
    while (std::count(open.begin(), open.end(), true) > 0) {
        std::size_t best = groups.size();
        for (std::size_t i = 0; i < groups.size(); ++i) {
            if (!open[i]) {
                continue;
            }
            if (best == groups.size()) {
                best = i;
                continue;
            }
            const std::int64_t a = counts[i] * groups[best].need;
            const std::int64_t b = counts[best] * groups[i].need;
            std::int64_t bytes_i = 0;
            std::int64_t bytes_best = 0;
            for (const std::int64_t s : groups[i].slot_sizes) bytes_i += s;
            for (const std::int64_t s : groups[best].slot_sizes) bytes_best += s;
            const bool first = a != b                  ? a < b
                               : bytes_i != bytes_best ? bytes_i > bytes_best
                                                       : groups[i].key < groups[best].key;
            best = first ? i : best;
        }
        Counts next = counts;
        ++next[best];
        if (cost(groups, next, grain) <= quota) {
            counts = next;
        } else {
            open[best] = false;
        }
    }
    return counts;
}

TEST(Grain, FollowsTheTable) {
    EXPECT_EQ(grain_for_quota(1, 4096), 2 * kMiB);
    EXPECT_EQ(grain_for_quota(2 * kGiB - 1, 4096), 2 * kMiB);
    EXPECT_EQ(grain_for_quota(2 * kGiB, 4096), 4 * kMiB);
    EXPECT_EQ(grain_for_quota(4 * kGiB - 1, 4096), 4 * kMiB);
    EXPECT_EQ(grain_for_quota(4 * kGiB, 4096), 8 * kMiB);
    EXPECT_EQ(grain_for_quota(8 * kGiB, 4096), 16 * kMiB);
    EXPECT_EQ(grain_for_quota(16 * kGiB, 4096), 32 * kMiB);
    EXPECT_EQ(grain_for_quota(kHuge, 4096), 32 * kMiB);
    EXPECT_EQ(grain_for_quota(kGiB, 3 * kMiB), 3 * kMiB);
    EXPECT_THROW((void)grain_for_quota(0, 4096), ArgumentError);
}

// Scenario 2.
TEST(Grain, SlotsThereAndBack) {
    const Counts sizes{16'252'928, 4'063'232};
    const std::int64_t grains = grains_for_slots(157, sizes, 16 * kMiB);
    const auto [slots, used] = grains_to_slots(grains, sizes, 16 * kMiB);
    EXPECT_GE(slots, 157);
    EXPECT_LE(used, grains);
    EXPECT_EQ(grains_for_slots(slots, sizes, 16 * kMiB), used);
    EXPECT_GT(grains_for_slots(slots + 1, sizes, 16 * kMiB), grains);
    EXPECT_EQ(grains_to_slots(1, sizes, 16 * kMiB), (std::pair<std::int64_t, std::int64_t>{0, 0}));
    EXPECT_THROW((void)grains_to_slots(1, Counts{}, kMiB), ArgumentError);
}

TEST(Solve, AgreesWithTheRuleTakenLiterally) {
    std::mt19937 random(11);
    const auto draw = [&](std::int64_t low, std::int64_t high) {
        return low + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(high - low + 1));
    };
    for (int trial = 0; trial < 3000; ++trial) {
        const std::int64_t grain = draw(1, 64);
        std::vector<SizingGroup> groups;
        for (std::int64_t i = draw(1, 5); i > 0; --i) {
            Counts sizes;
            for (std::int64_t p = draw(1, 3); p > 0; --p) {
                sizes.push_back(draw(1, draw(0, 3) == 0 ? 400 : 20));
            }
            groups.push_back(group(sizes, draw(0, draw(0, 4) == 0 ? 200 : 5), draw(1, draw(0, 1) == 0 ? 3 : 50), i));
        }
        const std::int64_t quota = draw(1, 20'000);
        Counts floors;
        for (const SizingGroup& g : groups) {
            floors.push_back(g.floor);
        }
        if (cost(groups, floors, grain) > quota) {
            EXPECT_THROW((void)solve_slot_counts(quota, grain, groups), ConfigError);
            continue;
        }
        const Counts counts = solve_slot_counts(quota, grain, groups);
        ASSERT_EQ(counts, solve_slowly(quota, grain, groups)) << "trial " << trial;
        ASSERT_LE(cost(groups, counts, grain), quota);
        // Order of groups does not matter.
        std::vector<SizingGroup> reversed(groups.rbegin(), groups.rend());
        Counts back = solve_slot_counts(quota, grain, reversed);
        std::reverse(back.begin(), back.end());
        ASSERT_EQ(back, counts);
    }
}

// Scenario 74.
TEST(Solve, BytesLeftOverGoToTheSmallestShare) {
    const std::vector<SizingGroup> groups{group({2 * kMiB - 1}, 1, 1, 1), group({2 * kMiB}, 1, 1, 2)};
    EXPECT_EQ(solve_slot_counts(5 * 2 * kMiB, 2 * kMiB, groups), (Counts{2, 3}));
}

TEST(Solve, TiesGoToTheSmallerKeyWhateverTheOrder) {
    const std::vector<SizingGroup> groups{group({kMiB}, 0, 1, 128), group({kMiB}, 0, 1, LifeCycleKey::kFull)};
    EXPECT_EQ(solve_slot_counts(3 * kMiB, kMiB, groups), (Counts{1, 2}));
}

TEST(Solve, ListsTheFloorsThatExceedTheQuota) {
    const std::vector<SizingGroup> groups{group({kMiB}, 3, 1, 128), group({2 * kMiB, 1}, 4, 1, 256)};
    try {
        (void)solve_slot_counts(8 * kMiB, kMiB, groups);
        ADD_FAILURE();
    } catch (const ConfigError& error) {
        const std::string text = error.what();
        for (const char* part : {"8388608", "window 128", "window 256", "floor 3 slots = 3145728 bytes",
                                 "floor 4 slots = 9437184 bytes", "12582912"}) {
            EXPECT_NE(text.find(part), std::string::npos) << part << " in: " << text;
        }
    }
}

TEST(Solve, IsFastForVeryUnequalSlots) {
    const std::vector<SizingGroup> groups{group({kGiB}, 1, 1000, 1), group({1}, 0, 1, 2), group({3}, 0, 999, 3),
                                          group({7, 5}, 5'000'000'000, 7, 4)};
    const Counts counts = solve_slot_counts(200 * kGiB - 1, 1, groups);
    EXPECT_GE(cost(groups, counts, 1), 200 * kGiB - 1);
}

TEST(Solve, AbsurdInputsDoNotOverflow) {
    const std::vector<SizingGroup> large{group({kHuge}, kHuge, kHuge), group({1}, 0, 1)};
    EXPECT_THROW((void)solve_slot_counts(kHuge, 2 * kMiB, large), ConfigError);
    const std::vector<SizingGroup> small{group({1}, 0, kHuge), group({1}, 0, kHuge)};
    EXPECT_EQ(solve_slot_counts(kHuge, 1, small), (Counts{kHuge / 2, kHuge / 2}));
    EXPECT_THROW((void)solve_slot_counts(kHuge, 1, std::vector<SizingGroup>{group({}, 0, 1)}), ArgumentError);
    EXPECT_THROW((void)solve_slot_counts(kHuge, 1, std::vector<SizingGroup>{group({1}, 0, 0)}), ArgumentError);
    EXPECT_EQ(solve_slot_counts(1, 1, {}), Counts{});
}

TEST(Plan, GptOss) {
    ManagerConfig config = gpt_oss_120b(4 * kGiB);
    config.max_util_for_resume = 0.95;
    const auto with_max_seq_len = [&](std::int64_t m) {
        config.constraints = {{{{m, m - 1}}, 0}, {{{8192, 0}}, 0}};
        return plan(config);
    };
    const PoolPlan fitting = with_max_seq_len(110'528);
    EXPECT_EQ(fitting.grain, 8 * kMiB);
    EXPECT_EQ(fitting.counts, Counts{3640});
    EXPECT_EQ(fitting.floors, Counts{3640});
    EXPECT_THROW((void)with_max_seq_len(110'560), ConfigError);
}

TEST(Plan, TenTebibytes) {
    const PoolPlan p = plan(gpt_oss_120b(std::int64_t{10} << 40));
    EXPECT_EQ(p.counts, Counts{(std::int64_t{10} << 40) / (18 * 65536)});
}

// Scenario 62: too small a quota names the floor.
TEST(Plan, FloorsAreAConfigError) {
    ManagerConfig config = config_of({attention(0, {2 * kMiB}, 32)}, 2 * kMiB);
    try {
        (void)plan(config);
        ADD_FAILURE();
    } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find("floor 2 slots"), std::string::npos) << error.what();
    }
    config.gpu_quota = 4 * kMiB;
    EXPECT_EQ(plan(config).counts, Counts{2});
    config.gpu_quota = 4 * kMiB - 1;
    EXPECT_THROW((void)plan(config), ConfigError);
}

// Scenario 7: a quota that is no multiple of the grain stays a cap.
TEST(Plan, SmallQuota) {
    std::vector<LayerConfig> layers;
    for (std::int64_t i = 0; i < 8; ++i) {
        layers.push_back(attention(i, {8192, 8192}));
    }
    const PoolPlan p = plan(config_of(layers, 5'619'712));
    EXPECT_EQ(p.counts, Counts{4 * kMiB / (8 * 16384)});
}

ManagerConfig two_groups(std::int64_t quota) {  // 768 KiB (window) and 1280 KiB (full) slots
    return config_of({attention(0, {768 * 1024}, 128, 32), attention(1, {1280 * 1024})}, quota);
}

double first_share(const PoolPlan& p) {
    const double a = static_cast<double>(p.counts[0]) * 768;
    return a / (a + static_cast<double>(p.counts[1]) * 1280);
}

// Scenarios 64, 65, 70.
TEST(Plan, NeedsFollowTheConfiguration) {
    ManagerConfig config = two_groups(128 * kMiB);
    EXPECT_LT(first_share(plan(config)), 0.5);

    config.typical_step = Batch{std::vector<Request>(64, Request{64, 32}), 0};
    const PoolPlan typical = plan(config);
    const double ratio = first_share(typical) / (1 - first_share(typical));
    EXPECT_NEAR(ratio, 0.6, 0.15);

    config.typical_step.reset();
    config.initial_pool_ratio = {0.8, 0.2};
    EXPECT_NEAR(first_share(plan(config)), 0.8, 0.03);
    config.constraints = {{{{32 * 30, 0}}, 0}};
    EXPECT_GT(1 - first_share(plan(config)), 0.2);
    config.initial_pool_ratio = {0.8};
    EXPECT_THROW((void)plan(config), ConfigError);
    config.initial_pool_ratio = {0.8, -0.2};
    EXPECT_THROW((void)plan(config), ConfigError);
}

// Scenario 76.
TEST(Plan, ConstraintsAreFloorsOrAnError) {
    ManagerConfig config = two_groups(136 * kMiB);
    config.constraints = {{std::vector<Request>(8, Request{256, 255}), 0}, {{{2048, 0}}, 0}};
    const PoolPlan p = plan(config);
    EXPECT_GE(p.counts[0], p.floors[0]);
    EXPECT_GE(p.counts[1], p.floors[1]);
    config.gpu_quota = 128 * kMiB;
    EXPECT_THROW((void)plan(config), ConfigError);
}

// B011: shares belong to life cycles, not to positions of layers.
TEST(Plan, DoesNotDependOnLayerOrder) {
    ManagerConfig config = config_of({attention(0, {4096}, 128), attention(1, {8192})}, 64 * kMiB);
    config.typical_step = Batch{{{1000, 999}}, 0};
    const PoolPlan forward = plan(config);
    std::reverse(config.layers.begin(), config.layers.end());
    const PoolPlan backward = plan(config);
    EXPECT_EQ(forward.counts, (Counts{backward.counts[1], backward.counts[0]}));
}

// B016 and B021: states are not blown up, and there is one per request.
TEST(Plan, HybridStates) {
    std::vector<LayerConfig> layers;
    for (std::int64_t i = 0; i < 6; ++i) {
        layers.push_back(attention(i, {1024 * 32}));
    }
    for (std::int64_t i = 6; i < 29; ++i) {
        layers.push_back(ssm(i, 2'134'016));
    }
    ManagerConfig config = config_of(layers, 8 * kGiB);
    const Layout layout = build_layout(config);
    EXPECT_EQ(layout.pool_groups[0].slot_bytes, 192 * 1024);
    EXPECT_EQ(layout.pool_groups[1].slot_bytes, 23 * std::int64_t{2'134'016});

    config.max_util_for_resume = 1.0;
    config.constraints = {{std::vector<Request>(8, Request{4000, 3999}), 0}};  // 8 * 125 blocks
    const PoolPlan p = plan(config);
    EXPECT_EQ(p.floors, (Counts{1000, 8}));
    EXPECT_LT(p.counts[1], p.counts[0] / 50);
}

TEST(Plan, IndexRangeIsChecked) {
    ManagerConfig config = config_of({attention(0, {1, 1})}, 8 * kGiB);
    EXPECT_THROW((void)plan(config), ConfigError);
    config.gpu_quota = 2 * kGiB;
    EXPECT_EQ(plan(config).counts, Counts{kGiB});
}

TEST(Plan, NoLayers) { EXPECT_TRUE(plan(config_of({})).counts.empty()); }

}  // namespace
}  // namespace kvpool
