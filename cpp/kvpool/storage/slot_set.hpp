// A set of slot ids that finds its smallest member in a fixed number of steps.
//
// A tree of bitmaps, 64 children a word, always kLevels high: bit i of level l is set iff word i of level l - 1 is
// not 0.  Six levels cover 2^36 ids, more than int32 has, so insert, erase and first() take the same instructions
// whatever the capacity.  Memory is 1/64 more than a bit per id, zero pages until touched.
// Invariant: size() = bits set in level 0.  Not thread safe.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

#include "kvpool/core/ids.hpp"

namespace kvpool {

struct FreeDeleter {
    void operator()(void* p) const noexcept { std::free(p); }
};

// An array of zeros that costs no memory until it is written.
template <class T>
using LazyArray = std::unique_ptr<T[], FreeDeleter>;

template <class T>
[[nodiscard]] LazyArray<T> make_lazy_array(std::size_t n) {
    void* p = std::calloc(n == 0 ? 1 : n, sizeof(T));
    if (p == nullptr) {
        throw std::bad_alloc();
    }
    return LazyArray<T>(static_cast<T*>(p));
}

class SlotSet {
public:
    explicit SlotSet(std::int64_t capacity);

    [[nodiscard]] std::int64_t capacity() const noexcept { return capacity_; }
    [[nodiscard]] std::int64_t size() const noexcept { return size_; }
    [[nodiscard]] bool empty() const noexcept { return size_ == 0; }

    // 0 <= id < capacity for the three below.
    [[nodiscard]] bool contains(SlotId id) const noexcept {
        return ((word(0, id.index() >> 6) >> bit_of(id.index())) & 1) != 0;
    }
    // The id must not be a member.
    void insert(SlotId id) noexcept;
    // The id must be a member.
    void erase(SlotId id) noexcept;

    // Smallest member; the set must not be empty.
    [[nodiscard]] SlotId first() const noexcept;
    // Smallest member >= id, or kBadSlot; any id >= 0.
    [[nodiscard]] SlotId next(SlotId id) const noexcept;

    // Members are kept; capacity may only grow.
    void grow(std::int64_t capacity);

    // Whether all levels and the size agree; O(capacity).
    [[nodiscard]] bool is_valid() const noexcept;

private:
    static constexpr std::size_t kLevels = 6;

    [[nodiscard]] static constexpr unsigned bit_of(std::size_t i) noexcept { return static_cast<unsigned>(i & 63); }
    [[nodiscard]] std::uint64_t& word(std::size_t level, std::size_t i) noexcept { return levels_[level][i]; }
    [[nodiscard]] std::uint64_t word(std::size_t level, std::size_t i) const noexcept { return levels_[level][i]; }

    std::int64_t capacity_ = 0;
    std::int64_t size_ = 0;
    std::array<LazyArray<std::uint64_t>, kLevels> levels_;
    std::array<std::size_t, kLevels> words_{};  // words per level
};

inline void SlotSet::insert(SlotId id) noexcept {
    std::size_t i = id.index();
    for (std::size_t level = 0; level < kLevels; ++level) {
        std::uint64_t& w = word(level, i >> 6);
        const bool was_empty = w == 0;
        w |= std::uint64_t{1} << bit_of(i);
        if (!was_empty) {
            break;
        }
        i >>= 6;
    }
    ++size_;
}

inline void SlotSet::erase(SlotId id) noexcept {
    std::size_t i = id.index();
    for (std::size_t level = 0; level < kLevels; ++level) {
        std::uint64_t& w = word(level, i >> 6);
        w &= ~(std::uint64_t{1} << bit_of(i));
        if (w != 0) {
            break;
        }
        i >>= 6;
    }
    --size_;
}

inline SlotId SlotSet::first() const noexcept {
    std::size_t i = 0;
    for (std::size_t level = kLevels; level-- > 0;) {
        i = (i << 6) | static_cast<std::size_t>(std::countr_zero(word(level, i)));
    }
    return make_id<SlotId>(i);
}

}  // namespace kvpool
