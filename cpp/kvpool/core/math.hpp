// Exact integer arithmetic for bytes, slots and limits.
//
// Bytes, tokens, blocks and slots are int64 and never negative.  Products of two of them are formed in 128 bits.
// Counts that could exceed 2^62 saturate there (kHuge): such a count can only end in an error that says so.
#pragma once

#include <cstdint>

namespace kvpool {

__extension__ typedef __int128 Int128;

inline constexpr std::int64_t kHuge = std::int64_t{1} << 62;

// ceil(n / d); n >= 0, d > 0; does not overflow.
[[nodiscard]] constexpr std::int64_t div_up(std::int64_t n, std::int64_t d) noexcept {
    return n / d + (n % d != 0 ? 1 : 0);
}

[[nodiscard]] constexpr Int128 div_up(Int128 n, Int128 d) noexcept { return n / d + (n % d != 0 ? 1 : 0); }

// Smallest multiple of `step` that is >= n.  The caller knows that it fits (n <= 2^62, step <= 2^62).
[[nodiscard]] constexpr std::int64_t round_up(std::int64_t n, std::int64_t step) noexcept {
    return div_up(n, step) * step;
}

[[nodiscard]] constexpr Int128 round_up(Int128 n, Int128 step) noexcept { return div_up(n, step) * step; }

// min(value, 2^62).
[[nodiscard]] constexpr std::int64_t saturate(Int128 value) noexcept {
    return value > Int128{kHuge} ? kHuge : static_cast<std::int64_t>(value);
}

// min(a + b, 2^62).
[[nodiscard]] constexpr std::int64_t add_saturated(std::int64_t a, std::int64_t b) noexcept {
    return saturate(Int128{a} + Int128{b});
}

// a/b < c/d for b, d > 0, exactly.
[[nodiscard]] constexpr bool ratio_less(std::int64_t a, std::int64_t b, std::int64_t c, std::int64_t d) noexcept {
    return Int128{a} * Int128{d} < Int128{c} * Int128{b};
}

// A non-negative decimal fraction num / den, den a power of ten of at most 10^18.
//
// Limits and ratios arrive as doubles.  What the user wrote, 0.95, is what counts, not the binary double nearest to
// it; so every comparison is made in integers on the shortest decimal that reads back as the same double.
struct Decimal {
    std::int64_t num = 1;
    std::int64_t den = 1;

    // The shortest round-trip decimal of x, cut after 18 decimals; a result of 0 becomes 1 / 10^18, so that a limit
    // can always be divided by.  ArgumentError unless x is in [0, 2^53].
    [[nodiscard]] static Decimal from_double(double x);

    friend constexpr bool operator==(const Decimal&, const Decimal&) noexcept = default;
};

// Smallest n with n * limit >= demand, saturating at 2^62; demand >= 0.
[[nodiscard]] std::int64_t ceil_div_by_limit(std::int64_t demand, const Decimal& limit) noexcept;

// used / total > limit, exactly; total > 0.
[[nodiscard]] bool exceeds_limit(std::int64_t used, std::int64_t total, const Decimal& limit) noexcept;

// Largest x in [low, high] for which fits(x) holds; fits(low) holds and fits is monotone.
template <class Fits>
[[nodiscard]] std::int64_t largest_that_fits(std::int64_t low, std::int64_t high, const Fits& fits) {
    while (low < high) {
        const std::int64_t middle = low + (high - low) / 2 + (high - low) % 2;
        if (fits(middle)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

}  // namespace kvpool
