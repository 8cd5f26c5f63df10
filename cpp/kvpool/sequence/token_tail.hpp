// The committed tokens of a request that fill no block yet.
//
// Words
//   half   the memory has two of them: a new tail is written into the one that is not shown, so that taking the change back
//          is a matter of two numbers
// Invariant: 0 <= size() < tokens per block between calls. Encoded tokens; the owner of the tail owns their digests' references.
// Not thread safe: used under the manager's lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

#include "kvpool/core/journal.hpp"
#include "kvpool/core/tokens.hpp"

namespace kvpool {

class TokenTail {
public:
    [[nodiscard]] std::int32_t size() const noexcept { return size_; }
    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }
    [[nodiscard]] TokenSpan tokens() const noexcept { return {shown(), static_cast<std::size_t>(size_)}; }
    [[nodiscard]] bool has_room_for(std::int64_t n) const noexcept { return n <= capacity_; }

    // Memory for n tokens, at most tokens_per_block; the tail stays what it is. std::bad_alloc changes nothing.
    void reserve(std::int64_t n, std::int64_t tokens_per_block) {
        if (n > capacity_) {
            constexpr std::int64_t least = 256;  // a whole block of the usual sizes at once
            grow(std::min(tokens_per_block, std::max({n, 2 * std::int64_t{capacity_}, least})));
        }
    }
    // Appends; there is room, and nobody will take it back.
    void append(TokenSpan tokens) noexcept {
        if (tokens.size() == 1) {
            shown()[size_++] = tokens.front();
            return;
        }
        std::copy(tokens.begin(), tokens.end(), shown() + size_);
        size_ += static_cast<std::int32_t>(tokens.size());
    }
    // Appends; there is room.
    void append(Journal& journal, TokenSpan tokens) {
        journal.save(size_);
        append(tokens);
    }
    // Becomes `tokens`, which are not part of it; there is room.
    void replace(Journal& journal, TokenSpan tokens) {
        journal.save(half_);
        journal.save(size_);
        half_ = 1 - half_;
        size_ = 0;
        append(tokens);
    }
    // Fills a fresh tail; there is room.
    void assign(TokenSpan tokens) noexcept {
        size_ = 0;
        append(tokens);
    }
    // Empty, without memory.
    void reset() noexcept {
        memory_.reset();
        capacity_ = size_ = half_ = 0;
    }

private:
    [[nodiscard]] Token* shown() const noexcept {
        return memory_.get() + static_cast<std::ptrdiff_t>(half_) * capacity_;
    }
    void grow(std::int64_t capacity) {
        std::unique_ptr<Token[]> grown(new Token[static_cast<std::size_t>(2 * capacity)]);
        for (std::int64_t half = 0; half < 2; ++half) {
            std::copy_n(memory_.get() + half * capacity_, capacity_, grown.get() + half * capacity);
        }
        memory_ = std::move(grown);
        capacity_ = static_cast<std::int32_t>(capacity);
    }

    std::unique_ptr<Token[]> memory_;  // two halves of capacity_ tokens
    std::int32_t capacity_ = 0;
    std::int32_t size_ = 0;
    std::int32_t half_ = 0;  // the one that is shown
};

}  // namespace kvpool
