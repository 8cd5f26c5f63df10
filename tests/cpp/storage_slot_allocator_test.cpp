#include "kvpool/storage/slot_allocator.hpp"

#include <gtest/gtest.h>

#include <random>
#include <set>

#include "kvpool/core/errors.hpp"

namespace kvpool {
namespace {

std::vector<std::int32_t> values(const std::vector<SlotId>& ids) {
    std::vector<std::int32_t> out;
    for (const SlotId id : ids) {
        out.push_back(id.value());
    }
    return out;
}

TEST(SlotSet, FindsTheSmallestMemberAtAnyCapacity) {
    for (const std::int64_t capacity : {1, 63, 64, 65, 4096, 4097, 300'000}) {
        SlotSet set(capacity);
        const SlotId last(static_cast<std::int32_t>(capacity - 1));
        EXPECT_EQ(set.next(SlotId(0)), kBadSlot);
        set.insert(last);
        EXPECT_EQ(set.first(), last);
        EXPECT_EQ(set.next(SlotId(0)), last);
        EXPECT_EQ(set.next(last), last);
        EXPECT_EQ(set.next(SlotId(last.value() + 1)), kBadSlot);
        EXPECT_TRUE(set.is_valid());
        set.erase(last);
        EXPECT_TRUE(set.empty());
        EXPECT_TRUE(set.is_valid());
    }
}

TEST(SlotSet, AgreesWithAStdSet) {
    std::mt19937 random(1);
    SlotSet set(10'000);
    std::set<std::int32_t> model;
    for (int i = 0; i < 20'000; ++i) {
        const auto id = static_cast<std::int32_t>(random() % 10'000);
        if (model.erase(id) == 1) {
            set.erase(SlotId(id));
        } else {
            model.insert(id);
            set.insert(SlotId(id));
        }
        const auto from = static_cast<std::int32_t>(random() % 10'001);
        const auto next = model.lower_bound(from);
        ASSERT_EQ(set.next(SlotId(from)), next == model.end() ? kBadSlot : SlotId(*next));
        if (!model.empty()) {
            ASSERT_EQ(set.first().value(), *model.begin());
        }
    }
    EXPECT_EQ(set.size(), static_cast<std::int64_t>(model.size()));
    EXPECT_TRUE(set.is_valid());
    set.grow(1'000'000);
    EXPECT_EQ(set.first().value(), *model.begin());
    EXPECT_TRUE(set.is_valid());
}

// Scenario 1.
TEST(SlotAllocator, StartsFree) {
    const SlotAllocator allocator(3);
    EXPECT_EQ(allocator.capacity(), 3);
    EXPECT_EQ(allocator.num_free(), 3);
    EXPECT_EQ(allocator.num_occupied(), 0);
}

TEST(SlotAllocator, HandsOutTheLowestFreeId) {
    SlotAllocator allocator(8);
    EXPECT_EQ(values(allocator.allocate_many(6)), (std::vector<std::int32_t>{0, 1, 2, 3, 4, 5}));
    allocator.release(SlotId(4));
    allocator.release(SlotId(1));
    EXPECT_EQ(values(allocator.allocate_many(4)), (std::vector<std::int32_t>{1, 4, 6, 7}));
    EXPECT_EQ(allocator.num_free(), 0);
    EXPECT_THROW((void)allocator.allocate(), OutOfPagesError);
}

TEST(SlotAllocator, AllocateManyIsAllOrNothing) {
    SlotAllocator allocator(4);
    (void)allocator.allocate();
    EXPECT_THROW((void)allocator.allocate_many(4), OutOfPagesError);
    EXPECT_THROW((void)allocator.allocate_many(-1), ArgumentError);
    EXPECT_EQ(allocator.num_occupied(), 1);
    EXPECT_EQ(allocator.num_active(), 1);
}

TEST(SlotAllocator, RefusesWhatIsNotOccupied) {
    SlotAllocator allocator(4);
    const SlotId id = allocator.allocate();
    allocator.release(id);
    EXPECT_THROW(allocator.release(id), LogicError);
    EXPECT_THROW(allocator.release(SlotId(3)), LogicError);
    EXPECT_THROW(allocator.release(SlotId(-1)), LogicError);
    EXPECT_THROW(allocator.release(SlotId(99)), LogicError);
    EXPECT_THROW(SlotAllocator(-1), ArgumentError);
    EXPECT_THROW(SlotAllocator((std::int64_t{1} << 31) + 1), ArgumentError);
}

TEST(SlotAllocator, ReoccupyUndoesRelease) {
    SlotAllocator allocator(4);
    (void)allocator.allocate_many(3);
    allocator.release(SlotId(1));
    allocator.reoccupy(SlotId(1));
    EXPECT_TRUE(allocator.is_occupied(SlotId(1)));
    EXPECT_EQ(allocator.num_occupied(), 3);
    EXPECT_THROW(allocator.reoccupy(SlotId(1)), LogicError);
    EXPECT_THROW(allocator.reoccupy(SlotId(3)), LogicError);
    EXPECT_EQ(allocator.allocate(), SlotId(3));
    allocator.audit();
}

// Scenario 4.
TEST(SlotAllocator, ShrinksAboveTheHighWaterMarkAtOnce) {
    SlotAllocator allocator(184'064);
    for (const SlotId id : allocator.allocate_many(2048)) {
        allocator.release(id);
    }
    allocator.prepare_for_shrink(122'624);
    EXPECT_EQ(allocator.num_overflow(), 0);
    EXPECT_TRUE(allocator.finish_shrink());
    EXPECT_EQ(allocator.capacity(), 122'624);
    EXPECT_EQ(allocator.num_active(), 2048);
    EXPECT_FALSE(allocator.shrink_in_progress());
    allocator.audit();
}

// Scenario 5.
TEST(SlotAllocator, ShrinksThroughTheOverflow) {
    SlotAllocator allocator(16);
    const std::vector<SlotId> ids = allocator.allocate_many(16);
    for (std::size_t i = 8; i < 16; ++i) {
        allocator.release(ids[i]);
    }
    allocator.prepare_for_shrink(8);
    EXPECT_EQ(allocator.num_overflow(), 8);
    EXPECT_EQ(allocator.num_free(), 0);
    EXPECT_TRUE(allocator.finish_shrink());
    EXPECT_EQ(allocator.capacity(), 8);
    EXPECT_EQ(allocator.num_active(), 8);
    for (std::size_t i = 0; i < 8; ++i) {
        allocator.release(ids[i]);
    }
    EXPECT_EQ(allocator.num_free(), 8);
    allocator.audit();
}

TEST(SlotAllocator, ShrinkWaitsForOccupiedSlots) {
    SlotAllocator allocator(10);
    (void)allocator.allocate_many(10);
    allocator.prepare_for_shrink(6);
    EXPECT_THROW(allocator.prepare_for_shrink(5), LogicError);
    EXPECT_THROW(allocator.expand(20), LogicError);
    allocator.release(SlotId(2));
    EXPECT_FALSE(allocator.finish_shrink());
    EXPECT_EQ(values(allocator.slots_blocking_shrink()), (std::vector<std::int32_t>{6, 7, 8, 9}));
    for (const std::int32_t id : {9, 8, 7, 6}) {
        allocator.release(SlotId(id));
    }
    EXPECT_THROW(allocator.release(SlotId(9)), LogicError);
    allocator.reoccupy(SlotId(9));
    allocator.release(SlotId(9));
    EXPECT_EQ(allocator.num_free(), 1);
    EXPECT_TRUE(allocator.finish_shrink());
    EXPECT_EQ(values(allocator.occupied_ids()), (std::vector<std::int32_t>{0, 1, 3, 4, 5}));
    allocator.audit();
    allocator.expand(200);
    EXPECT_EQ(values(allocator.allocate_many(3)), (std::vector<std::int32_t>{2, 6, 7}));
    allocator.audit();
}

TEST(SlotAllocator, CoversEveryInt32Id) {
    SlotAllocator allocator(std::int64_t{1} << 31);  // lazily: costs no memory to speak of
    EXPECT_EQ(allocator.num_free(), std::int64_t{1} << 31);
    EXPECT_EQ(allocator.allocate(), SlotId(0));
    EXPECT_EQ(allocator.allocate(), SlotId(1));
    allocator.release(SlotId(0));
    EXPECT_EQ(allocator.allocate(), SlotId(0));
}

TEST(SlotAllocator, AgreesWithAModel) {
    std::mt19937 random(7);
    SlotAllocator allocator(700);
    std::set<std::int32_t> free;
    for (std::int32_t i = 0; i < 700; ++i) {
        free.insert(i);
    }
    std::vector<std::int32_t> used;
    for (int i = 0; i < 20'000; ++i) {
        if (random() % 100 < 50 && !used.empty()) {
            const std::size_t k = random() % used.size();
            allocator.release(SlotId(used[k]));
            free.insert(used[k]);
            used[k] = used.back();
            used.pop_back();
        } else if (!free.empty()) {
            const std::int32_t id = allocator.allocate().value();
            ASSERT_EQ(id, *free.begin());
            free.erase(free.begin());
            used.push_back(id);
        }
    }
    EXPECT_EQ(allocator.num_free(), static_cast<std::int64_t>(free.size()));
    allocator.audit();
}

}  // namespace
}  // namespace kvpool
