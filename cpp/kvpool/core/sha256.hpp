// SHA-256 by OpenSSL's libcrypto, which uses the CPU's SHA instructions.  Linked statically when the build found it, else
// loaded at first use.  May be used by any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

#include "kvpool/core/tokens.hpp"

namespace kvpool {

// UnsupportedError naming the remedy if libcrypto can not be had.
[[nodiscard]] Digest sha256(std::span<const std::byte> bytes);

}  // namespace kvpool
