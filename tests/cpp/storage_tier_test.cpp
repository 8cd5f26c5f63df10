#include "kvpool/storage/tier.hpp"

#include <gtest/gtest.h>

#include "kvpool/core/errors.hpp"
#include "kvpool/device/factory.hpp"
#include "kvpool/device/sim_device.hpp"
#include "kvpool/storage/sizing.hpp"
#include "storage_configs.hpp"

namespace kvpool {
namespace {

using testing_configs::attention;
using testing_configs::config_of;
using testing_configs::gpt_oss_120b;

constexpr std::int64_t kMiB = std::int64_t{1} << 20;
constexpr PoolGroupId kFirst{0};

ManagerConfig small_config() {
    return config_of({attention(0, {8192, 8192, 512}), attention(1, {4096}, 64)}, 64 * kMiB);
}

TEST(Tier, MapsWhatWasPlanned) {
    const ManagerConfig config = small_config();
    const Layout layout = build_layout(config);
    const auto device = make_device("host");
    const PoolPlan plan = plan_pools(layout, config, device->granularity());
    Tier tier(*device, layout, plan.counts, plan.grain);
    ASSERT_EQ(tier.num_pool_groups(), 2u);
    EXPECT_EQ(tier.total(kFirst), plan.counts[0]);
    EXPECT_LE(tier.mapped_bytes(), config.gpu_quota);
    EXPECT_EQ(tier.mapped_bytes() % plan.grain, 0);
    const Pool& pool = tier.pools(kFirst)[1];
    EXPECT_EQ(pool.slot_bytes(), 512);
    EXPECT_EQ(pool.slot_address(SlotId(3)), pool.address() + 3 * 512);
    // The last byte of the last slot is there.
    pool.arena()->data()[pool.num_slots() * pool.slot_bytes() - 1] = std::byte{1};
}

TEST(Tier, SlotsCarryTheirReadyEvent) {
    const ManagerConfig config = small_config();
    const Layout layout = build_layout(config);
    const auto device = make_device("virtual");
    Tier tier(*device, layout, std::vector<std::int64_t>{4, 4}, 2 * kMiB);
    const SlotId slot = tier.allocate(kFirst);
    EXPECT_EQ(tier.ready_event(kFirst, slot), kCompleteEvent);
    tier.release(kFirst, slot, EventId(7));
    EXPECT_EQ(tier.free(kFirst), 4);
    EXPECT_EQ(tier.allocate(kFirst), slot);
    EXPECT_EQ(tier.ready_event(kFirst, slot), EventId(7));
    tier.release(kFirst, slot, EventId(9));
    tier.reoccupy(kFirst, slot, EventId(7));
    EXPECT_EQ(tier.ready_event(kFirst, slot), EventId(7));
    EXPECT_EQ(tier.used(kFirst), 1);
    tier.set_ready_event(kFirst, slot, kCompleteEvent);
    EXPECT_EQ(tier.ready_event(kFirst, slot), kCompleteEvent);
    EXPECT_THROW(tier.release(kFirst, SlotId(2), kCompleteEvent), LogicError);
    tier.audit();
}

TEST(Tier, CopiesWholeSlotsInEveryPool) {
    const ManagerConfig config = small_config();
    const Layout layout = build_layout(config);
    const auto device = make_device("host");
    Tier tier(*device, layout, std::vector<std::int64_t>{4, 4}, 2 * kMiB);
    std::vector<CopyTask> tasks;
    tier.append_slot_copy(kFirst, SlotId(2), SlotId(1), tasks);
    ASSERT_EQ(tasks.size(), 2u);
    EXPECT_EQ(tasks[0].bytes, 16384);
    EXPECT_EQ(tasks[1].bytes, 512);
    EXPECT_EQ(tasks[0].dst - tasks[0].src, 16384u);
}

TEST(Tier, AFailingDeviceCallLeavesNothingBehind) {
    const ManagerConfig config = small_config();
    const Layout layout = build_layout(config);
    const auto device = SimDevice::create();
    const std::vector<std::int64_t> counts{4, 4};
    for (std::int64_t n = 1; n <= 6; ++n) {  // three pools: reserve and commit each
        device->fail_call(n, SimDevice::Failure::oom);
        EXPECT_THROW(Tier(*device, layout, counts, 2 * kMiB), CuOomError);
        EXPECT_EQ(device.use_count(), 1);  // no arena holds it any more
    }
    const Tier tier(*device, layout, counts, 2 * kMiB);
    EXPECT_EQ(tier.mapped_bytes(), 3 * 2 * kMiB);
}

TEST(Tier, PlansTenTebibytesVirtually) {
    const ManagerConfig config = gpt_oss_120b(std::int64_t{10} << 40);
    const Layout layout = build_layout(config);
    const auto device = make_device("virtual");
    const PoolPlan plan = plan_pools(layout, config, device->granularity());
    Tier tier(*device, layout, plan.counts, plan.grain);
    EXPECT_EQ(tier.mapped_bytes(), std::int64_t{10} << 40);
    EXPECT_EQ(tier.allocate(kFirst), SlotId(0));
}

// B182: one slot either side of where 32-bit products wrap.
TEST(Pool, AddressesAre64BitProducts) {
    const auto device = make_device("virtual");
    struct Pair {
        std::int64_t slots;
        std::int64_t bytes;
    };
    for (const Pair pair : {Pair{2066, 1'039'680},
                            {7024, 1'039'680},
                            {1994, 1'077'120},
                            {4564, 1'435'968},
                            {3'728'271, 576},
                            {57'359, 37'440}}) {
        const Pool pool(*device, pair.bytes, pair.slots + 2, 2 * kMiB);
        for (const std::int64_t slot : {pair.slots - 1, pair.slots, pair.slots + 1}) {
            EXPECT_EQ(pool.slot_address(SlotId(static_cast<std::int32_t>(slot))) - pool.address(),
                      static_cast<Address>(slot) * static_cast<Address>(pair.bytes));
        }
    }
    const Pool pool(*device, 1'039'680, 2067, 2 * kMiB);
    EXPECT_EQ(pool.slot_address(SlotId(2066)) - pool.address(), 2'147'978'880u);
    EXPECT_THROW(Pool(*device, std::int64_t{1} << 40, std::int64_t{1} << 31, 2 * kMiB), OutOfMemoryError);
}

}  // namespace
}  // namespace kvpool
