#include "kvpool/storage/slot_allocator.hpp"

#include <algorithm>
#include <string>

#include "kvpool/core/errors.hpp"

namespace kvpool {

namespace {

constexpr std::int64_t kMaxCapacity = std::int64_t{1} << 31;  // ids are int32

std::int64_t checked_capacity(std::int64_t capacity, std::int64_t least, std::int64_t most) {
    if (capacity < least || capacity > most) {
        throw ArgumentError("capacity must be in [" + std::to_string(least) + ", " + std::to_string(most) + "], got " +
                            std::to_string(capacity));
    }
    return capacity;
}

std::size_t words_for(std::int64_t capacity) { return static_cast<std::size_t>((capacity + 63) / 64); }

}  // namespace

SlotAllocator::SlotAllocator(std::int64_t capacity)
    : capacity_(checked_capacity(capacity, 0, kMaxCapacity)),
      target_(capacity),
      recycled_(capacity),
      occupied_(make_lazy_array<std::uint64_t>(words_for(capacity))) {}

bool SlotAllocator::is_occupied(SlotId id) const noexcept {
    return id.value() >= 0 && id.value() < active_ && (occupied_[id.index() >> 6] & mask(id)) != 0;
}

SlotId SlotAllocator::allocate() {
    SlotId id;
    if (!recycled_.empty()) {  // every recycled id is below every id that was never handed out
        id = recycled_.first();
        recycled_.erase(id);
    } else if (active_ < target_) {
        id = SlotId(static_cast<std::int32_t>(active_++));
    } else {
        throw OutOfPagesError("no free slot: all " + std::to_string(target_) + " are in use");
    }
    occupied_word(id) |= mask(id);
    return id;
}

std::vector<SlotId> SlotAllocator::allocate_many(std::int64_t n) {
    if (n < 0) {
        throw ArgumentError("n must not be negative, got " + std::to_string(n));
    }
    if (n > num_free()) {
        throw OutOfPagesError(std::to_string(n) + " slots wanted, " + std::to_string(num_free()) + " free");
    }
    std::vector<SlotId> ids(static_cast<std::size_t>(n));
    for (SlotId& id : ids) {
        id = allocate();
    }
    return ids;
}

void SlotAllocator::release(SlotId id) {
    if (!is_occupied(id)) {
        throw LogicError("slot " + std::to_string(id.value()) + " is not occupied");
    }
    occupied_word(id) &= ~mask(id);
    if (id.value() < target_) {
        recycled_.insert(id);
    } else {
        ++num_overflow_;
    }
}

void SlotAllocator::reoccupy(SlotId id) {
    if (id.value() < 0 || id.value() >= active_ || is_occupied(id)) {
        throw LogicError("slot " + std::to_string(id.value()) + " was not released");
    }
    if (id.value() < target_) {
        recycled_.erase(id);
    } else {
        --num_overflow_;
    }
    occupied_word(id) |= mask(id);
}

void SlotAllocator::expand(std::int64_t capacity) {
    if (shrink_in_progress()) {
        throw LogicError("expand while a shrink is pending; finish it first");
    }
    checked_capacity(capacity, capacity_, kMaxCapacity);
    auto occupied = make_lazy_array<std::uint64_t>(words_for(capacity));
    std::copy_n(occupied_.get(), words_for(active_), occupied.get());
    recycled_.grow(capacity);
    occupied_ = std::move(occupied);
    capacity_ = target_ = capacity;
}

void SlotAllocator::prepare_for_shrink(std::int64_t capacity) {
    if (shrink_in_progress()) {
        throw LogicError("a shrink is pending already; finish it first");
    }
    target_ = checked_capacity(capacity, 0, capacity_);
    if (active_ <= target_) {
        return;  // nothing above the target was ever handed out
    }
    const SlotId first(static_cast<std::int32_t>(target_));
    for (SlotId id = recycled_.next(first); id != kBadSlot; id = recycled_.next(id)) {
        recycled_.erase(id);
        ++num_overflow_;
    }
}

bool SlotAllocator::finish_shrink() {
    if (num_overflow_ != std::max<std::int64_t>(0, active_ - target_)) {
        return false;
    }
    capacity_ = target_;
    active_ = std::min(active_, capacity_);
    num_overflow_ = 0;
    return true;
}

std::vector<SlotId> SlotAllocator::slots_blocking_shrink() const { return occupied_from(target_); }

std::vector<SlotId> SlotAllocator::occupied_ids() const { return occupied_from(0); }

std::vector<SlotId> SlotAllocator::occupied_from(std::int64_t first) const {
    std::vector<SlotId> ids;
    for (std::int64_t id = first; id < active_;) {
        const auto i = static_cast<std::size_t>(id);
        const std::uint64_t rest = occupied_[i >> 6] >> (i & 63);
        if (rest == 0) {
            id = (id | 63) + 1;
            continue;
        }
        id += std::countr_zero(rest);
        ids.push_back(SlotId(static_cast<std::int32_t>(id)));
        ++id;
    }
    return ids;
}

void SlotAllocator::audit() const {
    std::int64_t occupied = 0;
    bool valid = recycled_.is_valid() && 0 <= target_ && target_ <= capacity_ && active_ <= capacity_;
    for (std::size_t i = 0; i < words_for(capacity_); ++i) {
        occupied += std::popcount(occupied_[i]);
    }
    valid = valid && occupied == num_occupied();
    for (const SlotId id : occupied_ids()) {
        valid = valid && !recycled_.contains(id);
    }
    const SlotId past(static_cast<std::int32_t>(std::min(active_, target_)));
    valid = valid && (past.value() < 0 || recycled_.next(past) == kBadSlot);
    if (!valid) {
        throw CorruptedError("slot allocator: recycled " + std::to_string(recycled_.size()) + " + overflow " +
                             std::to_string(num_overflow_) + " + occupied " + std::to_string(occupied) +
                             " do not make up the " + std::to_string(active_) + " ids handed out");
    }
}

}  // namespace kvpool
