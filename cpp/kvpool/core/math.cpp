#include "kvpool/core/math.hpp"

#include <array>
#include <charconv>
#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool {

namespace {

constexpr int kMaxDecimals = 18;
constexpr double kLargest = 9007199254740992.0;  // 2^53: every digit of the shortest form counts below

}  // namespace

Decimal Decimal::from_double(double x) {
    if (!(x >= 0.0 && x <= kLargest)) {
        throw ArgumentError("a decimal value must be in [0, 2^53], got " + std::to_string(x));
    }
    // "d.ddde+xx": the shortest digits that read back as x, at most 17 of them.
    std::array<char, 40> text{};
    const auto written = std::to_chars(text.data(), text.data() + text.size(), x, std::chars_format::scientific);
    std::int64_t num = 0;
    int decimals = 0;  // of num
    const char* p = text.data();
    for (bool after_point = false; p != written.ptr && *p != 'e'; ++p) {
        if (*p == '.') {
            after_point = true;
            continue;
        }
        num = num * 10 + (*p - '0');
        decimals += after_point ? 1 : 0;
    }
    int exponent = 0;
    ++p;  // 'e'
    if (p != written.ptr && *p == '+') {
        ++p;  // from_chars takes no plus sign
    }
    std::from_chars(p, written.ptr, exponent);
    decimals -= exponent;

    for (; decimals > kMaxDecimals && num != 0; --decimals) {
        num /= 10;
    }
    if (num == 0) {
        num = 1;
        decimals = kMaxDecimals;
    }
    for (; decimals < 0; ++decimals) {
        num *= 10;
    }
    std::int64_t den = 1;
    for (int i = 0; i < decimals; ++i) {
        den *= 10;
    }
    return {num, den};
}

std::int64_t ceil_div_by_limit(std::int64_t demand, const Decimal& limit) noexcept {
    if (demand <= 0) {
        return 0;
    }
    return saturate(div_up(Int128{demand} * Int128{limit.den}, Int128{limit.num}));
}

bool exceeds_limit(std::int64_t used, std::int64_t total, const Decimal& limit) noexcept {
    return Int128{used} * Int128{limit.den} > Int128{total} * Int128{limit.num};
}

}  // namespace kvpool
