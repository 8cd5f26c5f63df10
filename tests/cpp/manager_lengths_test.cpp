// Lengths, windows, scratch and beams of single caches.
#include "manager_support.hpp"

namespace kvpool {
namespace {

using testing_configs::attention;
using testing_configs::config_of;
using namespace testing_managers;

TEST(Manager, LengthsAndStates) {
    Manager manager(one_layer(8), "virtual");
    const CacheHandle cache = manager.create();
    EXPECT_EQ(cache, std::int64_t{1} << 32);
    EXPECT_EQ(manager.status(cache), CacheStatus::suspended);
    EXPECT_THROW(static_cast<void>(manager.resize(cache, 32, 0)), LogicError);
    EXPECT_TRUE(manager.resume(cache, std::nullopt));
    EXPECT_TRUE(manager.resize(cache, 70, 33));
    EXPECT_EQ(manager.lengths(cache).num_blocks, 3);
    EXPECT_EQ(manager.page_indices(cache, 0, 0), (Ids{0, 1, 2}));
    manager.suspend(cache);
    EXPECT_EQ(manager.page_indices(cache, 0, 0), (Ids{-1, -1, -1}));
    EXPECT_EQ(manager.held_page_indices(cache, 0, 0), (Ids{0, 1, 2}));
    manager.close(cache);
    EXPECT_EQ(manager.status(cache), CacheStatus::closed);
    EXPECT_THROW(manager.suspend(cache), LogicError);
    EXPECT_EQ(manager.create(), std::int64_t{2} << 32);
    EXPECT_THROW(manager.shutdown(), LogicError);
}

TEST(Manager, ShortageIsFalseAndNeverIsAnError) {
    Manager manager(one_layer(4), "virtual");
    const CacheHandle a = open_active(manager);
    const CacheHandle b = open_active(manager);
    EXPECT_TRUE(manager.resize(a, 3 * 32, std::nullopt));
    EXPECT_TRUE(manager.resize(b, 32, std::nullopt));
    const ManagerSnapshot before = manager.snapshot();
    EXPECT_FALSE(manager.resize(b, 64, std::nullopt));
    EXPECT_THROW(static_cast<void>(manager.resize(b, 5 * 32, std::nullopt)), NeverFitsError);
    EXPECT_THROW(static_cast<void>(manager.resize(b, 16, 17)), ArgumentError);
    EXPECT_THROW(static_cast<void>(manager.resize(b, std::int64_t{1} << 31, 0)), ArgumentError);
    EXPECT_EQ(manager.snapshot(), before);
}

TEST(Manager, WindowSlidesThroughAFullPool) {
    Manager manager(one_layer(2, 32), "virtual");
    const CacheHandle cache = open_active(manager);
    EXPECT_TRUE(manager.resize(cache, 64, 0));
    EXPECT_TRUE(manager.resize(cache, 96, 64));  // block 0 goes, block 2 takes its slot
    EXPECT_EQ(manager.page_indices(cache, 0, 0), (Ids{-1, 1, 0}));
    for (std::int64_t history = 65; history < 1000; ++history) {
        ASSERT_TRUE(manager.resize(cache, history + 1, history));
        ASSERT_LE(used(manager), 2);
        manager.audit();
    }
}

TEST(Manager, SinksStay) {
    Manager manager(one_layer(24, 128, 48), "virtual");
    const CacheHandle cache = open_active(manager);
    for (std::int64_t history = 0; history < 704; ++history) {
        ASSERT_TRUE(manager.resize(cache, history + 1, history));
    }
    const Ids exposed = manager.page_indices(cache, 0, 0);
    Ids live;
    for (std::size_t o = 0; o < exposed.size(); ++o) {
        if (exposed[o] >= 0) {
            live.push_back(static_cast<std::int32_t>(o));
        }
    }
    EXPECT_EQ(live, (Ids{0, 1, 18, 19, 20, 21}));
}

TEST(Manager, StalePagesAreHeldWhileTheyMayBeCommitted) {
    Manager manager(one_layer(8, 64), "virtual");
    const CacheHandle cache = open_active(manager, false);
    EXPECT_TRUE(manager.resize(cache, 256, 0));
    EXPECT_TRUE(manager.resize(cache, std::nullopt, 256));
    EXPECT_EQ(used(manager), 8);
    EXPECT_EQ(manager.page_indices(cache, 0, 0), (Ids{-1, -1, -1, -1, -1, -1, 6, 7}));
    manager.audit();
    manager.stop_committing(cache);
    EXPECT_EQ(used(manager), 2);
    manager.audit();
}

// Scenario 82: 32 layers, window 128, a prompt of 1024.
TEST(Scratch, SlotsAreSharedByLayers) {
    Manager manager(scratch_layers(32, 128, 0, 64 * kMiB), "virtual");
    const CacheHandle cache = open_active(manager);
    EXPECT_TRUE(manager.resize(cache, 1024, 0));
    const std::optional<ScratchDescription> scratch = manager.scratch_desc(cache, 0);
    ASSERT_TRUE(scratch.has_value());
    EXPECT_EQ(scratch->blocks, (HalfOpenRange{0, 28}));
    EXPECT_EQ(scratch->slots.size(), 1U);  // ceil(28 / 32)
    const Ids exposed = manager.page_indices(cache, 0, 0);
    for (std::int64_t o = 0; o < 32; ++o) {
        EXPECT_EQ(exposed[static_cast<std::size_t>(o)] == -1, o < 28);
    }
    EXPECT_TRUE(manager.resize(cache, 1024, 1024));
    EXPECT_FALSE(manager.scratch_desc(cache, 0).has_value());
    EXPECT_EQ(used(manager), 4);
    manager.audit();
}

// Scenario 83: 8 layers, window 32, a prompt of 256.
TEST(Scratch, RewindKeepsBlocksOutOfIt) {
    for (const auto& [rewind, blocks] : {std::pair<std::int64_t, std::int64_t>{0, 7}, {64, 5}}) {
        Manager manager(scratch_layers(8, 32, rewind, 64 * kMiB), "virtual");
        const CacheHandle cache = open_active(manager);
        EXPECT_TRUE(manager.resize(cache, 256, 0));
        const std::optional<ScratchDescription> scratch = manager.scratch_desc(cache, 0);
        ASSERT_TRUE(scratch.has_value());
        EXPECT_EQ(scratch->blocks.size(), blocks);
        EXPECT_EQ(scratch->slots.size(), 1U);  // ceil(7 / 8), ceil(5 / 8)
        EXPECT_GE(manager.page_indices(cache, 0, 0)[7], 0);
        manager.audit();
    }
}

// B044: two steps give what one gives; pages in the rewound window are intact.
TEST(Scratch, TwoStepsAreOne) {
    Manager manager(scratch_layers(4, 128, 3, 64 * kMiB), "virtual");
    const CacheHandle one = open_active(manager);
    const CacheHandle two = open_active(manager);
    EXPECT_TRUE(manager.resize(one, 4096, 0));
    EXPECT_TRUE(manager.resize(two, 2048, 0));
    EXPECT_TRUE(manager.resize(two, 4096, 0));
    EXPECT_EQ(manager.scratch_desc(one, 0)->blocks, manager.scratch_desc(two, 0)->blocks);
    for (const CacheHandle cache : {one, two}) {
        const Ids before = manager.page_indices(cache, 0, 0);
        EXPECT_TRUE(manager.resize(cache, 4093, 4093));
        const Ids after = manager.page_indices(cache, 0, 0);
        for (std::size_t o = (4093 + 1 - 128) / 32; o < 128; ++o) {
            EXPECT_GE(after[o], 0);
            EXPECT_EQ(after[o], before[o]);
        }
    }
    manager.audit();
}

TEST(Scratch, FreedWhileSuspended) {
    Manager manager(scratch_layers(4, 128, 0, 64 * kMiB), "virtual");
    const CacheHandle cache = open_active(manager);
    EXPECT_TRUE(manager.resize(cache, 2048, 0));
    const ManagerSnapshot active = manager.snapshot();
    manager.suspend(cache);
    EXPECT_FALSE(manager.scratch_desc(cache, 0).has_value());
    manager.audit();
    EXPECT_TRUE(manager.resume(cache, std::nullopt));
    EXPECT_EQ(manager.snapshot(), active);
}

// B162: prompt 40, blocks of 32, beam 4, one step: 1 shared page and 4 tails.
TEST(Beams, PromptIsSharedAndTheTailCopied) {
    Manager manager(one_layer(8), "host");
    const CacheHandle cache = open_active(manager);
    EXPECT_TRUE(manager.resize(cache, 40, 40));
    const Pool pool = manager.pool(0, 0);
    std::byte* const bytes = pool.arena()->data();
    for (std::int64_t slot = 0; slot < 2; ++slot) {
        std::fill_n(bytes + slot * pool.slot_bytes(), pool.slot_bytes(), static_cast<std::byte>(slot + 1));
    }
    manager.set_beam_width(cache, 4);
    EXPECT_TRUE(manager.resize(cache, 41, 40));
    EXPECT_EQ(used(manager), 5);
    for (std::int64_t beam = 1; beam < 4; ++beam) {
        const Ids ids = manager.page_indices(cache, 0, beam);
        EXPECT_EQ(ids, (Ids{-1, static_cast<std::int32_t>(beam + 1)}));
        EXPECT_EQ(bytes[ids[1] * pool.slot_bytes() + 17], std::byte{2});
    }
    manager.audit();
    manager.close(cache);
    EXPECT_EQ(used(manager), 0);
}

// B007: 256 blocks of 32, beam 32, a prompt of 9, 64 new tokens: 3 blocks per beam at most.
TEST(Beams, ManyBeamsInASmallPool) {
    Manager manager(one_layer(256), "virtual");
    const CacheHandle cache = open_active(manager);
    EXPECT_TRUE(manager.resize(cache, 9, 9));
    manager.set_beam_width(cache, 32);
    for (std::int64_t token = 0; token < 64; ++token) {
        ASSERT_TRUE(manager.resize(cache, 10 + token, 9 + token));
    }
    EXPECT_EQ(used(manager), 96);
    manager.audit();
    manager.set_beam_width(cache, 1);
    EXPECT_EQ(used(manager), 3);
    EXPECT_THROW(manager.set_beam_width(cache, 300), NeverFitsError);
    manager.audit();
}

TEST(Beams, StateIsPerBeam) {
    Manager manager(mixed(64 * kMiB, true), "virtual");
    const CacheHandle cache = open_active(manager);
    EXPECT_EQ(manager.ssm_slot(cache, 2, 0).value(), 0);
    manager.set_beam_width(cache, 3);
    EXPECT_EQ(manager.ssm_slot(cache, 2, 2).value(), 2);
    EXPECT_EQ(manager.page_indices(cache, 2, 2), Ids{});
    manager.audit();
}

TEST(Manager, ZeroLayersWork) {
    Manager manager(config_of({}), "virtual");
    const CacheHandle cache = open_active(manager);
    EXPECT_TRUE(manager.resize(cache, 100, 50));
    EXPECT_EQ(manager.mapped_bytes(), 0);
    EXPECT_EQ(manager.clamp_max_seq_len(3, 100), 100);
    manager.close(cache);
    manager.shutdown();
    manager.shutdown();
}

TEST(Manager, ClampCountsWholeBlocks) {
    Manager manager(one_layer(1), "virtual");
    EXPECT_EQ(manager.clamp_max_seq_len(1, 0), 0);
    EXPECT_EQ(manager.clamp_max_seq_len(1, 32), 32);
    EXPECT_EQ(manager.clamp_max_seq_len(1, 64), 32);
    EXPECT_EQ(manager.clamp_max_seq_len(2, 64), 0);
    Manager window(one_layer(2, 32), "virtual");
    EXPECT_EQ(window.clamp_max_seq_len(1, 96), 96);
}

TEST(Manager, AttachedBufferFollows) {
    Manager manager(one_layer(8, 64), "virtual");
    const CacheHandle cache = open_active(manager);
    auto buffer = std::make_shared<Ids>(5, 123);
    EXPECT_TRUE(manager.resize(cache, 64, 0));
    manager.attach_buffer(cache, 0, 0, *buffer, buffer);
    EXPECT_EQ(*buffer, (Ids{0, 1, -1, -1, -1}));
    EXPECT_TRUE(manager.resize(cache, 160, 130));
    EXPECT_EQ((*buffer)[0], -1);
    EXPECT_GE((*buffer)[4], 0);
    EXPECT_THROW(static_cast<void>(manager.resize(cache, 161, 130)), ArgumentError);
    manager.audit();
    EXPECT_EQ(buffer.use_count(), 2);
    manager.suspend(cache);
    EXPECT_EQ(*buffer, (Ids{-1, -1, -1, -1, -1}));
    EXPECT_EQ(buffer.use_count(), 1);
}

}  // namespace
}  // namespace kvpool
