// Tokens as the reuse layers store and compare them: one int32 each, equal exactly if the tokens are.
//
// Words
//   raw       as callers give them: ids[i] >= 0 is a token id; ids[i] = -1 - j means the j-th of the digests that come along
//   digest    32 bytes that stand for a part of a multimodal item
//   encoded   Token: >= 0 a token id; -1 - k the digest with index k of the manager's DigestPool; from kFirstUnknown upwards
//             the digests of a query that the pool does not have, which are equal to nothing that is stored
// Order of tokens (ties, children): ids ascending, then digests by their bytes (memcmp).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <span>
#include <string>

namespace kvpool {

using Token = std::int32_t;
using TokenSpan = std::span<const Token>;
using Digest = std::array<std::uint8_t, 32>;

inline constexpr Token kFirstUnknown = std::numeric_limits<Token>::min();
inline constexpr std::int64_t kMaxDigests = std::int64_t{1} << 30;  // in a pool, and in one query

[[nodiscard]] constexpr bool is_digest(Token token) noexcept { return token < 0; }
[[nodiscard]] constexpr bool is_unknown(Token token) noexcept { return token < kFirstUnknown / 2; }
[[nodiscard]] constexpr Token digest_token(std::int64_t index) noexcept { return static_cast<Token>(-1 - index); }
[[nodiscard]] constexpr std::int64_t digest_index(Token token) noexcept { return -1 - std::int64_t{token}; }
[[nodiscard]] constexpr Token unknown_token(std::size_t j) noexcept {
    return static_cast<Token>(kFirstUnknown + static_cast<std::int64_t>(j));
}

// Four tokens in a register that every CPU has.
using TokenVector __attribute__((vector_size(16))) = std::uint64_t;
inline constexpr std::size_t kTokensInVector = sizeof(TokenVector) / sizeof(Token);

[[nodiscard]] inline TokenVector load_vector(const Token* tokens, std::size_t i) noexcept {
    TokenVector vector;
    std::memcpy(&vector, tokens + i * kTokensInVector, sizeof vector);
    return vector;
}

// Position of the first negative token, or tokens.size().
[[nodiscard]] std::size_t find_negative(TokenSpan tokens) noexcept;
[[nodiscard]] inline bool has_digests(TokenSpan tokens) noexcept { return find_negative(tokens) != tokens.size(); }
// Leading tokens that are equal, as numbers.
[[nodiscard]] std::size_t common_prefix(TokenSpan a, TokenSpan b) noexcept;

// Whether n tokens are equal.  Inline and without calls: a walk down the tree does little else.
[[nodiscard]] inline bool equal_tokens(const Token* a, const Token* b, std::size_t n) noexcept {
    constexpr std::size_t kStep = 4 * kTokensInVector;
    for (; n >= kStep; n -= kStep, a += kStep, b += kStep) {
        const TokenVector differences =
            ((load_vector(a, 0) ^ load_vector(b, 0)) | (load_vector(a, 1) ^ load_vector(b, 1))) |
            ((load_vector(a, 2) ^ load_vector(b, 2)) | (load_vector(a, 3) ^ load_vector(b, 3)));
        if ((differences[0] | differences[1]) != 0) {
            return false;
        }
    }
    Token differences = 0;
    for (std::size_t i = 0; i < n; ++i) {
        differences |= a[i] ^ b[i];
    }
    return differences == 0;
}

// ArgumentError "NAME[i]: token ids must be from 0 to 2147483647, not VALUE".
[[noreturn]] void throw_bad_token(const std::string& name, std::size_t i, Token value);

// What a look-up compares.  A view: tokens and digests belong to the caller and outlive it.  Built by DigestPool::encode(),
// or by encoded() from tokens that are encoded already.
struct Query {
    TokenSpan tokens = {};
    // No digests came along: the tokens are the caller's ids, in which a negative is an error that has not been looked for
    // yet.  Whoever walks the tree looks at the part that did not match; what matches a block without digests has none.
    bool raw = false;
    std::span<const Digest> unknown = {};  // the token kFirstUnknown + j is unknown[j]
    const char* name = "input_tokens";     // for messages

    [[nodiscard]] static Query encoded(TokenSpan encoded_tokens) noexcept { return {.tokens = encoded_tokens}; }
    // The part [i * size, (i + 1) * size) of it, shorter or empty at the end.
    [[nodiscard]] Query block(std::size_t i, std::size_t size) const noexcept {
        Query part = *this;
        const std::size_t begin = std::min(i * size, tokens.size());
        part.tokens = tokens.subspan(begin, std::min(size, tokens.size() - begin));
        return part;
    }
    // ArgumentError if a raw query has a negative token at or behind `from`.
    void check(std::size_t from = 0) const;
};

}  // namespace kvpool
