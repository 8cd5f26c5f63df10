#include "kvpool/device/sim_device.hpp"

#include <gtest/gtest.h>

#include <functional>

#include "kvpool/core/errors.hpp"

namespace kvpool {
namespace {

constexpr std::int64_t kMiB = std::int64_t{1} << 20;

class SimDeviceTest : public testing::Test {
protected:
    void SetUp() override { arena->commit(0, 2 * kMiB); }
    [[nodiscard]] std::string memory(std::size_t n) const { return {reinterpret_cast<const char*>(arena->data()), n}; }

    std::shared_ptr<SimDevice> device = SimDevice::create();
    std::shared_ptr<Arena> arena = device->reserve(4 * kMiB);
    Address base = arena->address();
};

TEST_F(SimDeviceTest, NothingRunsUntilItMust) {
    const StreamId s = device->create_stream();
    EXPECT_EQ(s, StreamId(1));
    device->enqueue_write(s, base, "abc");
    const EventId event = device->record(s);
    EXPECT_EQ(event, EventId(1));
    EXPECT_FALSE(device->query(event));
    EXPECT_EQ(device->pending(), 2);
    EXPECT_EQ(memory(3), std::string(3, '\0'));
    device->synchronize_event(event);
    EXPECT_TRUE(device->query(event));
    EXPECT_EQ(memory(3), "abc");
    EXPECT_EQ(device->clock(), 2);
}

TEST_F(SimDeviceTest, SynchronizeRunsExactlyTheDependencies) {
    const StreamId a = device->create_stream();
    const StreamId b = device->create_stream();
    const StreamId c = device->create_stream();
    device->enqueue_write(a, base, "1");
    const EventId first = device->record(a);
    device->enqueue_write(a, base + 1, "2");  // after the event: not needed
    device->enqueue_write(c, base + 2, "3");  // unrelated
    device->wait(b, first);
    device->enqueue_write(b, base + 3, "4");
    const EventId second = device->record(b);
    device->enqueue_write(b, base + 4, "5");
    device->synchronize_event(second);
    EXPECT_EQ(memory(5), (std::string{'1', '\0', '\0', '4', '\0'}));
    EXPECT_EQ(device->pending(), 3);
    device->synchronize();
    EXPECT_EQ(memory(5), "12345");
}

TEST_F(SimDeviceTest, AMissingWaitShows) {
    const StreamId old_owner = device->create_stream();
    const StreamId new_owner = device->create_stream();
    device->enqueue_write(old_owner, base, "old");
    device->enqueue_write(new_owner, base, "new");
    device->run_all(SimDevice::Order::adverse, 0);
    EXPECT_EQ(memory(3), "old");  // the younger stream overtook

    device->enqueue_write(old_owner, base, "old");
    device->wait(new_owner, device->record(old_owner));
    device->enqueue_write(new_owner, base, "new");
    device->run_all(SimDevice::Order::adverse, 0);
    EXPECT_EQ(memory(3), "new");
}

TEST_F(SimDeviceTest, FifoRunsAsQueuedAndSeedsDiffer) {
    device->enqueue_write(StreamId(1), base, "a");
    device->enqueue_write(StreamId(2), base, "b");
    device->run_all(SimDevice::Order::fifo, 0);
    EXPECT_EQ(memory(1), "b");

    std::string seen;
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
        device->enqueue_write(StreamId(1), base, "a");
        device->enqueue_write(StreamId(2), base, "b");
        device->run_all(SimDevice::Order::adverse, seed);
        seen += memory(1);
    }
    EXPECT_NE(seen.find('a'), std::string::npos);
    EXPECT_NE(seen.find('b'), std::string::npos);
}

TEST_F(SimDeviceTest, ReadsSeeTheMomentTheyRun) {
    const StreamId s = device->create_stream();
    device->enqueue_write(s, base, "xy");
    const std::int64_t ticket = device->enqueue_read(s, base, 2);
    device->enqueue_write(s, base, "zz");
    EXPECT_EQ(device->read_result(ticket), "xy");
    EXPECT_EQ(device->pending(), 1);
    EXPECT_THROW((void)device->read_result(ticket), ArgumentError);
    EXPECT_THROW((void)device->read_result(77), ArgumentError);
}

TEST_F(SimDeviceTest, CopyBatchesAreOneOperation) {
    device->enqueue_write(kOwnStream, base, "abcd");
    const std::vector<CopyTask> tasks{{base + 10, base, 2}, {base + 12, base + 2, 2}};
    device->copy(kOwnStream, tasks);
    EXPECT_EQ(device->pending(), 2);
    device->synchronize();
    EXPECT_EQ(memory(14).substr(10), "abcd");
}

TEST_F(SimDeviceTest, UncommittedMemoryIsFoundWhenTheWorkRuns) {
    device->enqueue_write(kOwnStream, base + static_cast<Address>(2 * kMiB) - 1, "ab");  // one byte too far
    device->enqueue_write(kOwnStream, base, "ok");
    EXPECT_THROW(device->synchronize(), CorruptedError);
    device->synchronize();
    EXPECT_EQ(memory(2), "ok");

    device->enqueue_write(kOwnStream, base, "late");
    arena->decommit(0, 2 * kMiB);
    EXPECT_THROW(device->synchronize(), CorruptedError);

    arena->commit(0, 2 * kMiB);
    const std::int64_t ticket = device->enqueue_read(kOwnStream, base, 4);
    arena.reset();
    EXPECT_THROW((void)device->read_result(ticket), CorruptedError);
    EXPECT_THROW((void)device->read_result(ticket), ArgumentError);
    EXPECT_EQ(device->pending(), 0);
}

TEST_F(SimDeviceTest, ACopyThatCanNotRunMovesNothing) {
    device->enqueue_write(kOwnStream, base, "abcd");
    const std::vector<CopyTask> tasks{{base + 10, base, 2}, {base + static_cast<Address>(3 * kMiB), base, 2}};
    device->copy(kOwnStream, tasks);
    EXPECT_THROW(device->synchronize(), CorruptedError);
    EXPECT_EQ(memory(12).substr(10), std::string(2, '\0'));
}

TEST_F(SimDeviceTest, EveryFallibleCallFailsOnRequestAndChangesNothing) {
    const std::vector<CopyTask> tasks{{base, base + 8, 4}};
    const EventId event = device->record(kOwnStream);
    const std::vector<std::function<void()>> calls{
        [&] { (void)device->reserve(kMiB); },       [&] { arena->commit(2 * kMiB, 2 * kMiB); },
        [&] { (void)device->record(StreamId(1)); }, [&] { device->wait(StreamId(1), event); },
        [&] { device->copy(StreamId(1), tasks); },
    };
    for (const auto& call : calls) {
        const std::int64_t pending = device->pending();
        const std::int64_t before = device->calls();
        device->fail_call(1, SimDevice::Failure::oom);
        EXPECT_THROW(call(), CuOomError);
        device->fail_call(1, SimDevice::Failure::cu);
        EXPECT_THROW(call(), CuError);
        EXPECT_EQ(device->pending(), pending);
        EXPECT_EQ(arena->committed_bytes(), 2 * kMiB);
        EXPECT_EQ(device->calls(), before + 2);
    }
    for (const auto& call : calls) {
        call();  // once only: they work again
    }
    EXPECT_EQ(device->record(kOwnStream), EventId(3));  // failed records used up no number
}

TEST_F(SimDeviceTest, FailCallCountsFromNow) {
    device->fail_call(3, SimDevice::Failure::oom);
    (void)device->record(kOwnStream);
    (void)device->record(kOwnStream);
    EXPECT_THROW((void)device->record(kOwnStream), CuOomError);
    device->fail_call(1, SimDevice::Failure::oom);
    device->fail_call(std::nullopt, SimDevice::Failure::oom);
    (void)device->record(kOwnStream);
    EXPECT_THROW(device->fail_call(0, SimDevice::Failure::oom), ArgumentError);
}

TEST_F(SimDeviceTest, WaitsAreChecked) {
    const std::int64_t before = device->calls();
    device->wait(StreamId(1), kCompleteEvent);
    EXPECT_EQ(device->calls(), before);
    EXPECT_EQ(device->pending(), 0);
    EXPECT_THROW(device->wait(StreamId(1), EventId(9)), LogicError);
}

TEST_F(SimDeviceTest, LongChainsDoNotRecurse) {
    EventId last = kCompleteEvent;
    for (std::int64_t i = 0; i < 20'000; ++i) {
        device->wait(StreamId(i % 7), last);
        last = device->record(StreamId(i % 7));
    }
    device->synchronize_event(last);
    EXPECT_EQ(device->pending(), 0);
}

}  // namespace
}  // namespace kvpool
