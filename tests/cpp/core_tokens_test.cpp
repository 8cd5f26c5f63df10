#include "kvpool/core/tokens.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

#include "kvpool/core/digest_pool.hpp"
#include "kvpool/core/errors.hpp"

namespace kvpool {
namespace {

Digest digest_of(int first, int last = 0) {
    Digest digest{};
    digest.front() = static_cast<std::uint8_t>(first);
    digest.back() = static_cast<std::uint8_t>(last);
    return digest;
}

TEST(Tokens, FindsTheFirstNegativeAnywhere) {
    for (std::size_t n = 0; n < 200; ++n) {
        std::vector<Token> tokens(n, 7);
        EXPECT_EQ(find_negative(tokens), n);
        for (std::size_t i = 0; i < n; ++i) {
            tokens[i] = -1;
            if (i + 3 < n) {
                tokens[i + 3] = -5;
            }
            ASSERT_EQ(find_negative(tokens), i);
            std::fill(tokens.begin(), tokens.end(), 7);
        }
    }
}

TEST(Tokens, CountsTheCommonPrefix) {
    for (std::size_t n = 0; n < 40; ++n) {
        const std::vector<Token> a(n, 3);
        EXPECT_EQ(common_prefix(a, a), n);
        for (std::size_t i = 0; i < n; ++i) {
            std::vector<Token> b = a;
            b[i] = 4;
            ASSERT_EQ(common_prefix(a, b), i);
            ASSERT_EQ(common_prefix(a, TokenSpan(a).first(i)), i);
        }
    }
}

TEST(Tokens, NamesTheTokenThatIsNone) {
    const std::vector<Token> tokens{5, 6, -7, -1};
    const Query query{.tokens = tokens, .raw = true, .unknown = {}, .name = "tokens"};
    try {
        query.check();
        FAIL();
    } catch (const ArgumentError& error) {
        EXPECT_STREQ(error.what(), "tokens[2]: token ids must be from 0 to 2147483647, not -7");
    }
    EXPECT_NO_THROW(query.check(4));
    EXPECT_NO_THROW(Query::encoded(tokens).check());
    EXPECT_THROW(DigestPool::check_ids(tokens, 1, "tokens"), ArgumentError);
    EXPECT_NO_THROW(DigestPool::check_ids(tokens, 7, "tokens"));
}

TEST(DigestPool, EqualDigestsAreEqualTokensAndUnknownOnesEqualNothing) {
    Journal journal;
    DigestPool pool(journal);
    journal.begin();
    const std::vector<Digest> digests{digest_of(1), digest_of(2), digest_of(1)};
    const std::vector<Token> ids{4, -1, -2, -3, 5};
    std::vector<Token> stored(5);
    pool.intern(ids, digests, stored.data());
    EXPECT_EQ(stored[1], stored[3]);
    EXPECT_NE(stored[1], stored[2]);
    EXPECT_EQ(pool.refs(digest_of(1)), 2);
    EXPECT_EQ(pool.size(), 2);

    std::vector<Token> scratch;
    const std::vector<Digest> asked{digest_of(9), digest_of(2), digest_of(9)};
    const Query query = pool.encode(std::vector<Token>{-1, -2, -3}, asked, "input_tokens", scratch);
    EXPECT_FALSE(query.raw);
    EXPECT_EQ(query.tokens[1], stored[2]);
    EXPECT_TRUE(is_unknown(query.tokens[0]));
    EXPECT_EQ(pool.bytes(query.tokens[0], query), digest_of(9));
    EXPECT_THROW(static_cast<void>(pool.encode(std::vector<Token>{0, -4}, asked, "t", scratch)), ArgumentError);
    EXPECT_TRUE(pool.encode(ids, {}, "t", scratch).raw);

    std::vector<Token> ids_back(5);
    std::vector<Digest> digests_back;
    pool.decode(stored, ids_back.data(), digests_back);
    EXPECT_EQ(ids_back, (std::vector<Token>{4, -1, -2, -1, 5}));
    EXPECT_EQ(digests_back, (std::vector<Digest>{digest_of(1), digest_of(2)}));

    pool.release(stored);
    EXPECT_EQ(pool.size(), 0);
    pool.audit({});
}

TEST(DigestPool, OrdersByBytesWhateverTheOrderOfArrival) {
    Journal journal;
    DigestPool pool(journal);
    journal.begin();
    std::vector<Digest> digests;
    for (int i = 0; i < 50; ++i) {
        digests.push_back(digest_of(i * 37 % 50 * 5, i));
    }
    std::vector<Token> ids(50);
    for (std::size_t i = 0; i < 50; ++i) {
        ids[i] = -1 - static_cast<Token>(i);
    }
    std::vector<Token> stored(50);
    pool.intern(ids, digests, stored.data());
    const Query none{};
    for (const Token a : stored) {
        for (const Token b : stored) {
            const int way = pool.bytes(a) < pool.bytes(b) ? -1 : static_cast<int>(pool.bytes(b) < pool.bytes(a));
            const int got = pool.compare(a, none, b);
            EXPECT_EQ((got > 0) - (got < 0), way);
        }
        EXPECT_GT(pool.compare(a, none, 2147483647), 0);  // ids come first
        EXPECT_LT(pool.compare(0, none, a), 0);
    }
}

TEST(DigestPool, EveryChangeIsUndone) {
    Journal journal;
    DigestPool pool(journal);
    std::mt19937 random(5);
    std::vector<Token> kept;
    const auto add = [&](int first) {
        std::vector<Token> one(1);
        const std::vector<Digest> digests{digest_of(first)};
        pool.intern(std::vector<Token>{-1}, digests, one.data());
        kept.push_back(one[0]);
    };
    journal.begin();
    for (int i = 0; i < 60; ++i) {
        add(i);
    }
    journal.commit();
    for (int round = 0; round < 50; ++round) {
        const std::vector<Token> before = kept;
        std::vector<Digest> bytes_before;
        for (const Token token : kept) {
            bytes_before.push_back(pool.bytes(token));
        }
        journal.begin();
        for (int i = 0; i < 30; ++i) {
            if (random() % 2 == 0 && !kept.empty()) {
                const std::size_t at = random() % kept.size();
                pool.release(TokenSpan(&kept[at], 1));
                kept.erase(kept.begin() + static_cast<std::ptrdiff_t>(at));
            } else {
                add(static_cast<int>(random() % 120));
            }
        }
        if (round % 2 == 0) {
            journal.roll_back();
            kept = before;
            for (std::size_t i = 0; i < kept.size(); ++i) {
                ASSERT_EQ(pool.bytes(kept[i]), bytes_before[i]);
            }
        } else {
            journal.commit();
        }
        std::vector<Token> sorted = kept;
        std::sort(sorted.begin(), sorted.end());
        std::vector<std::pair<Token, std::int64_t>> expected;
        for (const Token token : sorted) {
            if (expected.empty() || expected.back().first != token) {
                expected.emplace_back(token, 0);
            }
            ++expected.back().second;
        }
        pool.audit(expected);
    }
}

}  // namespace
}  // namespace kvpool
