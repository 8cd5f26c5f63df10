// What a manager allocates: bytes of metadata by a count of operator new, and none at all in a steady state.
//
// Sanitizers bring an operator new of their own, so this file is empty under them.
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__)

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <new>

#include "manager_support.hpp"

namespace {

std::atomic<std::int64_t> num_news{0};
std::atomic<std::int64_t> live_bytes{0};

void* counted(std::size_t bytes) {
    void* p = std::malloc(bytes == 0 ? 1 : bytes);
    if (p == nullptr) {
        throw std::bad_alloc();
    }
    ++num_news;
    live_bytes += static_cast<std::int64_t>(malloc_usable_size(p));
    return p;
}

void* counted(std::size_t bytes, std::align_val_t alignment) {
    const auto align = static_cast<std::size_t>(alignment);
    void* p = std::aligned_alloc(align, (bytes + align - 1) / align * align);
    if (p == nullptr) {
        throw std::bad_alloc();
    }
    ++num_news;
    live_bytes += static_cast<std::int64_t>(malloc_usable_size(p));
    return p;
}

void uncounted(void* p) noexcept {
    live_bytes -= static_cast<std::int64_t>(p == nullptr ? 0 : malloc_usable_size(p));
    std::free(p);
}

}  // namespace

void* operator new(std::size_t bytes) { return counted(bytes); }
void* operator new[](std::size_t bytes) { return counted(bytes); }
void* operator new(std::size_t bytes, std::align_val_t alignment) { return counted(bytes, alignment); }
void* operator new[](std::size_t bytes, std::align_val_t alignment) { return counted(bytes, alignment); }
void operator delete(void* p) noexcept { uncounted(p); }
void operator delete[](void* p) noexcept { uncounted(p); }
void operator delete(void* p, std::size_t) noexcept { uncounted(p); }
void operator delete[](void* p, std::size_t) noexcept { uncounted(p); }
void operator delete(void* p, std::align_val_t) noexcept { uncounted(p); }
void operator delete[](void* p, std::align_val_t) noexcept { uncounted(p); }
void operator delete(void* p, std::size_t, std::align_val_t) noexcept { uncounted(p); }
void operator delete[](void* p, std::size_t, std::align_val_t) noexcept { uncounted(p); }

namespace kvpool {
namespace {

using namespace testing_managers;

constexpr std::int64_t kGiB = std::int64_t{1} << 30;

// Bytes that operator new has not seen: arrays that cost nothing until they are written (LazyArray).
std::int64_t lazy_bytes(std::int64_t slots) {
    return slots * 24         // ready sets
           + slots * 32       // records of pages
           + slots / 8        // occupied bits
           + slots / 7 + 64;  // recycled bits with their tree
}

TEST(Metadata, StaysBelowItsBoundPerSlotAndBlock) {
    constexpr std::int32_t kRequests = 256;
    constexpr std::int32_t kTokens = 2048;
    const std::int64_t start = live_bytes;
    Manager manager(testing_configs::gpt_oss_120b(80 * kGiB), "virtual");
    std::int64_t slots = 0;
    for (const std::int64_t count : manager.slot_counts()) {
        slots += count;
    }
    const std::int64_t empty = live_bytes - start + lazy_bytes(slots);
    EXPECT_LE(empty, 64 * slots);
    std::vector<CacheHandle> caches;
    for (std::int32_t i = 0; i < kRequests; ++i) {
        caches.push_back(open_active(manager));
        ASSERT_TRUE(manager.resize(caches.back(), kTokens, 0));
    }
    const auto groups = static_cast<std::int64_t>(manager.layout().life_cycles.size());
    const auto check = [&](const char* when) {
        std::int64_t blocks = 0;
        for (const CacheHandle cache : caches) {
            blocks += manager.lengths(cache).num_blocks;
        }
        const std::int64_t bytes = live_bytes - start + lazy_bytes(slots);
        EXPECT_LE(bytes, 64 * slots + 8 * blocks * groups) << when;
        EXPECT_LE(live_bytes - start - 64 * 1024, 8 * blocks * groups + kRequests * 512)
            << when;  // records, apart from slots
    };
    check("after prefill");
    for (std::int32_t token = 0; token < 1500; ++token) {
        for (const CacheHandle cache : caches) {
            ASSERT_TRUE(manager.resize(cache, kTokens + token + 1, kTokens + token));
        }
    }
    check("after decoding");
}

TEST(Metadata, SteadyDecodeAllocatesNothing) {
    constexpr std::int32_t kRequests = 64;
    Manager manager(testing_configs::gpt_oss_120b(40 * kGiB), "virtual");
    const Table table(2, kRequests, 200);
    StepBatch batch;
    for (std::int32_t i = 0; i < kRequests; ++i) {
        const CacheHandle cache = open_active(manager);
        ASSERT_TRUE(manager.resize(cache, 2000 + i, 0));
        batch.add(cache, i, 2001 + i, 2000 + i);
    }
    const auto decode = [&](int steps) {
        for (int step = 0; step < steps; ++step) {
            const StepOutput output = manager.step(batch.input(table));
            ASSERT_EQ(output.ok.size(), static_cast<std::size_t>(kRequests));
            for (std::size_t i = 0; i < batch.handles.size(); ++i) {
                ++batch.capacities[i];
                ++batch.histories[i];
            }
        }
    };
    decode(700);  // tables grow once, by half; the step's own arrays find their size
    const std::int64_t before = num_news;
    decode(700);  // some twenty blocks each
    EXPECT_EQ(num_news - before, 0);
}

// Tokens that fill no block take no memory; a block costs the tree's records alone.
TEST(Metadata, SteadyTokensAllocateNothingWithinABlock) {
    constexpr std::int32_t kRequests = 64;
    Manager manager(testing_configs::gpt_oss_120b(40 * kGiB), "virtual");
    const Table table(2, kRequests, 200);
    StepBatch batch;
    std::vector<Token> values;
    std::vector<std::int32_t> offsets{0};
    for (std::int32_t i = 0; i < kRequests; ++i) {
        const CacheHandle cache = open_active(manager, false);
        ASSERT_TRUE(manager.resize(cache, 2049, 0));
        const std::vector<Token> prompt(2048, i);
        manager.commit(cache, prompt, {}, false);
        batch.add(cache, i, 2050, 2049);
        values.push_back(i);
        offsets.push_back(i + 1);
    }
    const auto decode = [&](int steps) {
        for (int step = 0; step < steps; ++step) {
            StepInput input = batch.input(table);
            input.token_values = values;
            input.token_offsets = offsets;
            const StepOutput output = manager.step(input);
            ASSERT_EQ(std::count(output.ok.begin(), output.ok.end(), 1), kRequests);
            for (std::size_t i = 0; i < batch.handles.size(); ++i) {
                ++batch.capacities[i];
                ++batch.histories[i];
            }
        }
    };
    decode(2);
    const std::int64_t before = num_news;
    decode(28);  // no block becomes full
    EXPECT_EQ(num_news - before, 0);
    decode(700);  // tables grow once, by half
    const std::int64_t later = num_news;
    decode(640);  // twenty blocks each: chunks of the tree's records, nothing per block
    EXPECT_LT(num_news - later, 32);
}

}  // namespace
}  // namespace kvpool

#endif
