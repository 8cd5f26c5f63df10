#include "kvpool/core/tokens.hpp"

#include <algorithm>
#include <bit>
#include <cstring>

#include "kvpool/core/errors.hpp"

namespace kvpool {

std::size_t find_negative(TokenSpan tokens) noexcept {
    constexpr std::size_t kStep = 4 * kTokensInVector;
    constexpr std::uint64_t kSigns = 0x8000'0000'8000'0000;
    std::size_t i = 0;
    for (; i + kStep <= tokens.size(); i += kStep) {
        const Token* const p = tokens.data() + i;
        const TokenVector all = (load_vector(p, 0) | load_vector(p, 1)) | (load_vector(p, 2) | load_vector(p, 3));
        if (((all[0] | all[1]) & kSigns) != 0) {
            break;
        }
    }
    while (i < tokens.size() && tokens[i] >= 0) {
        ++i;
    }
    return i;
}

std::size_t common_prefix(TokenSpan a, TokenSpan b) noexcept {
    const std::size_t n = std::min(a.size(), b.size());
    std::size_t i = 0;
    if constexpr (std::endian::native == std::endian::little) {
        for (; i + 2 <= n; i += 2) {
            std::uint64_t x = 0;
            std::uint64_t y = 0;
            std::memcpy(&x, a.data() + i, sizeof x);
            std::memcpy(&y, b.data() + i, sizeof y);
            if (x != y) {
                return i + (static_cast<std::uint32_t>(x) == static_cast<std::uint32_t>(y) ? 1 : 0);
            }
        }
    }
    while (i < n && a[i] == b[i]) {
        ++i;
    }
    return i;
}

void throw_bad_token(const std::string& name, std::size_t i, Token value) {
    throw ArgumentError(name + "[" + std::to_string(i) + "]: token ids must be from 0 to 2147483647, not " +
                        std::to_string(value));
}

void Query::check(std::size_t from) const {
    if (!raw) {
        return;
    }
    const std::size_t i = from + find_negative(tokens.subspan(from));
    if (i != tokens.size()) {
        throw_bad_token(name, i, tokens[i]);
    }
}

}  // namespace kvpool
