// One behavioural suite for every device, then what is particular to each.
#include "kvpool/device/device.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

#include "kvpool/core/errors.hpp"
#include "kvpool/device/committed_ranges.hpp"
#include "kvpool/device/factory.hpp"
#include "kvpool/device/virtual_device.hpp"

namespace kvpool {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

TEST(CommittedRanges, AgreesWithABitPerGranule) {
    constexpr std::int64_t n = 40;
    std::mt19937 random(3);
    CommittedRanges ranges(n * 4, 4);
    std::vector<bool> model(n, false);
    for (int i = 0; i < 5000; ++i) {
        const auto first = static_cast<std::int64_t>(random() % n);
        const std::int64_t count = 1 + static_cast<std::int64_t>(random() % static_cast<unsigned>(n - first));
        const bool add = random() % 2 == 0;
        bool legal = true;
        for (std::int64_t g = first; g < first + count; ++g) {
            legal = legal && model[static_cast<std::size_t>(g)] != add;
        }
        if (!legal) {
            EXPECT_THROW(add ? ranges.add(first * 4, count * 4) : ranges.remove(first * 4, count * 4), LogicError);
            continue;
        }
        add ? ranges.add(first * 4, count * 4) : ranges.remove(first * 4, count * 4);
        for (std::int64_t g = first; g < first + count; ++g) {
            model[static_cast<std::size_t>(g)] = add;
        }
        ASSERT_EQ(ranges.total(), 4 * std::count(model.begin(), model.end(), true));
        ASSERT_EQ(ranges.contains(first * 4 + 1, count * 4 - 1), add);
    }
}

class AnyDevice : public testing::TestWithParam<const char*> {
protected:
    std::shared_ptr<Device> device = make_device(GetParam());
};

TEST_P(AnyDevice, KnowsItsName) {
    EXPECT_EQ(device->name(), GetParam());
    EXPECT_EQ(device->own_stream(), StreamId(0));
    EXPECT_GE(device->granularity(), 4096);
}

TEST_P(AnyDevice, ArenaIsAlignedAndAccounted) {
    const auto arena = device->reserve(5 * kMiB);
    EXPECT_EQ(arena->address() % static_cast<Address>(2 * kMiB), 0u);
    EXPECT_EQ(arena->bytes(), 6 * kMiB);
    EXPECT_EQ(arena->committed_bytes(), 0);
    arena->commit(2 * kMiB, 4 * kMiB);
    EXPECT_EQ(arena->committed_bytes(), 4 * kMiB);
    arena->decommit(2 * kMiB, 2 * kMiB);
    arena->commit(0, 4 * kMiB);
    EXPECT_EQ(arena->committed_bytes(), 6 * kMiB);
}

TEST_P(AnyDevice, ArenaRefusesWrongRangesAndStaysAsItWas) {
    const auto arena = device->reserve(6 * kMiB);
    arena->commit(0, 2 * kMiB);
    EXPECT_THROW(arena->commit(0, 4 * kMiB), LogicError);
    EXPECT_THROW(arena->decommit(0, 4 * kMiB), LogicError);
    EXPECT_THROW(arena->commit(1, 2 * kMiB), ArgumentError);
    EXPECT_THROW(arena->commit(4 * kMiB, 4 * kMiB), ArgumentError);
    EXPECT_THROW(arena->commit(4 * kMiB, 0), ArgumentError);
    EXPECT_THROW(arena->commit(-2 * kMiB, 4 * kMiB), ArgumentError);
    EXPECT_EQ(arena->committed_bytes(), 2 * kMiB);
    EXPECT_THROW((void)device->reserve(0), ArgumentError);
    EXPECT_THROW((void)device->reserve(std::int64_t{1} << 62), OutOfMemoryError);
}

TEST_P(AnyDevice, BytesOrAnErrorThatSaysSo) {
    const auto arena = device->reserve(2 * kMiB);
    arena->commit(0, 2 * kMiB);
    if (!device->has_bytes()) {
        EXPECT_THROW((void)arena->data(), UnsupportedError);
        return;
    }
    std::byte* data = arena->data();
    EXPECT_EQ(reinterpret_cast<Address>(data), arena->address());
    data[0] = std::byte{42};
    const std::vector<CopyTask> tasks{{arena->address() + 100, arena->address(), 1}};
    device->copy(device->own_stream(), tasks);
    device->synchronize();
    EXPECT_EQ(data[100], std::byte{42});
    arena->decommit(0, 2 * kMiB);
    arena->commit(0, 2 * kMiB);
    EXPECT_EQ(data[100], std::byte{0});  // zero filled anew
}

TEST_P(AnyDevice, EventsComplete) {
    const EventId event = device->record(device->own_stream());
    device->wait(StreamId(5), event);
    device->synchronize_event(event);
    EXPECT_TRUE(device->query(event));
    EXPECT_TRUE(device->query(kCompleteEvent));
}

TEST_P(AnyDevice, ArenaOutlivesTheDevice) {
    const auto arena = device->reserve(2 * kMiB);
    arena->commit(0, 2 * kMiB);
    const bool has_bytes = device->has_bytes();
    device.reset();
    if (has_bytes) {
        arena->data()[2 * kMiB - 1] = std::byte{1};
    }
    EXPECT_EQ(arena->committed_bytes(), 2 * kMiB);
}

INSTANTIATE_TEST_SUITE_P(Devices, AnyDevice, testing::Values("host", "virtual", "sim"),
                         [](const auto& param) { return std::string(param.param); });

TEST(Factory, NamesAreClosed) {
    EXPECT_EQ(make_device("auto")->name(), "host");
    EXPECT_THROW((void)make_device("cuda"), UnsupportedError);
    EXPECT_THROW((void)make_device("gpu"), ConfigError);
    EXPECT_THROW((void)make_device(""), ConfigError);
}

TEST(VirtualDevice, PlansTenTebibytes) {
    VirtualDevice device;
    const auto first = device.reserve(std::int64_t{10} << 40);
    first->commit(0, std::int64_t{10} << 40);
    const auto second = device.reserve(1);
    EXPECT_EQ(first->address(), VirtualDevice::kFirstAddress);
    EXPECT_EQ(second->address(), VirtualDevice::kFirstAddress + (Address{10} << 40));
    EXPECT_EQ(first->committed_bytes(), std::int64_t{10} << 40);
}

TEST(HostDevice, RefusesMoreThanThereIs) {
    const auto device = make_device("host");
    EXPECT_THROW((void)device->reserve(std::int64_t{1} << 60), HostOomError);
}

}  // namespace
}  // namespace kvpool
