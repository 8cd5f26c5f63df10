// Threads, forks and the latch.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "manager_support.hpp"

namespace kvpool {
namespace {

using namespace testing_managers;

TEST(Guard, TheSecondThreadInOneCacheIsRefused) {
    Manager manager(one_layer(8), "virtual");
    const CacheHandle cache = open_active(manager);
    const CacheHandle other = open_active(manager);
    std::atomic<bool> refused{false};
    std::atomic<int> served{0};
    std::thread first;
    std::thread second;
    const auto resize = [&](CacheHandle handle) {
        try {
            served += manager.resize(handle, 32, 0) ? 1 : 0;
        } catch (const LogicError&) {
            refused = true;
        }
    };
    manager.with_lock([&] {
        first = std::thread(resize, cache);
        second = std::thread(resize, cache);
        while (!refused) {  // one of them waits for the lock, the other is told at once
            std::this_thread::yield();
        }
    });
    first.join();
    second.join();
    EXPECT_EQ(served, 1);
    EXPECT_TRUE(manager.resize(other, 32, 0));
    EXPECT_EQ(manager.lengths(cache).capacity, 32);
}

TEST(Guard, AStepWaitingForTheLockOwnsItsCaches) {
    Manager manager(one_layer(8), "virtual");
    const CacheHandle cache = open_active(manager);
    const Table table(1, 1, 4);
    StepBatch batch;
    batch.add(cache, 0, 32, 0);
    std::atomic<int> served{0};
    std::atomic<int> refused{0};
    const auto attempt = [&] {
        try {
            static_cast<void>(manager.step(batch.input(table)));
            ++served;
        } catch (const LogicError&) {
            ++refused;
        }
    };
    std::vector<std::thread> threads;
    manager.with_lock([&] {
        // With the lock held here, whichever comes first claims the cache and waits; only the claim can end the other call.
        threads.emplace_back(attempt);
        threads.emplace_back(attempt);
        while (refused == 0) {
            std::this_thread::yield();
        }
        EXPECT_EQ(served, 0);
    });
    for (std::thread& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(served, 1);
    EXPECT_EQ(refused, 1);
    EXPECT_EQ(manager.lengths(cache).capacity, 32);
}

TEST(Guard, ManyThreadsOneManager) {
    Manager manager(one_layer(64, 64), "virtual");
    const auto work = [&](unsigned seed) {
        std::mt19937 rng(seed);
        const Table table(1, 2, 64);
        for (int turn = 0; turn < 60; ++turn) {
            const CacheHandle cache = manager.create();
            manager.stop_committing(cache);
            while (!manager.resume(cache, std::nullopt)) {
                std::this_thread::yield();
            }
            for (std::int32_t history = 0; history < 200; history += 1 + static_cast<std::int32_t>(rng() % 20)) {
                if (rng() % 2 == 0) {
                    static_cast<void>(manager.resize(cache, history + 40, std::nullopt));
                } else {
                    StepBatch batch;
                    batch.add(cache, static_cast<std::int32_t>(rng() % 2),
                              static_cast<std::int32_t>(manager.lengths(cache).capacity + 1),
                              static_cast<std::int32_t>(manager.lengths(cache).history));
                    static_cast<void>(manager.step(batch.input(table)));
                }
            }
            static_cast<void>(manager.status(cache + 1));
            static_cast<void>(manager.statistics());
            manager.close(cache);
        }
    };
    std::vector<std::thread> threads;
    for (unsigned seed = 0; seed < 4; ++seed) {
        threads.emplace_back(work, seed);
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    manager.audit();
    EXPECT_EQ(manager.num_open(), 0);
    EXPECT_EQ(used(manager), 0);
}

TEST(Guard, AForkedChildIsRefusedAndTearsNothingDown) {
    auto manager = std::make_unique<Manager>(one_layer(4), "host");
    const CacheHandle cache = open_active(*manager);
    ASSERT_TRUE(manager->resize(cache, 32, 0));
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
        int refused = 0;
        for (const auto& call : {std::function<void()>([&] { static_cast<void>(manager->resize(cache, 64, 0)); }),
                                 std::function<void()>([&] { static_cast<void>(manager->create()); }),
                                 std::function<void()>([&] { static_cast<void>(manager->snapshot()); }),
                                 std::function<void()>([&] { static_cast<void>(manager->status(cache)); }),
                                 std::function<void()>([&] { manager->shutdown(); })}) {
            try {
                call();
            } catch (const LogicError&) {
                ++refused;
            }
        }
        manager.reset();
        _exit(refused);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 5);
    EXPECT_TRUE(manager->resize(cache, 64, 0));
}

TEST(Guard, CorruptionIsLatched) {
    ManagerGuard guard;
    EXPECT_THROW(guard.run([]() -> int { throw CorruptedError("first"); }), CorruptedError);
    EXPECT_THROW(guard.run([]() -> int { throw LogicError("not reached"); }), CorruptedError);
    try {
        guard.run([] { return 0; });
        FAIL();
    } catch (const CorruptedError& error) {
        EXPECT_STREQ(error.what(), "first");
    }
}

// A table that names a slot which is not its own is found when the slot is given back.
TEST(Guard, AForeignSlotIsFound) {
    ManagerState state(one_layer(4), "virtual");
    const CacheHandle handle = state.slab.open(1, false);
    KvCache& cache = *state.slab.find(handle);
    ASSERT_TRUE(state.resume(cache, std::nullopt, std::nullopt));
    ASSERT_TRUE(state.resize(cache, 64, 0));
    cache.table(0, 0).take(1);
    cache.table(0, 0).put(1, SlotId(3));
    EXPECT_THROW(state.audit(), CorruptedError);
    EXPECT_THROW(static_cast<void>(state.resize(cache, 32, 0)), CorruptedError);
}

}  // namespace
}  // namespace kvpool
