#include "kvpool/core/math.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/ids.hpp"

namespace kvpool {
namespace {

constexpr std::int64_t kDen18 = 1'000'000'000'000'000'000;

TEST(Ids, CompareWithTheirOwnKindOnly) {
    EXPECT_LT(SlotId(1), SlotId(2));
    EXPECT_EQ(make_id<SlotId>(7).value(), 7);
    static_assert(!std::is_convertible_v<int, SlotId>);
    static_assert(!std::is_convertible_v<SlotId, BlockOrdinal>);
    static_assert(sizeof(SlotId) == 4 && sizeof(EventId) == 8);
}

TEST(Math, DivUpDoesNotOverflow) {
    constexpr std::int64_t max = std::numeric_limits<std::int64_t>::max();
    EXPECT_EQ(div_up(max, std::int64_t{2}), max / 2 + 1);
    EXPECT_EQ(div_up(std::int64_t{0}, std::int64_t{7}), 0);
    EXPECT_EQ(round_up(std::int64_t{65}, std::int64_t{64}), 128);
    EXPECT_EQ(add_saturated(kHuge, kHuge), kHuge);
}

TEST(Decimal, IsWhatTheUserWrote) {
    EXPECT_EQ(Decimal::from_double(0.95), (Decimal{95, 100}));
    EXPECT_EQ(Decimal::from_double(0.97), (Decimal{97, 100}));
    EXPECT_EQ(Decimal::from_double(1.0), (Decimal{1, 1}));
    EXPECT_EQ(Decimal::from_double(0.1), (Decimal{1, 10}));
    EXPECT_EQ(Decimal::from_double(1.25), (Decimal{125, 100}));
    EXPECT_EQ(Decimal::from_double(120.0), (Decimal{120, 1}));
    EXPECT_EQ(Decimal::from_double(1e-5), (Decimal{1, 100'000}));
    EXPECT_EQ(Decimal::from_double(1.0 / 3), (Decimal{3'333'333'333'333'333, 10'000'000'000'000'000}));
    EXPECT_EQ(Decimal::from_double(9007199254740992.0), (Decimal{9'007'199'254'740'992, 1}));
}

TEST(Decimal, IsCutAfter18DecimalsAndNeverZero) {
    EXPECT_EQ(Decimal::from_double(0.0), (Decimal{1, kDen18}));
    EXPECT_EQ(Decimal::from_double(1e-300), (Decimal{1, kDen18}));
    EXPECT_EQ(Decimal::from_double(1.5e-18), (Decimal{1, kDen18}));
    EXPECT_EQ(Decimal::from_double(std::numeric_limits<double>::denorm_min()), (Decimal{1, kDen18}));
}

TEST(Decimal, RefusesWhatIsNoLimit) {
    EXPECT_THROW((void)Decimal::from_double(-0.1), ArgumentError);
    EXPECT_THROW((void)Decimal::from_double(std::nan("")), ArgumentError);
    EXPECT_THROW((void)Decimal::from_double(1e300), ArgumentError);
}

TEST(Limit, CeilIsExact) {
    const Decimal limit = Decimal::from_double(0.95);
    EXPECT_EQ(ceil_div_by_limit(3458, limit), 3640);
    EXPECT_EQ(ceil_div_by_limit(3459, limit), 3642);
    EXPECT_EQ(ceil_div_by_limit(95, limit), 100);
    EXPECT_EQ(ceil_div_by_limit(0, limit), 0);
    EXPECT_EQ(ceil_div_by_limit(-8, limit), 0);
    EXPECT_EQ(ceil_div_by_limit(7, Decimal::from_double(0.7)), 10);  // 7 / 0.7 in doubles is 10.000000000000002
    EXPECT_EQ(ceil_div_by_limit(kHuge, limit), kHuge);
}

TEST(Limit, ExceedsIsStrict) {
    const Decimal limit = Decimal::from_double(0.95);
    EXPECT_FALSE(exceeds_limit(95, 100, limit));
    EXPECT_TRUE(exceeds_limit(96, 100, limit));
    EXPECT_FALSE(exceeds_limit(kHuge, kHuge, Decimal::from_double(1.0)));
}

}  // namespace
}  // namespace kvpool
