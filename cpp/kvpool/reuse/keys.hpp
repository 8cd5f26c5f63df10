// Keys of blocks that leave the process: a SHA-256 chain from the scope over the tokens.
//
//   root key   SHA-256 of the scope: one byte with bit 0 for a LoRA id and bit 1 for a salt, then each that is there as 8 bytes
//   block key  SHA-256 of the parent's key and the block's tokens: an id as 4 bytes, a digest as its 32
// Numbers are little-endian.  A scope that has an id 0 is another one than a scope without.  Nothing inside the process trusts
// a key: the tree compares tokens.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>

#include "kvpool/core/digest_pool.hpp"
#include "kvpool/core/tokens.hpp"

namespace kvpool {

// What a prefix is shared within.  In order: without an id before with one, ids ascending; the LoRA id first.
struct ReuseScope {
    std::optional<std::uint64_t> lora_id;
    std::optional<std::uint64_t> salt;
    friend auto operator<=>(const ReuseScope&, const ReuseScope&) = default;
};

using BlockKey = Digest;

// UnsupportedError if there is no SHA-256, see sha256().
[[nodiscard]] BlockKey root_key(const ReuseScope& scope);
// Key of the block that the query is; it has been checked.
[[nodiscard]] BlockKey block_key(const BlockKey& parent, const Query& query, const DigestPool& digests);

}  // namespace kvpool
