// Equal slots in one arena.
//
// Invariant: slot i lies at address() + i * slot_bytes; num_slots * slot_bytes <= mapped_bytes(), which is a
// multiple of the grain.  The base never changes.  Address products are 64-bit.
#pragma once

#include <cstdint>
#include <memory>

#include "kvpool/core/ids.hpp"
#include "kvpool/device/device.hpp"

namespace kvpool {

class Pool {
public:
    // Reserves and commits round_up(num_slots * slot_bytes, grain) bytes; the grain is a multiple of the device's
    // granularity.  Throws what the device throws, leaving nothing behind; CuOomError if the product exceeds 2^62.
    Pool(Device& device, std::int64_t slot_bytes, std::int64_t num_slots, std::int64_t grain);

    [[nodiscard]] Address address() const noexcept { return address_; }
    [[nodiscard]] Address slot_address(SlotId slot) const noexcept {
        return address_ + static_cast<Address>(slot.value()) * static_cast<Address>(slot_bytes_);
    }
    [[nodiscard]] std::int64_t slot_bytes() const noexcept { return slot_bytes_; }
    [[nodiscard]] std::int64_t num_slots() const noexcept { return num_slots_; }
    [[nodiscard]] std::int64_t mapped_bytes() const { return arena_ ? arena_->committed_bytes() : 0; }
    // For memory views: keeps the memory alive beyond the pool.  Null for a pool without slots.
    [[nodiscard]] const std::shared_ptr<Arena>& arena() const noexcept { return arena_; }

private:
    std::shared_ptr<Arena> arena_;
    Address address_ = 0;
    std::int64_t slot_bytes_;
    std::int64_t num_slots_;
};

}  // namespace kvpool
