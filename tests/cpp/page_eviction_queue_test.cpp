#include "kvpool/page/eviction_queue.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <tuple>
#include <vector>

namespace kvpool {
namespace {

constexpr std::size_t kSlots = 100;

// The queue beside a sorted list of (priority, class, stamp, slot).
struct Bed {
    LazyArray<Page> pages = make_lazy_array<Page>(kSlots);
    Journal journal;
    EvictionQueue queue{pages, journal};
    std::vector<std::tuple<int, bool, int, std::int32_t>> model;
    int stamp = 0;

    void push(std::int32_t slot, int priority, bool is_class_b) {
        Page& page = pages[static_cast<std::size_t>(slot)];
        journal.save(page.head);
        page.head.priority = static_cast<std::uint8_t>(priority);
        queue.push(SlotId(slot), is_class_b);
        model.emplace_back(priority, is_class_b, stamp++, slot);
        std::sort(model.begin(), model.end());
    }
    void erase(std::int32_t slot) {
        queue.erase(SlotId(slot));
        std::erase_if(model, [&](const auto& entry) { return std::get<3>(entry) == slot; });
    }
    [[nodiscard]] bool has(std::int32_t slot) const {
        return std::any_of(model.begin(), model.end(), [&](const auto& entry) { return std::get<3>(entry) == slot; });
    }
    void check() const {
        std::vector<SlotId> expected;
        for (const auto& entry : model) {
            expected.emplace_back(std::get<3>(entry));
        }
        ASSERT_EQ(queue.in_order(), expected);
        ASSERT_EQ(queue.first(), expected.empty() ? kBadSlot : expected.front());
        ASSERT_EQ(queue.size(), static_cast<std::int64_t>(expected.size()));
        queue.audit();
    }
};

TEST(EvictionQueue, PriorityThenClassThenAge) {
    Bed bed;
    bed.journal.begin();
    EXPECT_EQ(bed.queue.first(), kBadSlot);
    bed.push(1, 35, true);
    bed.push(2, 35, true);
    bed.push(3, 35, false);
    bed.push(4, 10, true);
    bed.push(5, 100, false);
    EXPECT_EQ(bed.queue.in_order(), (std::vector<SlotId>{SlotId(4), SlotId(3), SlotId(1), SlotId(2), SlotId(5)}));
    bed.erase(1);
    bed.push(1, 35, true);
    bed.check();
}

TEST(EvictionQueue, AgreesWithASortedListAndUndoesEverything) {
    Bed bed;
    std::mt19937 random(7);
    for (int round = 0; round < 400; ++round) {
        const auto before = bed.model;
        bed.journal.begin();
        for (int step = 0; step < 40; ++step) {
            const auto slot = static_cast<std::int32_t>(random() % kSlots);
            if (bed.has(slot)) {
                bed.erase(slot);
            } else {
                bed.push(slot, static_cast<int>(random() % 3) * 50, random() % 2 == 0);
            }
        }
        bed.check();
        if (round % 2 == 0) {
            bed.journal.roll_back();
            bed.model = before;
            bed.check();
        } else {
            bed.journal.commit();
        }
    }
}

}  // namespace
}  // namespace kvpool
