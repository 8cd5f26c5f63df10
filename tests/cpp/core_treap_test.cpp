#include "kvpool/core/treap.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <set>
#include <utility>
#include <vector>

namespace kvpool {
namespace {

// Records with keys; the set is ordered by them.
struct Bed {
    explicit Bed(std::size_t n) : links_of(n), keys(n) {}

    std::vector<TreapLinks> links_of;
    std::vector<int> keys;
    std::int32_t root = kNil;
    Journal journal;

    [[nodiscard]] TreapLinks& links(std::int32_t i) noexcept { return links_of[static_cast<std::size_t>(i)]; }
    [[nodiscard]] const TreapLinks& links(std::int32_t i) const noexcept {
        return links_of[static_cast<std::size_t>(i)];
    }
    [[nodiscard]] int key(std::int32_t i) const noexcept { return keys[static_cast<std::size_t>(i)]; }
    [[nodiscard]] auto by(int wanted) const noexcept {
        return [this, wanted](std::int32_t i) { return wanted < key(i) ? -1 : static_cast<int>(wanted > key(i)); };
    }

    void insert(std::int32_t i, int new_key) {
        keys[static_cast<std::size_t>(i)] = new_key;
        treap_insert(journal, root, i, *this, by(new_key));
    }
    void erase(std::int32_t i) { treap_erase(journal, root, i, *this, by(key(i))); }

    // Members in order; a member's children have lower priorities.
    void collect(std::int32_t i, std::vector<std::int32_t>& out) const {
        if (i == kNil) {
            return;
        }
        for (const std::int32_t below : {links(i).left, links(i).right}) {
            EXPECT_TRUE(below == kNil || treap_priority(below) < treap_priority(i));
        }
        collect(links(i).left, out);
        out.push_back(i);
        collect(links(i).right, out);
    }
    [[nodiscard]] std::vector<int> sorted_keys() const {
        std::vector<std::int32_t> members;
        collect(root, members);
        std::vector<int> out;
        for (const std::int32_t i : members) {
            out.push_back(key(i));
        }
        return out;
    }
};

TEST(Treap, AgreesWithASetOverManyChanges) {
    std::mt19937 random(1);
    constexpr int kRecords = 300;
    Bed bed(kRecords);
    std::set<std::pair<int, std::int32_t>> model;  // key, record
    std::vector<bool> is_member(kRecords);
    bed.journal.begin();
    for (int step = 0; step < 100'000; ++step) {
        const auto i = static_cast<std::int32_t>(random() % kRecords);
        if (is_member[static_cast<std::size_t>(i)]) {
            model.erase({bed.key(i), i});
            bed.erase(i);
        } else {
            const int key = static_cast<int>(random() % 100'000) * kRecords + i;  // different ones
            model.insert({key, i});
            bed.insert(i, key);
        }
        is_member[static_cast<std::size_t>(i)] = !is_member[static_cast<std::size_t>(i)];

        const int wanted = static_cast<int>(random() % 30'000'000);
        const auto from = model.lower_bound({wanted, 0});
        const TreapPlace place = treap_place(bed.root, std::as_const(bed), bed.by(wanted));
        ASSERT_EQ(place.from, from == model.end() ? kNil : from->second);
        ASSERT_EQ(place.before, from == model.begin() ? kNil : std::prev(from)->second);
        ASSERT_EQ(treap_after(bed.root, std::as_const(bed), bed.by(wanted - 1)), place.from);
        if (step % 1000 == 0) {
            const std::vector<int> keys = bed.sorted_keys();
            ASSERT_TRUE(std::is_sorted(keys.begin(), keys.end()));
            ASSERT_EQ(keys.size(), model.size());
            bed.journal.commit();
            bed.journal.begin();
        }
    }
}

TEST(Treap, TheShapeDependsOnTheMembersAlone) {
    std::vector<std::int32_t> order(64);
    for (std::int32_t i = 0; i < 64; ++i) {
        order[static_cast<std::size_t>(i)] = i;
    }
    std::mt19937 random(2);
    Bed first(64);
    for (const std::int32_t i : order) {
        first.insert(i, 1000 - i);
    }
    std::shuffle(order.begin(), order.end(), random);
    Bed second(65);
    second.insert(64, 500);
    for (const std::int32_t i : order) {
        second.insert(i, 1000 - i);
    }
    second.erase(64);
    EXPECT_EQ(first.root, second.root);
    for (std::size_t i = 0; i < 64; ++i) {
        EXPECT_EQ(first.links_of[i].left, second.links_of[i].left);
        EXPECT_EQ(first.links_of[i].right, second.links_of[i].right);
    }
}

TEST(Treap, UndoRestoresEveryLink) {
    std::mt19937 random(3);
    Bed bed(200);
    bed.journal.begin();
    for (std::int32_t i = 0; i < 100; ++i) {
        bed.insert(i, static_cast<int>(random()) / 4 * 4 + 1);
    }
    bed.journal.commit();
    const std::vector<int> before = bed.sorted_keys();
    const auto links_before = bed.links_of;
    const std::int32_t root_before = bed.root;
    bed.journal.begin();
    for (std::int32_t i = 0; i < 100; ++i) {
        bed.erase(i);
        bed.insert(100 + i, static_cast<int>(random()) / 4 * 4 + 2);
    }
    bed.journal.roll_back();
    EXPECT_EQ(bed.sorted_keys(), before);
    EXPECT_EQ(bed.root, root_before);
    for (std::size_t i = 0; i < 100; ++i) {
        EXPECT_EQ(bed.links_of[i].left, links_before[i].left);
        EXPECT_EQ(bed.links_of[i].right, links_before[i].right);
    }
}

TEST(Treap, PrioritiesDiffer) {
    std::set<std::uint32_t> seen;
    for (std::int32_t i = 0; i < 10'000; ++i) {
        EXPECT_TRUE(seen.insert(treap_priority(i)).second);
    }
}

}  // namespace
}  // namespace kvpool
