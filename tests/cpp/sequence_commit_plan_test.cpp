#include "kvpool/sequence/commit_plan.hpp"

#include <gtest/gtest.h>

#include <random>

namespace kvpool {
namespace {

TEST(CommitPlan, ATailBecomesAFullBlock) {
    const CommitPlan plan = plan_commit(40, 60, 0, 32);
    EXPECT_EQ(plan.old_tail, 8);
    EXPECT_EQ(plan.first, 1);
    EXPECT_EQ(plan.end, 3);
    EXPECT_EQ(plan.tail, 4);
    EXPECT_TRUE(plan.fills_blocks());
    EXPECT_EQ(plan.prompt, CommitPlan::kNone);
}

TEST(CommitPlan, FewTokensFillNothing) {
    const CommitPlan plan = plan_commit(40, 3, 0, 32);
    EXPECT_FALSE(plan.fills_blocks());
    EXPECT_EQ(plan.tail, 11);
}

TEST(CommitPlan, ThePromptsLastBoundaryIsPassedOnce) {
    EXPECT_EQ(plan_commit(0, 100, 100, 32).prompt, 2);
    EXPECT_EQ(plan_commit(96, 4, 100, 32).prompt, CommitPlan::kNone);
    EXPECT_EQ(plan_commit(95, 1, 100, 32).prompt, 2);
    EXPECT_EQ(plan_commit(0, 95, 100, 32).prompt, CommitPlan::kNone);
    EXPECT_EQ(plan_commit(0, 100, 31, 32).prompt, CommitPlan::kNone);
}

TEST(CommitPlan, AddsUp) {
    std::mt19937 rng(3);
    for (int turn = 0; turn < 2000; ++turn) {
        const std::int64_t tpb = 1 + static_cast<std::int64_t>(rng() % 9);
        const auto before = static_cast<std::int64_t>(rng() % 100);
        const std::int64_t n = 1 + static_cast<std::int64_t>(rng() % 50);
        const auto prompt = static_cast<std::int64_t>(rng() % 120);
        const CommitPlan plan = plan_commit(before, n, prompt, tpb);
        ASSERT_EQ(plan.end * tpb + plan.tail, before + n);
        ASSERT_EQ(plan.first * tpb + plan.old_tail, before);
        ASSERT_TRUE(0 <= plan.tail && plan.tail < tpb);
        const std::int64_t boundary = prompt / tpb * tpb;
        ASSERT_EQ(plan.prompt != CommitPlan::kNone, before < boundary && boundary <= before + n);
    }
}

}  // namespace
}  // namespace kvpool
