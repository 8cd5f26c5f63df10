#include "kvpool/core/journal.hpp"

#include <gtest/gtest.h>

#include <vector>

#include "kvpool/core/ids.hpp"
#include "kvpool/core/slab.hpp"

namespace kvpool {
namespace {

TEST(Journal, TakesFieldsOfEverySizeBack) {
    Journal journal;
    struct Pair {
        std::int32_t a;
        std::int32_t b;
    };
    bool one = true;
    std::uint16_t two = 2;
    SlotId four{4};
    double eight = 8.0;
    Pair pair{1, 2};
    journal.begin();
    journal.set(one, false);
    journal.set(two, 3);
    journal.set(four, SlotId(5));
    journal.set(eight, -1.5);
    journal.save(pair);
    pair = {7, 8};
    journal.add(two, 10);
    EXPECT_EQ(two, 13);
    journal.roll_back();
    EXPECT_TRUE(one);
    EXPECT_EQ(two, 2);
    EXPECT_EQ(four, SlotId(4));
    EXPECT_EQ(eight, 8.0);
    EXPECT_EQ(pair.a, 1);
    EXPECT_EQ(pair.b, 2);
    EXPECT_EQ(journal.size(), 0u);
}

TEST(Journal, UndoesNewestFirstAndToASavepoint) {
    Journal journal;
    std::vector<std::uint64_t> undone;
    const Journal::Undo undo = [](void* target, std::uint64_t old) {
        static_cast<std::vector<std::uint64_t>*>(target)->push_back(old);
    };
    journal.begin();
    journal.note(undo, &undone, 1);
    const Journal::Savepoint savepoint = journal.savepoint();
    for (std::uint64_t i = 2; i <= 1000; ++i) {  // the log grows on the way
        journal.note(undo, &undone, i);
    }
    journal.roll_back_to(savepoint);
    ASSERT_EQ(undone.size(), 999u);
    EXPECT_EQ(undone.front(), 1000u);
    EXPECT_EQ(undone.back(), 2u);
    journal.roll_back();
    EXPECT_EQ(undone.back(), 1u);
}

TEST(Journal, ForgetsWhatWasCommitted) {
    Journal journal;
    int value = 1;
    journal.begin();
    journal.set(value, 2);
    journal.commit();
    journal.begin();
    journal.roll_back();
    EXPECT_EQ(value, 2);
    EXPECT_EQ(journal.call(), 2u);
}

struct Record {
    std::int32_t link;
    std::int32_t value;
};

TEST(Slab, GivesARecordOutAgainInALaterCallOnly) {
    Journal journal;
    Slab<Record> slab;
    journal.begin();
    const std::int32_t a = slab.take(journal);
    const std::int32_t b = slab.take(journal);
    EXPECT_NE(a, b);
    slab[a].value = 1;
    journal.commit();

    journal.begin();
    slab.give(journal, a);
    EXPECT_NE(slab.take(journal), a);
    journal.commit();

    journal.begin();
    EXPECT_EQ(slab.take(journal), a);
    journal.commit();
}

TEST(Slab, UndoBringsRecordsBackWithTheirContents) {
    Journal journal;
    Slab<Record> slab;
    journal.begin();
    std::vector<std::int32_t> taken;
    for (std::int32_t i = 0; i < 5000; ++i) {
        taken.push_back(slab.take(journal));
        slab[taken.back()] = {7, i};
    }
    journal.commit();

    journal.begin();
    for (std::int32_t i = 0; i < 5000; i += 2) {
        slab.give(journal, taken[static_cast<std::size_t>(i)]);
    }
    journal.roll_back();
    for (std::int32_t i = 0; i < 5000; ++i) {
        const Record& record = slab[taken[static_cast<std::size_t>(i)]];
        EXPECT_EQ(record.link, 7);
        EXPECT_EQ(record.value, i);
    }

    journal.begin();
    const std::int32_t fresh = slab.take(journal);
    journal.roll_back();
    journal.begin();
    EXPECT_EQ(slab.take(journal), fresh);  // the very same record again
    journal.commit();
}

}  // namespace
}  // namespace kvpool
