// The batch step against single calls, its table, and its errors.
#include <random>

#include "manager_support.hpp"

namespace kvpool {
namespace {

using namespace testing_managers;

// Two managers of one configuration get the same random decisions: one through step(), the other request by request.
class StepAgainstResize : public ::testing::TestWithParam<int> {};

TEST_P(StepAgainstResize, SameStateAndTable) {
    std::mt19937 rng(static_cast<unsigned>(GetParam()));
    const auto draw = [&](std::int32_t most) {
        return static_cast<std::int32_t>(rng() % static_cast<unsigned>(most + 1));
    };
    ManagerConfig config = mixed((GetParam() % 2 == 0 ? 140 : 70) * kMiB, GetParam() % 2 == 0);
    if (GetParam() % 3 == 0) {
        config.scratch_max_rewind_len = draw(40);
        config.layers[1].buffers.pop_back();
    }
    Manager batched(config, "virtual");
    Manager single(config, "virtual");
    constexpr std::int32_t kRows = 6;
    constexpr std::int64_t kBlocks = 24;
    const auto groups = static_cast<std::int64_t>(batched.layout().life_cycles.size());
    const Table table(groups, kRows, kBlocks);
    std::vector<CacheHandle> open;
    std::vector<std::int32_t> rows;
    for (std::int32_t row = 0; row < kRows; ++row) {
        open.push_back(open_active(batched, row % 2 == 0));
        EXPECT_EQ(open_active(single, row % 2 == 0), open.back());
        rows.push_back(row);
    }
    int served = 0;
    for (int turn = 0; turn < 400; ++turn) {
        const std::int32_t event = draw(30);
        if (event == 0) {  // another cache comes in
            const auto victim = static_cast<std::size_t>(draw(kRows - 1));
            batched.close(open[victim]);
            single.close(open[victim]);
            open[victim] = open_active(batched);
            EXPECT_EQ(open_active(single), open[victim]);
        } else if (event == 1) {  // rows change hands
            std::shuffle(rows.begin(), rows.end(), rng);
        } else if (event == 2) {  // a call outside the step
            const auto which = static_cast<std::size_t>(draw(kRows - 1));
            for (Manager* manager : {&batched, &single}) {
                manager->suspend(open[which]);
                EXPECT_TRUE(manager->resume(open[which], std::nullopt));
            }
        }
        StepBatch batch;
        for (std::size_t i = 0; i < open.size(); ++i) {
            const CacheLengths now = batched.lengths(open[i]);
            const auto history = static_cast<std::int32_t>(now.history);
            const auto capacity = static_cast<std::int32_t>(now.capacity);
            const std::int32_t next = std::min(draw(3) == 0 ? history + draw(60) : history + draw(1), 600);
            const std::int32_t room = draw(3) == 0 ? next + draw(90) : std::max(next, capacity + draw(2) - 1);
            batch.add(open[i], rows[i], std::min(std::max(next, room), 700), next);
        }
        const StepOutput output = batched.step(batch.input(table));
        for (std::size_t i = 0; i < open.size(); ++i) {
            const bool ok = single.resize(batch.handles[i], batch.capacities[i], batch.histories[i]);
            ASSERT_EQ(output.ok[i] != 0, ok) << "turn " << turn << ", request " << i;
            served += ok ? 1 : 0;
            if (!ok) {
                continue;
            }
            for (std::int64_t group = 0; group < groups; ++group) {
                Ids want = batched.page_indices(open[i], group, 0);
                want.resize(kBlocks, -1);
                ASSERT_EQ(table.row(group, rows[i]), want)
                    << "turn " << turn << ", request " << i << ", group " << group;
            }
        }
        ASSERT_EQ(batched.snapshot(), single.snapshot()) << "turn " << turn;
        batched.audit();
    }
    EXPECT_GT(served, 800);
}

INSTANTIATE_TEST_SUITE_P(Seeds, StepAgainstResize, ::testing::Range(0, 12));

TEST(Step, DirtyRangesSayWhatChanged) {
    Manager manager(one_layer(16, 64), "virtual");
    const CacheHandle cache = open_active(manager);
    const Table table(1, 4, 16);
    StepBatch batch;
    batch.add(cache, 2, 96, 0);
    StepOutput output = manager.step(batch.input(table));
    ASSERT_EQ(output.dirty.size(), 1U);
    EXPECT_EQ(output.dirty[0], (DirtyRange{0, 2, 0, 16}));
    batch.capacities[0] = 100;
    output = manager.step(batch.input(table));
    ASSERT_EQ(output.dirty.size(), 1U);
    EXPECT_EQ(output.dirty[0], (DirtyRange{0, 2, 3, 4}));
    batch.capacities[0] = 130;
    batch.histories[0] = 96;  // block 0 leaves, block 4 comes
    output = manager.step(batch.input(table));
    ASSERT_EQ(output.dirty.size(), 2U);
    EXPECT_EQ(output.dirty[0], (DirtyRange{0, 2, 0, 1}));
    EXPECT_EQ(output.dirty[1], (DirtyRange{0, 2, 4, 5}));
    output = manager.step(batch.input(table));
    EXPECT_TRUE(output.dirty.empty());
    const Table other(1, 4, 16);
    output = manager.step(batch.input(other));
    ASSERT_EQ(output.dirty.size(), 1U);
    EXPECT_EQ(other.row(0, 2), table.row(0, 2));
}

TEST(Step, ErrorsChangeNothing) {
    Manager manager(one_layer(4), "virtual");
    const CacheHandle a = open_active(manager);
    const CacheHandle b = open_active(manager);
    const CacheHandle suspended = manager.create();
    const CacheHandle closed = open_active(manager);
    manager.close(closed);
    const Table table(1, 2, 8);
    const Table narrow(1, 2, 1);
    const Table wrong(2, 2, 8);
    StepBatch good;
    good.add(a, 0, 32, 0);
    static_cast<void>(manager.step(good.input(table)));
    const ManagerSnapshot before = manager.snapshot();
    const auto with = [&](CacheHandle handle, std::int32_t row, std::int32_t capacity, std::int32_t history) {
        StepBatch batch;
        batch.add(a, 0, 64, 0);
        batch.add(handle, row, capacity, history);
        return batch;
    };
    EXPECT_THROW(static_cast<void>(manager.step(with(closed, 1, 32, 0).input(table))), LogicError);
    EXPECT_THROW(static_cast<void>(manager.step(with(-1, 1, 32, 0).input(table))), LogicError);
    EXPECT_THROW(static_cast<void>(manager.step(with(a, 1, 32, 0).input(table))), ArgumentError);
    EXPECT_THROW(static_cast<void>(manager.step(with(suspended, 1, 32, 0).input(table))), LogicError);
    EXPECT_THROW(static_cast<void>(manager.step(with(b, 0, 32, 0).input(table))), ArgumentError);
    EXPECT_THROW(static_cast<void>(manager.step(with(b, 2, 32, 0).input(table))), ArgumentError);
    EXPECT_THROW(static_cast<void>(manager.step(with(b, -1, 32, 0).input(table))), ArgumentError);
    EXPECT_THROW(static_cast<void>(manager.step(with(b, 1, 31, 32).input(table))), ArgumentError);
    EXPECT_THROW(static_cast<void>(manager.step(with(b, 1, 32, -1).input(table))), ArgumentError);
    EXPECT_THROW(static_cast<void>(manager.step(with(b, 1, 5 * 32, 0).input(table))), NeverFitsError);
    EXPECT_THROW(static_cast<void>(manager.step(with(b, 1, 33, 0).input(narrow))), ArgumentError);
    EXPECT_THROW(static_cast<void>(manager.step(with(b, 1, 32, 0).input(wrong))), ArgumentError);
    EXPECT_EQ(manager.snapshot(), before);
    EXPECT_EQ(table.row(0, 1), Ids(8, 99));
    EXPECT_EQ(manager.step(StepBatch{}.input(table)).ok.size(), 0U);
}

TEST(Step, AShortageLeavesTheRestAlone) {
    Manager manager(one_layer(3), "virtual");
    const CacheHandle a = open_active(manager);
    const CacheHandle b = open_active(manager);
    const CacheHandle c = open_active(manager);
    const Table table(1, 3, 4);
    StepBatch batch;
    batch.add(a, 0, 64, 0);
    batch.add(b, 1, 64, 0);
    batch.add(c, 2, 32, 0);
    const StepOutput output = manager.step(batch.input(table));
    EXPECT_EQ(std::vector<int>(output.ok.begin(), output.ok.end()), (std::vector<int>{1, 0, 1}));
    EXPECT_EQ(output.dirty.size(), 2U);
    EXPECT_EQ(table.row(0, 1), Ids(4, 99));
    EXPECT_EQ(table.row(0, 2), (Ids{2, -1, -1, -1}));
}

}  // namespace
}  // namespace kvpool
