// Addresses and accounting without a byte behind them: planning and replay at any scale on any machine.
//
// Addresses count upwards from 2^40 in steps of 2 MiB and are never used twice; 2^56 of them can be reserved, then
// CuOomError.  Copies are accepted and move nothing.  Looking at memory is an UnsupportedError.
#pragma once

#include "kvpool/device/device.hpp"

namespace kvpool {

class VirtualDevice final : public Device {
public:
    static constexpr std::int64_t kGranularity = std::int64_t{2} << 20;
    static constexpr Address kFirstAddress = Address{1} << 40;
    static constexpr Address kEndAddress = kFirstAddress + (Address{1} << 56);

    [[nodiscard]] std::string_view name() const noexcept override { return "virtual"; }
    [[nodiscard]] std::int64_t granularity() const noexcept override { return kGranularity; }
    [[nodiscard]] bool has_bytes() const noexcept override { return false; }
    [[nodiscard]] std::shared_ptr<Arena> reserve(std::int64_t bytes) override;
    [[nodiscard]] EventId record(StreamId) override { return kCompleteEvent; }
    void wait(StreamId, EventId) override {}
    [[nodiscard]] bool query(EventId) override { return true; }
    void synchronize_event(EventId) override {}
    void synchronize() override {}
    void copy(StreamId, std::span<const CopyTask>) override {}

private:
    Address next_ = kFirstAddress;
};

}  // namespace kvpool
