// Slot ids by position: the pages of one (request, life cycle, beam), or a request's scratch slots of one life cycle.
//
// Words
//   entry   a slot id, or kBadSlot where the block has no page (stale, scratch, or shared with beam 0)
//   held    entries of stale blocks that are kept because they may still be committed; not exposed
// Invariants
//   count() == entries that are not kBadSlot;  0 <= held() <= count() <= size() <= capacity
//   memory <= 6 bytes per entry and a constant: sizing leaves a quarter free, growth half, so that the first block after a
//   long prompt copies nothing
// Whoever cuts entries off has taken their slots out before. Not thread safe: used under the manager's lock.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <utility>

#include "kvpool/core/ids.hpp"

namespace kvpool {

class BlockTable {
public:
    BlockTable() noexcept = default;
    BlockTable(const BlockTable&) = delete;  // entries own slots; there is one owner
    BlockTable& operator=(const BlockTable&) = delete;
    BlockTable(BlockTable&& other) noexcept { swap(other); }
    BlockTable& operator=(BlockTable&& other) noexcept {
        swap(other);
        return *this;
    }

    [[nodiscard]] std::int32_t size() const noexcept { return size_; }
    [[nodiscard]] std::int32_t count() const noexcept { return count_; }
    [[nodiscard]] std::int32_t held() const noexcept { return held_; }
    [[nodiscard]] const std::int32_t* data() const noexcept { return entries_.get(); }
    // 0 <= i < size()
    [[nodiscard]] SlotId operator[](std::int64_t i) const noexcept {
        return SlotId(entries_[static_cast<std::size_t>(i)]);
    }

    // Entries that are not kBadSlot in [begin, end), which lies inside the table.
    [[nodiscard]] std::int64_t count_in(std::int64_t begin, std::int64_t end) const noexcept {
        return begin >= end ? 0 : count_slots(data() + begin, data() + end);
    }

    // Puts a slot where none was.
    void put(std::int64_t i, SlotId slot) noexcept {
        entries_[static_cast<std::size_t>(i)] = slot.value();
        ++count_;
    }
    // Takes the slot out; there must be one.
    SlotId take(std::int64_t i) noexcept {
        --count_;
        return SlotId(std::exchange(entries_[static_cast<std::size_t>(i)], kBadSlot.value()));
    }
    void add_held(std::int32_t n) noexcept { held_ += n; }

    // New entries are kBadSlot. Growing may throw std::bad_alloc and changes nothing then; cutting never frees memory.
    void resize(std::int32_t size) {
        if (size > capacity_) {
            constexpr std::int64_t most = std::numeric_limits<std::int32_t>::max();
            const std::int64_t wanted =
                std::max(std::int64_t{size} + size / 4 + 4, std::int64_t{capacity_} + capacity_ / 2);
            reallocate(static_cast<std::int32_t>(std::min(wanted, most)));
        }
        if (size > size_) {
            std::fill(entries_.get() + size_, entries_.get() + size, kBadSlot.value());
        }
        size_ = size;
    }

    // Gives memory back after a large cut; the table works on if there is none to do so.
    void trim() noexcept {
        if (capacity_ > 2 * std::int64_t{size_} + 16) {
            try {
                reallocate(size_);
            } catch (const std::bad_alloc&) {
                return;
            }
        }
    }

private:
    void swap(BlockTable& other) noexcept {
        std::swap(entries_, other.entries_);
        std::swap(size_, other.size_);
        std::swap(capacity_, other.capacity_);
        std::swap(count_, other.count_);
        std::swap(held_, other.held_);
    }

    // Not inline: its loop would be unrolled into every place that mostly has an empty range.
    [[nodiscard]] static std::int64_t count_slots(const std::int32_t* begin, const std::int32_t* end) noexcept;

    void reallocate(std::int32_t capacity) {
        std::unique_ptr<std::int32_t[]> grown(capacity == 0 ? nullptr
                                                            : new std::int32_t[static_cast<std::size_t>(capacity)]);
        std::copy_n(entries_.get(), std::min(size_, capacity), grown.get());
        entries_ = std::move(grown);
        capacity_ = capacity;
    }

    std::unique_ptr<std::int32_t[]> entries_;
    std::int32_t size_ = 0;
    std::int32_t capacity_ = 0;
    std::int32_t count_ = 0;
    std::int32_t held_ = 0;
};

}  // namespace kvpool
