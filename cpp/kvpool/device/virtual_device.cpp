#include "kvpool/device/virtual_device.hpp"

#include <string>

#include "kvpool/core/errors.hpp"
#include "kvpool/core/math.hpp"
#include "kvpool/device/committed_ranges.hpp"

namespace kvpool {

namespace {

class VirtualArena final : public Arena {
public:
    VirtualArena(Address address, std::int64_t bytes)
        : Arena(address, bytes), committed_(bytes, VirtualDevice::kGranularity) {}

    void commit(std::int64_t offset, std::int64_t bytes) override { committed_.add(offset, bytes); }
    void decommit(std::int64_t offset, std::int64_t bytes) override { committed_.remove(offset, bytes); }
    [[nodiscard]] std::int64_t committed_bytes() const override { return committed_.total(); }
    [[nodiscard]] std::byte* data() override {
        throw UnsupportedError("the virtual device has no bytes; use device \"host\" to look at memory");
    }

private:
    CommittedRanges committed_;
};

}  // namespace

std::shared_ptr<Arena> VirtualDevice::reserve(std::int64_t bytes) {
    if (bytes <= 0 || bytes > kHuge) {
        throw ArgumentError("arena size must be in [1, 2^62] bytes, got " + std::to_string(bytes));
    }
    const std::int64_t size = round_up(bytes, kGranularity);
    if (static_cast<Address>(size) > kEndAddress - next_) {
        throw CuOomError("the virtual device has no " + std::to_string(size) + " bytes of addresses left");
    }
    auto arena = std::make_shared<VirtualArena>(next_, size);
    next_ += static_cast<Address>(size);
    return arena;
}

}  // namespace kvpool
