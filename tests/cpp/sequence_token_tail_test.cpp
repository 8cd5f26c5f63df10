#include "kvpool/sequence/token_tail.hpp"

#include <gtest/gtest.h>

#include <numeric>
#include <vector>

namespace kvpool {
namespace {

using Tokens = std::vector<Token>;

Tokens of(const TokenTail& tail) { return {tail.tokens().begin(), tail.tokens().end()}; }

TEST(TokenTail, IsTakenBackAsItWas) {
    Journal journal;
    TokenTail tail;
    tail.reserve(3, 32);
    tail.assign(Tokens{1, 2, 3});
    journal.begin();
    tail.append(journal, Tokens{4});
    EXPECT_EQ(of(tail), (Tokens{1, 2, 3, 4}));
    const Journal::Savepoint middle = journal.savepoint();
    tail.replace(journal, Tokens{9, 8});
    EXPECT_EQ(of(tail), (Tokens{9, 8}));
    tail.append(journal, Tokens{7});
    journal.roll_back_to(middle);
    EXPECT_EQ(of(tail), (Tokens{1, 2, 3, 4}));
    tail.replace(journal, {});
    EXPECT_TRUE(tail.empty());
    journal.roll_back();
    EXPECT_EQ(of(tail), (Tokens{1, 2, 3}));
}

// More memory keeps both halves, so that what came before can still be taken back.
TEST(TokenTail, GrowsWithinACall) {
    constexpr std::int64_t kBlock = 4096;
    Journal journal;
    TokenTail tail;
    Tokens many(1000);
    std::iota(many.begin(), many.end(), 0);
    tail.reserve(256, kBlock);
    tail.assign(TokenSpan(many).first(200));
    journal.begin();
    tail.replace(journal, TokenSpan(many).first(250));
    tail.reserve(1250, kBlock);
    EXPECT_TRUE(tail.has_room_for(1250));
    tail.append(journal, many);
    EXPECT_EQ(tail.size(), 1250);
    EXPECT_EQ(tail.tokens()[1249], 999);
    journal.roll_back();
    EXPECT_EQ(of(tail), Tokens(many.begin(), many.begin() + 200));
}

TEST(TokenTail, NeverTakesMoreThanABlock) {
    TokenTail tail;
    tail.reserve(5, 7);
    EXPECT_TRUE(tail.has_room_for(7));
    EXPECT_FALSE(tail.has_room_for(8));
}

}  // namespace
}  // namespace kvpool
