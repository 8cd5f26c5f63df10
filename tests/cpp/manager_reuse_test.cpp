// Prefix reuse through the manager: what is shared, copied, linked, evicted and remembered.
#include <algorithm>
#include <numeric>

#include "manager_support.hpp"

namespace kvpool {
namespace {

using namespace testing_managers;
using Tokens = std::vector<Token>;

Tokens iota(std::size_t count, Token first = 0) {
    Tokens tokens(count);
    std::iota(tokens.begin(), tokens.end(), first);
    return tokens;
}

// A view of the tokens, which outlive the call of create().
CreateInput prompt_of(const Tokens& tokens) {
    CreateInput input;
    input.ids = tokens;
    input.prompt_length = static_cast<std::int64_t>(tokens.size());
    return input;
}

// Opens a cache for the tokens, computes and commits those that are not reused.
CacheHandle run(Manager& manager, const Tokens& tokens, bool is_end = false) {
    const CacheHandle cache = manager.create(prompt_of(tokens));
    EXPECT_TRUE(manager.resume(cache, std::nullopt));
    const CacheLengths lengths = manager.lengths(cache);
    EXPECT_TRUE(manager.resize(cache, static_cast<std::int64_t>(tokens.size()), lengths.history));
    manager.commit(cache, TokenSpan(tokens).subspan(static_cast<std::size_t>(lengths.committed)), {}, is_end);
    return cache;
}

std::int64_t reused(Manager& manager, const Tokens& tokens) { return manager.probe_reuse({}, tokens, {}); }

TEST(Reuse, FullBlocksAreSharedThePartialOneIsCopied) {
    Manager manager(one_layer(16), "virtual");
    const Tokens tokens = iota(80);
    manager.close(run(manager, tokens));
    EXPECT_EQ(reused(manager, tokens), 80);
    EXPECT_EQ(manager.statistics()[0].evictable, 3);
    const CacheHandle cache = manager.create(prompt_of(tokens));
    EXPECT_EQ(manager.lengths(cache).committed, 80);
    EXPECT_EQ(manager.held_page_indices(cache, 0, 0), (Ids{0, 1, 2}));
    EXPECT_EQ(manager.page_indices(cache, 0, 0), (Ids{-1, -1, -1}));  // SUSPENDED
    EXPECT_EQ(manager.statistics()[0].evictable, 0);
    ASSERT_TRUE(manager.resume(cache, std::nullopt));
    EXPECT_EQ(manager.page_indices(cache, 0, 0), (Ids{0, 1, 3}));
    EXPECT_EQ(manager.page_is_linked(cache, 1, 0), true);
    EXPECT_EQ(manager.page_is_linked(cache, 2, 0), false);
    EXPECT_EQ(manager.page_is_linked(cache, 3, 0), std::nullopt);
    EXPECT_EQ(manager.statistics()[0].evictable, 1);
    manager.audit();
    manager.close(cache);
    manager.audit();
    manager.clear_reusable_blocks();
    EXPECT_EQ(used(manager), 0);
}

TEST(Reuse, EqualBlocksBecomeOne) {
    Manager manager(one_layer(16), "virtual");
    const Tokens tokens = iota(70);
    const CacheHandle first = run(manager, tokens);
    const CacheHandle second = manager.create();
    ASSERT_TRUE(manager.resume(second, std::nullopt));
    ASSERT_TRUE(manager.resize(second, 70, 0));
    EXPECT_EQ(manager.page_indices(second, 0, 0), (Ids{3, 4, 5}));
    const auto buffer = std::make_shared<Ids>(4, 7);
    manager.attach_buffer(second, 0, 0, *buffer, buffer);
    manager.commit(second, tokens, {}, false);
    EXPECT_EQ(manager.page_indices(second, 0, 0), (Ids{0, 1, 5}));
    EXPECT_EQ(*buffer, (Ids{0, 1, 5, -1}));
    EXPECT_EQ(used(manager), 4);
    manager.audit();
    manager.close(first);
    EXPECT_EQ(manager.page_indices(second, 0, 0), (Ids{0, 1, 5}));
    manager.close(second);
    EXPECT_TRUE(manager.all_tree_pages_droppable());
    EXPECT_EQ(reused(manager, tokens), 70);
}

// Pages behind the window: committed ones stay as cache, others are held until they are committed.
TEST(Reuse, StalePagesBecomeCacheWhenCommitted) {
    Manager manager(one_layer(16, 32), "virtual");
    const CacheHandle cache = manager.create();
    ASSERT_TRUE(manager.resume(cache, std::nullopt));
    ASSERT_TRUE(manager.resize(cache, 160, 0));
    ASSERT_TRUE(manager.resize(cache, 160, 128));
    EXPECT_EQ(manager.statistics()[0].evictable, 0);
    const Tokens tokens = iota(160);
    manager.commit(cache, TokenSpan(tokens).first(64), {}, false);
    EXPECT_EQ(manager.statistics()[0].evictable, 2);
    EXPECT_EQ(manager.held_page_indices(cache, 0, 0), (Ids{-1, -1, 2, 3, 4}));  // block 2 is stale, too: held
    EXPECT_EQ(manager.page_indices(cache, 0, 0), (Ids{-1, -1, -1, 3, 4}));
    manager.audit();
    ASSERT_TRUE(manager.resize(cache, 160, 160));
    EXPECT_EQ(manager.held_page_indices(cache, 0, 0), (Ids{-1, -1, 2, 3, 4}));
    manager.commit(cache, TokenSpan(tokens).subspan(64), {}, false);
    EXPECT_EQ(manager.statistics()[0].evictable, 4);
    EXPECT_EQ(manager.held_page_indices(cache, 0, 0), (Ids{-1, -1, -1, -1, 4}));
    manager.audit();
    manager.close(cache);
    EXPECT_EQ(reused(manager, tokens), 160);
}

TEST(Reuse, CachedPagesGiveWay) {
    Manager manager(one_layer(6), "virtual");
    manager.close(run(manager, iota(96)));
    manager.close(run(manager, iota(64, 1000)));
    EXPECT_EQ(manager.statistics()[0].free, 1);
    const CacheHandle cache = open_active(manager);
    ASSERT_TRUE(manager.resize(cache, 96, 0));  // takes the oldest leaves: blocks 2 and 1 of the first prompt
    EXPECT_EQ(reused(manager, iota(96)), 32);
    EXPECT_EQ(reused(manager, iota(64, 1000)), 64);
    EXPECT_TRUE(manager.resize(cache, 192, 0));
    EXPECT_EQ(manager.statistics()[0].evictable, 0);
    EXPECT_EQ(reused(manager, iota(64, 1000)), 0);
    manager.audit();
}

// The match fills the pool, so that there is no slot for a copy: the source becomes the cache's own.
TEST(Reuse, AMatchThatFillsThePoolIsResumed) {
    Manager manager(one_layer(3), "virtual");
    const Tokens tokens = iota(90);
    manager.close(run(manager, tokens));
    const CacheHandle cache = manager.create(prompt_of(tokens));
    ASSERT_EQ(manager.lengths(cache).committed, 90);
    ASSERT_TRUE(manager.resume(cache, std::nullopt));
    EXPECT_EQ(manager.page_indices(cache, 0, 0), (Ids{0, 1, 2}));
    EXPECT_EQ(manager.page_is_linked(cache, 2, 0), false);
    EXPECT_EQ(reused(manager, tokens), 64);
    manager.audit();
}

TEST(Reuse, StatesAreSnapshotsOfExactLengths) {
    Manager manager(mixed(512 * kMiB, true), "virtual");
    const Tokens tokens = iota(100);
    const CacheHandle cache = manager.create(prompt_of(tokens));
    ASSERT_TRUE(manager.resume(cache, std::nullopt));
    ASSERT_TRUE(manager.resize(cache, 100, 0));
    manager.commit(cache, TokenSpan(tokens).first(70), {}, false);
    EXPECT_EQ(reused(manager, tokens), 70);
    EXPECT_EQ(reused(manager, iota(69)), 0);
    manager.audit();
    ASSERT_TRUE(manager.resize(cache, 100, 70));
    manager.commit(cache, TokenSpan(tokens).subspan(70), {}, true);
    EXPECT_EQ(manager.ssm_slot(cache, 2, 0), kBadSlot);  // given away
    EXPECT_FALSE(manager.commit_allowed(cache));
    manager.audit();
    manager.suspend(cache);
    ASSERT_TRUE(manager.resume(cache, std::nullopt));
    EXPECT_EQ(manager.ssm_slot(cache, 2, 0), kBadSlot);
    manager.close(cache);
    EXPECT_EQ(reused(manager, tokens), 100);
    const CacheHandle reader = manager.create(prompt_of(tokens));
    ASSERT_TRUE(manager.resume(reader, std::nullopt));
    EXPECT_NE(manager.ssm_slot(reader, 2, 0), kBadSlot);
    manager.audit();
}

TEST(Reuse, OptionalGroupsNeverShortenAMatch) {
    ManagerConfig config = mixed(512 * kMiB, false);
    config.layers[1].optional = true;
    Manager manager(config, "virtual");
    const Tokens tokens = iota(128);
    manager.close(run(manager, tokens));
    manager.debug_set_coverage({}, tokens, {}, 1, 0);
    const CacheHandle cache = manager.create(prompt_of(tokens));
    const std::vector<ReuseStatus> status = manager.reuse_status(cache);
    EXPECT_EQ(manager.lengths(cache).committed, 128);
    EXPECT_TRUE(status[0].complete);
    EXPECT_EQ(status[0].coverage, (std::vector<HalfOpenRange>{{0, 128}}));
    EXPECT_FALSE(status[1].complete);
    EXPECT_EQ(status[1].coverage, (std::vector<HalfOpenRange>{{0, 32}, {64, 96}}));
    manager.audit();
    const std::optional incomplete = std::vector<std::int64_t>{1};
    const std::optional required = std::vector<std::int64_t>{0};
    EXPECT_THROW(static_cast<void>(manager.resume(cache, std::nullopt, incomplete)), ArgumentError);
    EXPECT_THROW(static_cast<void>(manager.resume(cache, std::nullopt, required)), ArgumentError);
    ASSERT_TRUE(manager.resume(cache, std::nullopt));
    EXPECT_EQ(manager.page_is_linked(cache, 0, 1), false);  // fresh pages
    EXPECT_EQ(manager.page_is_linked(cache, 0, 0), true);
    manager.suspend(cache);
    EXPECT_THROW(static_cast<void>(manager.resume(cache, std::nullopt, incomplete)), ArgumentError);
    EXPECT_TRUE(manager.resume(cache, std::nullopt, std::vector<std::int64_t>{}));
    manager.audit();
}

TEST(Reuse, PrioritiesDecideWhoGoesFirst) {
    Manager manager(one_layer(6), "virtual");
    const auto with_priority = [&](Token first, std::int32_t priority) {
        const Tokens tokens = iota(64, first);
        CreateInput input = prompt_of(tokens);
        input.priorities = {{priority}};
        const CacheHandle cache = manager.create(std::move(input));
        EXPECT_TRUE(manager.resume(cache, std::nullopt));
        EXPECT_TRUE(manager.resize(cache, 64, 0));
        manager.commit(cache, tokens, {}, false);
        manager.close(cache);
    };
    with_priority(0, 80);
    with_priority(1000, 20);
    const CacheHandle cache = open_active(manager);
    ASSERT_TRUE(manager.resize(cache, 128, 0));
    EXPECT_EQ(reused(manager, iota(64)), 64);
    EXPECT_EQ(reused(manager, iota(64, 1000)), 0);
}

TEST(Reuse, PlannedDropsTakeTheWindowTail) {
    Manager manager(one_layer(16, 32), "virtual");
    const Tokens tokens = iota(96);
    const CacheHandle cache = run(manager, tokens);
    EXPECT_THROW(static_cast<void>(manager.plan_drop(cache)), LogicError);
    manager.stop_committing(cache);
    const std::optional<std::int64_t> plan = manager.plan_drop(cache);
    ASSERT_EQ(plan, 1);
    manager.close(cache);
    EXPECT_EQ(reused(manager, tokens), 96);
    EXPECT_TRUE(manager.drop_planned(1));
    EXPECT_FALSE(manager.drop_planned(1));
    EXPECT_EQ(reused(manager, tokens), 64);
    manager.audit();
}

TEST(Reuse, DigestsComeBack) {
    Manager manager(one_layer(8), "virtual");
    Digest digest{};
    digest[0] = 7;
    const std::vector<Digest> digests{digest};
    Tokens tokens = iota(40);
    tokens[5] = -1;
    tokens[35] = -1;
    const CacheHandle cache = manager.create();
    ASSERT_TRUE(manager.resume(cache, std::nullopt));
    ASSERT_TRUE(manager.resize(cache, 40, 0));
    EXPECT_THROW(manager.commit(cache, tokens, {}, false), ArgumentError);
    manager.commit(cache, tokens, digests, false);
    EXPECT_EQ(manager.committed_tokens(cache), (std::pair(tokens, digests)));
    manager.audit();
    manager.close(cache);
    manager.audit();
    EXPECT_EQ(manager.probe_reuse({}, tokens, digests), 40);
    digest[0] = 8;
    EXPECT_EQ(manager.probe_reuse({}, tokens, std::vector<Digest>{digest}), 5);
    manager.clear_reusable_blocks();
    manager.audit();
}

// A step with tokens is a commit and a resize for each request; one that lacks room is taken back with its commit.
TEST(Reuse, AStepCommitsBeforeItGrows) {
    Manager manager(one_layer(4), "virtual");
    const Table table(1, 2, 8);
    const CacheHandle a = open_active(manager, false);
    const CacheHandle b = open_active(manager, false);
    ASSERT_TRUE(manager.resize(a, 32, 0));
    ASSERT_TRUE(manager.resize(b, 64, 0));
    StepBatch batch;
    batch.add(a, 0, 64, 32);
    batch.add(b, 1, 96, 32);  // one slot too many
    const Tokens values = iota(64);
    const std::vector<std::int32_t> offsets{0, 32, 64};
    StepInput input = batch.input(table);
    input.token_values = values;
    input.token_offsets = offsets;
    const StepOutput output = manager.step(input);
    EXPECT_EQ(std::vector<int>(output.ok.begin(), output.ok.end()), (std::vector<int>{1, 0}));
    EXPECT_EQ(manager.lengths(a).committed, 32);
    EXPECT_EQ(manager.lengths(b).committed, 0);
    EXPECT_EQ(manager.lengths(b).history, 0);
    EXPECT_EQ(manager.snapshot().tree.size(), 2U);  // the root and a's block
    manager.audit();
    StepBatch again;
    again.add(b, 1, 64, 33);
    const std::vector<std::int32_t> one{0, 33};
    StepInput second = again.input(table);
    second.token_values = TokenSpan(values).subspan(31);
    second.token_offsets = one;
    EXPECT_EQ(manager.step(second).ok[0], 1);
    EXPECT_EQ(manager.lengths(b).committed, 33);
    manager.audit();
}

TEST(Reuse, StepTokensAreChecked) {
    const std::vector<Token> values{1, 2, -3};
    const std::vector<std::int32_t> good{0, 0, 3};
    try {
        check_step_tokens(2, values, good);
        FAIL();
    } catch (const ArgumentError& error) {
        EXPECT_STREQ(error.what(), "step(): request 1: tokens[2]: token ids must be from 0 to 2147483647, not -3");
    }
    const std::vector<std::int32_t> shrinking{0, 2, 1, 3};
    EXPECT_THROW(check_step_tokens(3, values, shrinking), ArgumentError);
    EXPECT_THROW(check_step_tokens(3, values, good), ArgumentError);
    const std::vector<std::int32_t> short_end{0, 1, 2};
    EXPECT_THROW(check_step_tokens(2, values, short_end), ArgumentError);
}

}  // namespace
}  // namespace kvpool
