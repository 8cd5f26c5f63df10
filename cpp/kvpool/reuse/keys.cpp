#include "kvpool/reuse/keys.hpp"

#include <algorithm>
#include <cstring>
#include <vector>

#include "kvpool/core/sha256.hpp"

namespace kvpool {
namespace {

template <class Unsigned>
void append_little_endian(std::vector<std::byte>& out, Unsigned value) {
    for (std::size_t i = 0; i < sizeof value; ++i) {
        out.push_back(static_cast<std::byte>(value & 0xff));
        value >>= 8;
    }
}

void append(std::vector<std::byte>& out, const Digest& digest) {
    const auto bytes = std::as_bytes(std::span(digest));
    out.insert(out.end(), bytes.begin(), bytes.end());
}

}  // namespace

BlockKey root_key(const ReuseScope& scope) {
    std::vector<std::byte> bytes;
    bytes.push_back(static_cast<std::byte>((scope.lora_id ? 1 : 0) | (scope.salt ? 2 : 0)));
    for (const std::optional<std::uint64_t>& field : {scope.lora_id, scope.salt}) {
        if (field) {
            append_little_endian(bytes, *field);
        }
    }
    return sha256(bytes);
}

BlockKey block_key(const BlockKey& parent, const Query& query, const DigestPool& digests) {
    std::vector<std::byte> bytes;
    bytes.reserve(parent.size() + query.tokens.size_bytes());
    append(bytes, parent);
    for (const Token token : query.tokens) {
        if (is_digest(token)) {
            append(bytes, digests.bytes(token, query));
        } else {
            append_little_endian(bytes, static_cast<std::uint32_t>(token));
        }
    }
    return sha256(bytes);
}

}  // namespace kvpool
