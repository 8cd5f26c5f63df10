#include "kvpool/storage/tier.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <utility>
#include <vector>

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
    Journal journal;
    const PoolPlan plan = plan_pools(layout, config, device->granularity());
    Tier tier(*device, journal, layout, plan.counts, plan.grain);
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

using ReadySet = std::vector<std::pair<StreamId, EventId>>;

ReadySet ready_set(const Tier& tier, SlotId slot) {
    ReadySet set;
    tier.append_ready_set(kFirst, slot, set);
    std::sort(set.begin(), set.end());
    return set;
}

std::vector<EventId> waits(const Tier& tier, StreamId stream) {
    std::vector<EventId> events;
    tier.events_to_wait_for(stream, events);
    return events;
}

TEST(Tier, SlotsCarryTheEventsOfEveryStream) {
    const ManagerConfig config = small_config();
    const Layout layout = build_layout(config);
    const auto device = make_device("virtual");
    Journal journal;
    Tier tier(*device, journal, layout, std::vector<std::int64_t>{4, 4}, 2 * kMiB);
    const StreamId one{1};
    const StreamId two{2};

    journal.begin();
    const SlotId slot = tier.allocate(kFirst);
    EXPECT_TRUE(tier.has_handed_out());
    EXPECT_FALSE(tier.has_finished());
    tier.settle(one, EventId(5));
    journal.commit();
    EXPECT_TRUE(ready_set(tier, slot).empty());

    for (const auto& [stream, event] : ReadySet{{one, EventId(7)}, {two, EventId(8)}, {one, EventId(9)}}) {
        journal.begin();
        EXPECT_FALSE(tier.has_handed_out());  // that was another call
        tier.finish(kFirst, slot);
        EXPECT_TRUE(tier.has_finished());
        tier.settle(stream, event);
        journal.commit();
    }
    const ReadySet both{{one, EventId(9)}, {two, EventId(8)}};
    EXPECT_EQ(ready_set(tier, slot), both);

    journal.begin();
    tier.borrow(kFirst, slot);
    EXPECT_EQ(waits(tier, one), (std::vector<EventId>{EventId(8)}));  // its own work is ordered anyway
    EXPECT_EQ(waits(tier, StreamId(3)), (std::vector<EventId>{EventId(8), EventId(9)}));
    tier.settle(one, kCompleteEvent);
    journal.commit();
    EXPECT_EQ(ready_set(tier, slot), both);

    journal.begin();
    tier.free_slot(kFirst, slot);
    EXPECT_EQ(tier.free(kFirst), 4);
    EXPECT_EQ(tier.allocate(kFirst), slot);
    EXPECT_EQ(waits(tier, StreamId(3)), (std::vector<EventId>{EventId(8), EventId(9)}));
    tier.settle(StreamId(3), EventId(10));
    EXPECT_TRUE(ready_set(tier, slot).empty());
    journal.roll_back();  // the whole call, settled or not
    EXPECT_EQ(ready_set(tier, slot), both);
    EXPECT_EQ(tier.used(kFirst), 1);
    EXPECT_THROW(tier.free_slot(kFirst, SlotId(2)), LogicError);
    tier.audit();
}

TEST(Tier, NotesAreTakenBackWithTheirSavepoint) {
    const ManagerConfig config = small_config();
    const Layout layout = build_layout(config);
    const auto device = make_device("virtual");
    Journal journal;
    Tier tier(*device, journal, layout, std::vector<std::int64_t>{4, 4}, 2 * kMiB);
    journal.begin();
    const SlotId first = tier.allocate(kFirst);
    const Journal::Savepoint savepoint = journal.savepoint();
    const SlotId second = tier.allocate(kFirst);
    tier.finish(kFirst, second);
    tier.free_slot(kFirst, first);
    journal.roll_back_to(savepoint);
    EXPECT_FALSE(tier.has_finished());
    EXPECT_TRUE(tier.has_handed_out());
    EXPECT_EQ(tier.used(kFirst), 1);
    EXPECT_EQ(tier.allocate(kFirst), second);
    tier.settle(kOwnStream, EventId(3));
    EXPECT_TRUE(ready_set(tier, second).empty());
    journal.commit();
    tier.audit();
}

TEST(Tier, ALargeReadySetLosesWhatIsComplete) {
    const ManagerConfig config = small_config();
    const Layout layout = build_layout(config);
    const auto device = SimDevice::create();
    Journal journal;
    Tier tier(*device, journal, layout, std::vector<std::int64_t>{4, 4}, 2 * kMiB);
    journal.begin();
    const SlotId slot = tier.allocate(kFirst);
    tier.settle(kOwnStream, kCompleteEvent);
    journal.commit();
    ReadySet expected;
    for (std::int64_t i = 1; i <= 12; ++i) {
        const StreamId stream = device->create_stream();
        const EventId event = device->record(stream);
        if (i <= 8) {
            device->synchronize_event(event);  // complete, and still stored
        } else {
            expected.emplace_back(stream, event);
        }
        journal.begin();
        tier.finish(kFirst, slot);
        tier.settle(stream, event);
        journal.commit();
        EXPECT_EQ(ready_set(tier, slot).size(), static_cast<std::size_t>(i <= 8 ? i : i - 8));
    }
    EXPECT_EQ(ready_set(tier, slot), expected);
    tier.audit();
}

TEST(Tier, CopiesWholeSlotsInEveryPool) {
    const ManagerConfig config = small_config();
    const Layout layout = build_layout(config);
    const auto device = make_device("host");
    Journal journal;
    Tier tier(*device, journal, layout, std::vector<std::int64_t>{4, 4}, 2 * kMiB);
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
    Journal journal;
    const std::vector<std::int64_t> counts{4, 4};
    for (std::int64_t n = 1; n <= 6; ++n) {  // three pools: reserve and commit each
        device->fail_call(n, SimDevice::Failure::oom);
        EXPECT_THROW(Tier(*device, journal, layout, counts, 2 * kMiB), CuOomError);
        EXPECT_EQ(device.use_count(), 1);  // no arena holds it any more
    }
    const Tier tier(*device, journal, layout, counts, 2 * kMiB);
    EXPECT_EQ(tier.mapped_bytes(), 3 * 2 * kMiB);
}

TEST(Tier, PlansTenTebibytesVirtually) {
    const ManagerConfig config = gpt_oss_120b(std::int64_t{10} << 40);
    const Layout layout = build_layout(config);
    const auto device = make_device("virtual");
    Journal journal;
    const PoolPlan plan = plan_pools(layout, config, device->granularity());
    Tier tier(*device, journal, layout, plan.counts, plan.grain);
    journal.begin();
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
