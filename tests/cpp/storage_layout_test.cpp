#include "kvpool/storage/layout.hpp"

#include <gtest/gtest.h>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"
#include "storage_configs.hpp"

namespace kvpool {
namespace {

using testing_configs::attention;
using testing_configs::config_of;
using testing_configs::ssm;

using Sizes = std::vector<std::int64_t>;

TEST(Layout, FullLayersShareOnePool) {
    std::vector<LayerConfig> layers;
    for (std::int64_t i = 0; i < 4; ++i) {
        layers.push_back(attention(i, {8192, 8192}));
    }
    const Layout layout = build_layout(config_of(layers));
    ASSERT_EQ(layout.life_cycles.size(), 1u);
    ASSERT_EQ(layout.pool_groups.size(), 1u);
    EXPECT_EQ(layout.pool_groups[0].slot_sizes, Sizes{4 * 2 * 8192});
    EXPECT_EQ(layout.life_cycles[0].scratch_fraction, (Fraction{1, 4}));
    const BufferAttr& attr = layout.buffers.at({LayerId(2), "r1"});
    EXPECT_EQ(attr.offset, 5 * 8192);
    EXPECT_EQ(attr.scale, 8);
    EXPECT_EQ(attr.layer_util, 2);
}

TEST(Layout, EqualSlotsMergeAndCanBeKeptApart) {
    std::vector<LayerConfig> layers;
    for (std::int64_t i = 0; i < 4; ++i) {
        layers.push_back(i % 2 == 0 ? attention(i, {8192, 8192}, 100) : attention(i, {8192, 8192}));
    }
    ManagerConfig config = config_of(layers);
    Layout layout = build_layout(config);
    ASSERT_EQ(layout.life_cycles.size(), 2u);
    ASSERT_EQ(layout.pool_groups.size(), 1u);
    EXPECT_EQ(layout.pool_groups[0].slot_sizes, Sizes{2 * 2 * 8192});
    EXPECT_EQ(layout.pool_groups[0].key.window, LifeCycleKey::kFull);  // smaller than any window
    config.merge_equal_pools = false;
    layout = build_layout(config);
    ASSERT_EQ(layout.pool_groups.size(), 2u);
    EXPECT_EQ(layout.life_cycles[1].pool_group, PoolGroupId(1));
}

TEST(Layout, UnequalSlotsAreTwoGroups) {
    const Layout layout = build_layout(config_of({attention(0, {8192, 8192}), attention(1, {16384, 16384}, 100)}));
    ASSERT_EQ(layout.pool_groups.size(), 2u);
    EXPECT_EQ(layout.pool_groups[0].slot_sizes, Sizes{16384});
    EXPECT_EQ(layout.pool_groups[1].slot_sizes, Sizes{32768});
}

TEST(Layout, ScalesGetTheirOwnPoolBehindTheLargerOne) {
    const Layout layout =
        build_layout(config_of({attention(0, {8192, 8192, 512, 512}), attention(1, {512, 8192, 8192, 512})}));
    ASSERT_EQ(layout.pool_groups.size(), 1u);
    EXPECT_EQ(layout.pool_groups[0].slot_sizes, (Sizes{32768, 2048}));
    const BufferAttr& attr = layout.buffers.at({LayerId(1), "r3"});
    EXPECT_EQ(attr.pool, PoolId(1));
    EXPECT_EQ(attr.offset, 3 * 512);
}

TEST(Layout, EqualTotalsStayInOrderOfMention) {
    const Layout layout = build_layout(config_of({attention(0, {8, 16, 8, 16, 8, 8})}));
    const LifeCycle& life_cycle = layout.life_cycles[0];
    ASSERT_EQ(life_cycle.coalesced.size(), 2u);
    EXPECT_EQ(life_cycle.coalesced[0].single_size, 8);
    EXPECT_EQ(life_cycle.coalesced[1].single_size, 16);
}

TEST(Layout, SinkBlocksAreTheKeyNotSinkTokens) {
    const Layout layout =
        build_layout(config_of({attention(0, {64}, 128, 1), attention(1, {64}, 128, 32), attention(2, {64}, 128, 33)}));
    ASSERT_EQ(layout.life_cycles.size(), 2u);
    EXPECT_EQ(layout.life_cycles[0].layers, (std::vector<LayerId>{LayerId(0), LayerId(1)}));
    EXPECT_EQ(layout.life_cycles[1].key.sink_blocks, 2);
}

TEST(Layout, StateLayersShareOneLifeCycle) {
    const Layout layout = build_layout(config_of({ssm(7, 1000), attention(1, {64}), ssm(3, 2000)}));
    ASSERT_EQ(layout.life_cycles.size(), 2u);
    EXPECT_TRUE(layout.life_cycles[0].key.is_ssm);
    EXPECT_TRUE(layout.pool_groups[0].ssm_only);
    EXPECT_FALSE(layout.pool_groups[1].ssm_only);
    EXPECT_EQ(layout.pool_groups[0].slot_sizes, (Sizes{2000, 1000}));
}

TEST(Layout, ExpansionMakesBuffersCoalesce) {
    LayerConfig own = attention(0, {512, 1024});
    own.buffers[0].tokens_per_block = 16;  // 512 B for 16 tokens: 1024 B a block
    const Layout layout = build_layout(config_of({own}));
    EXPECT_EQ(layout.pool_groups[0].slot_sizes, Sizes{2048});
    EXPECT_EQ(layout.buffers.at({LayerId(0), "r0"}).expansion, 2);
    EXPECT_EQ(layout.buffers.at({LayerId(0), "r1"}).expansion, 1);
}

// B019: no padding, whatever the mix.
TEST(Layout, OneMoreDraftLayerCostsOneLayer) {
    std::vector<LayerConfig> layers;
    for (std::int64_t i = 0; i < 36; ++i) {
        layers.push_back(i % 2 == 0 ? attention(i, {512, 512}, 128) : attention(i, {512, 512}));
    }
    layers.push_back(attention(36, {512, 512}));
    const Layout layout = build_layout(config_of(layers));
    std::int64_t bytes = 0;
    for (const LifeCycle& life_cycle : layout.life_cycles) {
        for (const CoalescedBuffer& coalesced : life_cycle.coalesced) {
            bytes += coalesced.size();
        }
    }
    EXPECT_EQ(bytes, 37 * 1024);
}

// B199.
TEST(Layout, NoLayersIsLegal) {
    const Layout layout = build_layout(config_of({}));
    EXPECT_TRUE(layout.life_cycles.empty());
    EXPECT_TRUE(layout.pool_groups.empty());
    check_index_range(layout, {});
}

TEST(Layout, RefusesWhatCanNotWork) {
    const auto refuse = [](const ManagerConfig& config, const std::string& names) {
        try {
            (void)build_layout(config);
            ADD_FAILURE() << "accepted: " << names;
        } catch (const ConfigError& error) {
            EXPECT_NE(std::string(error.what()).find(names), std::string::npos) << error.what();
        }
    };
    refuse(config_of({attention(3, {64}), attention(3, {64})}), "layer 3: layer_id");
    refuse(config_of({attention(3, {})}), "buffers");
    refuse(config_of({attention(3, {0})}), "size");
    refuse(config_of({attention(3, {64}, 0)}), "sliding_window_size");
    refuse(config_of({attention(3, {64}, std::nullopt, 4)}), "num_sink_tokens");
    refuse(config_of({attention(3, {kHuge, 1})}), "2^62");
    LayerConfig twice = attention(3, {64, 64});
    twice.buffers[1].role = "r0";
    refuse(config_of({twice}), "role");
    LayerConfig odd = attention(3, {64});
    odd.buffers[0].tokens_per_block = 5;
    refuse(config_of({odd}), "tokens_per_block_override");
    LayerConfig large = attention(3, {kHuge});
    large.buffers[0].tokens_per_block = 1;
    refuse(config_of({large}), "2^62");
    LayerConfig state = ssm(3, 64);
    state.buffers[0].tokens_per_block = 16;
    refuse(config_of({state}), "tokens_per_block_override");
    ManagerConfig config = config_of({});
    config.tokens_per_block = 0;
    refuse(config, "tokens_per_block");
}

TEST(Layout, RefusesAliasingScratch) {
    ManagerConfig config = config_of({attention(0, {64, 64}, 128), attention(1, {64}, 128)});
    (void)build_layout(config);
    config.scratch_max_rewind_len = 0;
    EXPECT_THROW((void)build_layout(config), ConfigError);  // 3 % 2 != 0
    config = config_of({attention(0, {64, 64}), attention(1, {64})});
    config.scratch_max_rewind_len = 0;
    (void)build_layout(config);  // no window, no scratch
}

// B182: products are exact in 64 bits and checked against int32.
TEST(Layout, IndexRangeIsCheckedExactly) {
    const Layout layout = build_layout(config_of({attention(0, {8, 8, 8, 8})}));
    const std::int64_t most = (std::int64_t{1} << 31) / 4;
    check_index_range(layout, Sizes{most});
    try {
        check_index_range(layout, Sizes{most + 1});
        ADD_FAILURE();
    } catch (const ConfigError& error) {
        EXPECT_NE(std::string(error.what()).find("layer 0, role \"r0\""), std::string::npos);
        EXPECT_NE(std::string(error.what()).find("2147483652"), std::string::npos) << error.what();
    }
    EXPECT_THROW(check_index_range(layout, Sizes{kHuge}), ConfigError);
}

}  // namespace
}  // namespace kvpool
