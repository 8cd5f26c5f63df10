#include "kvpool/storage/slot_set.hpp"

#include <algorithm>
#include <utility>

namespace kvpool {

namespace {

// Words of a level whose positions are the `n` items below; never 0, so that the tree is complete at any capacity.
std::size_t words_for(std::size_t n) { return n == 0 ? 1 : (n + 63) / 64; }

}  // namespace

SlotSet::SlotSet(std::int64_t capacity) : capacity_(capacity) {
    std::size_t n = static_cast<std::size_t>(capacity);
    for (std::size_t level = 0; level < kLevels; ++level) {
        n = words_for(n);
        words_[level] = n;
        levels_[level] = make_lazy_array<std::uint64_t>(n);
    }
}

SlotId SlotSet::next(SlotId id) const noexcept {
    std::size_t i = id.index();
    for (std::size_t level = 0; level < kLevels; ++level) {
        // Look for a bit >= i in its word; above level 0 the word below i is known to be exhausted, so i has moved
        // past it.
        if (i >> 6 < words_[level]) {
            const std::uint64_t rest = word(level, i >> 6) & (~std::uint64_t{0} << bit_of(i));
            if (rest != 0) {
                i = (i & ~std::size_t{63}) | static_cast<std::size_t>(std::countr_zero(rest));
                while (level-- > 0) {
                    i = (i << 6) | static_cast<std::size_t>(std::countr_zero(word(level, i)));
                }
                return make_id<SlotId>(i);
            }
        }
        i = (i >> 6) + 1;
    }
    return kBadSlot;
}

void SlotSet::grow(std::int64_t capacity) {
    if (capacity <= capacity_) {
        return;
    }
    SlotSet bigger(capacity);
    for (std::size_t level = 0; level < kLevels; ++level) {
        std::copy_n(levels_[level].get(), words_[level], bigger.levels_[level].get());
    }
    bigger.size_ = size_;
    *this = std::move(bigger);
}

bool SlotSet::is_valid() const noexcept {
    std::int64_t members = 0;
    for (std::size_t i = 0; i < words_[0]; ++i) {
        members += std::popcount(word(0, i));
    }
    bool valid = members == size_;
    for (std::size_t level = 1; level < kLevels; ++level) {
        for (std::size_t i = 0; i < words_[level - 1]; ++i) {
            const bool set = ((word(level, i >> 6) >> bit_of(i)) & 1) != 0;
            valid = valid && set == (word(level - 1, i) != 0);
        }
    }
    return valid;
}

}  // namespace kvpool
