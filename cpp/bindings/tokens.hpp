// What names a prefix, between Python and the core: scope, tokens, digests, keys.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <vector>

#include "arrays.hpp"
#include "kvpool/core/tokens.hpp"
#include "kvpool/reuse/keys.hpp"

namespace kvpool::bindings {

// A pair of 64-bit unsigned numbers or None.
[[nodiscard]] ReuseScope read_scope(pybind11::handle pair);
[[nodiscard]] pybind11::list describe_scope(const ReuseScope& scope);

// Raw tokens (core/tokens.hpp): an int32 array that is read in place, and the digests it refers to. None as ids: no tokens.
class TokenArguments {
public:
    TokenArguments(pybind11::handle ids, pybind11::handle digests);
    [[nodiscard]] bool has_ids() const noexcept { return array_.has_value(); }
    [[nodiscard]] TokenSpan ids() const noexcept { return array_ ? array_->values<Token>() : TokenSpan{}; }
    [[nodiscard]] std::span<const Digest> digests() const noexcept { return digests_; }

private:
    std::optional<ArrayArgument> array_;
    std::vector<Digest> digests_;
};

[[nodiscard]] pybind11::bytes to_bytes(const Digest& digest);
// (ids, digests) as TokenArguments reads them; fresh.
[[nodiscard]] pybind11::tuple describe_tokens(const std::vector<Token>& ids, const std::vector<Digest>& digests);
// uint8[n, 32].
[[nodiscard]] pybind11::array describe_keys(const std::vector<BlockKey>& keys);

}  // namespace kvpool::bindings
