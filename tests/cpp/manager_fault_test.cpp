// A failing device call leaves everything as it was, and events order the use of slots that change hands.
#include <functional>
#include <numeric>
#include <string>
#include <tuple>

#include "manager_support.hpp"

namespace kvpool {
namespace {

using namespace testing_managers;
using Tokens = std::vector<Token>;

// A manager with traffic behind it: slots with pending events, foreign streams, scratch, a second beam, rows of a table.
struct World {
    World() : manager(config(), "sim"), table(2, 4, 40) {
        s1 = sim_of(manager).create_stream();
        s2 = sim_of(manager).create_stream();
        a = open_active(manager, true, s1);
        b = open_active(manager, true, s2);
        c = open_active(manager, false, s1);
        beams = open_active(manager, true, s1);
        const CacheHandle gone = open_active(manager, true, s2);
        EXPECT_TRUE(manager.resize(gone, 400, 0));
        EXPECT_TRUE(manager.resize(a, 70, 20));
        EXPECT_TRUE(manager.resize(b, 300, 0));
        manager.set_scratch_enabled(c, false);
        EXPECT_TRUE(manager.resize(c, 200, 0));
        EXPECT_TRUE(manager.resize(c, 200, 180));  // its stale pages are held
        EXPECT_TRUE(manager.resize(beams, 40, 40));
        manager.close(gone);
        batch.add(a, 0, 75, 22);
        batch.add(b, 1, 300, 150);
        static_cast<void>(manager.step(batch.input(table, s2)));
        attached = std::make_shared<Ids>(40, 5);
        manager.attach_buffer(c, 0, 1, *attached, attached);
        idle = open_active(manager, true, s1);  // suspended with scratch blocks: its resume takes slots
        EXPECT_TRUE(manager.resize(idle, 300, 0));
        manager.suspend(idle);
    }

    static ManagerConfig config() {
        ManagerConfig config = mixed(160 * kMiB, false);
        config.layers[1].buffers.pop_back();
        config.scratch_max_rewind_len = 0;
        return config;
    }

    struct Seen {
        ManagerSnapshot snapshot;
        std::vector<Ids> rows;
        Ids attached;
        std::vector<std::optional<StreamId>> streams;
        bool operator==(const Seen&) const = default;
    };
    [[nodiscard]] Seen look() {
        Seen seen{manager.snapshot(), {}, *attached, {}};
        for (std::int64_t group = 0; group < 2; ++group) {
            for (std::int64_t row = 0; row < 4; ++row) {
                seen.rows.push_back(table.row(group, row));
            }
        }
        for (const CacheHandle cache : {a, b, c, beams, idle}) {
            seen.streams.push_back(manager.status(cache) == CacheStatus::closed ? std::nullopt : manager.stream(cache));
        }
        return seen;
    }

    Manager manager;
    Table table;
    StepBatch batch;
    StreamId s1, s2;
    CacheHandle a = 0, b = 0, c = 0, beams = 0, idle = 0;
    std::shared_ptr<Ids> attached;
};

struct Case {
    const char* name;
    std::function<void(World&)> call;
};

class FaultSweep : public ::testing::TestWithParam<Case> {};

TEST_P(FaultSweep, EveryFailingCallChangesNothing) {
    std::int64_t num_calls = 0;
    World::Seen after;
    {
        World world;
        const std::int64_t before = sim_of(world.manager).calls();
        GetParam().call(world);
        num_calls = sim_of(world.manager).calls() - before;
        after = world.look();
    }
    ASSERT_GT(num_calls, 0) << "the case makes no fallible call";
    for (std::int64_t n = 1; n <= num_calls; ++n) {
        for (const SimDevice::Failure kind : {SimDevice::Failure::oom, SimDevice::Failure::cu}) {
            World world;
            const World::Seen before = world.look();
            sim_of(world.manager).fail_call(n, kind);
            if (kind == SimDevice::Failure::oom) {
                EXPECT_THROW(GetParam().call(world), CuOomError);
            } else {
                EXPECT_THROW(GetParam().call(world), CuError);
            }
            EXPECT_EQ(world.look(), before) << "call " << n << " of " << num_calls;
            world.manager.audit();
            GetParam().call(world);  // the same call again does what it does without the failure, slot for slot
            EXPECT_EQ(world.look(), after) << "call " << n << " of " << num_calls;
            world.manager.audit();
        }
    }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, FaultSweep,
    ::testing::Values(Case{"resize_grow", [](World& w) { EXPECT_TRUE(w.manager.resize(w.a, 330, 40)); }},
                      Case{"resize_slide", [](World& w) { EXPECT_TRUE(w.manager.resize(w.b, 420, 290)); }},
                      Case{"resize_shrink", [](World& w) { EXPECT_TRUE(w.manager.resize(w.b, 160, 150)); }},
                      Case{"resize_attached", [](World& w) { EXPECT_TRUE(w.manager.resize(w.c, 500, 200)); }},
                      Case{"set_stream", [](World& w) { w.manager.set_stream(w.a, w.s1); }},
                      Case{"resume_elsewhere", [](World& w) { EXPECT_TRUE(w.manager.resume(w.idle, w.s2)); }},
                      Case{"suspend_scratch",
                           [](World& w) {
                               EXPECT_TRUE(w.manager.scratch_desc(w.b, 1).has_value());
                               w.manager.suspend(w.b);
                           }},
                      Case{"close", [](World& w) { w.manager.close(w.c); }},
                      Case{"stop_committing", [](World& w) { w.manager.stop_committing(w.c); }},
                      Case{"grow_beams", [](World& w) { w.manager.set_beam_width(w.beams, 3); }},
                      Case{"step",
                           [](World& w) {
                               StepBatch batch;
                               batch.add(w.b, 1, 420, 290);
                               batch.add(w.a, 3, 200, 60);
                               batch.add(w.c, 0, 400, 390);
                               const StepOutput output = w.manager.step(batch.input(w.table, w.s2));
                               EXPECT_EQ(std::vector<int>(output.ok.begin(), output.ok.end()),
                                         (std::vector<int>{1, 1, 1}));
                               EXPECT_NE(output.event, kCompleteEvent);
                           }}),
    [](const auto& tested) { return std::string(tested.param.name); });

// Prefixes in the tree, small pools that evict, two streams: committing, taking over, giving back.
struct PrefixWorld {
    explicit PrefixWorld(bool with_state) : manager(config(with_state), "sim"), table(with_state ? 3 : 2, 4, 16) {
        s1 = sim_of(manager).create_stream();
        s2 = sim_of(manager).create_stream();
        std::iota(text.begin(), text.end(), 0);
        for (const StreamId stream : {s1, s2}) {  // work that never ends: nothing is complete at once
            sim_of(manager).enqueue_write(stream, manager.pool(0, 0).slot_address(SlotId(0)), "x");
        }
        finish(0, 100);
        matched = manager.create(prompt(100));
        EXPECT_EQ(manager.lengths(matched).committed, 100);
        equal = begin(0, 40, 130, s1);  // computes the same again
        other = begin(200, 40, 70, s2);
        finish(300, 45);
        finish(350, 45);
    }

    static ManagerConfig config(bool with_state) {
        ManagerConfig config = mixed((with_state ? 192 : 96) * kMiB, with_state);
        return config;
    }
    [[nodiscard]] CreateInput prompt(std::size_t length) const {
        CreateInput input;
        input.ids = TokenSpan(text).first(length);
        input.prompt_length = 100;
        return input;
    }
    // A cache that has committed a part of the text.
    CacheHandle begin(std::size_t first, std::int64_t count, std::int64_t capacity, StreamId stream,
                      bool is_end = false) {
        const CacheHandle handle = manager.create(prompt(0));
        EXPECT_TRUE(manager.resume(handle, stream));
        EXPECT_TRUE(manager.resize(handle, capacity, 0));
        manager.commit(handle, TokenSpan(text).subspan(first, static_cast<std::size_t>(count)), {}, is_end);
        return handle;
    }
    void finish(std::size_t first, std::int64_t count) { manager.close(begin(first, count, count, s2, true)); }

    Tokens text = Tokens(400);
    Manager manager;
    Table table;
    StreamId s1, s2;
    CacheHandle matched = 0, equal = 0, other = 0;
};

struct PrefixCase {
    const char* name;
    std::function<void(PrefixWorld&)> call;
    bool is_silent_with_state = false;  // asks nothing of the device then: the state goes to the tree as it is
};

class PrefixFaultSweep : public ::testing::TestWithParam<std::tuple<PrefixCase, bool>> {};

TEST_P(PrefixFaultSweep, EveryFailingCallChangesNothing) {
    const auto& [tested, with_state] = GetParam();
    std::int64_t num_calls = 0;
    ManagerSnapshot after;
    {
        PrefixWorld world(with_state);
        const std::int64_t before = sim_of(world.manager).calls();
        tested.call(world);
        num_calls = sim_of(world.manager).calls() - before;
        after = world.manager.snapshot();
        world.manager.audit();
    }
    ASSERT_EQ(num_calls > 0, !(with_state && tested.is_silent_with_state));
    for (std::int64_t n = 1; n <= num_calls; ++n) {
        PrefixWorld world(with_state);
        const ManagerSnapshot before = world.manager.snapshot();
        sim_of(world.manager).fail_call(n, SimDevice::Failure::oom);
        EXPECT_THROW(tested.call(world), CuOomError);
        EXPECT_EQ(world.manager.snapshot(), before) << "call " << n << " of " << num_calls;
        world.manager.audit();
        tested.call(world);
        EXPECT_EQ(world.manager.snapshot(), after) << "call " << n << " of " << num_calls;
        world.manager.audit();
    }
}

INSTANTIATE_TEST_SUITE_P(
    Calls, PrefixFaultSweep,
    ::testing::Combine(
        ::testing::Values(
            PrefixCase{"first_resume", [](PrefixWorld& w) { EXPECT_TRUE(w.manager.resume(w.matched, w.s1)); }},
            PrefixCase{"rebase",
                       [](PrefixWorld& w) { w.manager.commit(w.equal, TokenSpan(w.text).subspan(40, 70), {}, false); }},
            PrefixCase{"commit_the_end",
                       [](PrefixWorld& w) { w.manager.commit(w.other, TokenSpan(w.text).subspan(240, 20), {}, true); }},
            PrefixCase{"stop_committing", [](PrefixWorld& w) { w.manager.stop_committing(w.other); }, true},
            PrefixCase{"close", [](PrefixWorld& w) { w.manager.close(w.equal); }},
            PrefixCase{"grow_by_evicting",
                       [](PrefixWorld& w) {
                           // Both attention groups have slots of one size: they share pool group 0.
                           const SlotStatistics group = w.manager.statistics()[0];
                           const std::int64_t blocks = (group.free + group.evictable) / 2;
                           EXPECT_TRUE(w.manager.resize(w.equal, 160 + 32 * blocks, 40));
                       }},
            PrefixCase{"step",
                       [](PrefixWorld& w) {
                           StepBatch batch;
                           batch.add(w.equal, 1, 160, 100);
                           batch.add(w.other, 2, 100, 70);
                           Tokens values(w.text.begin() + 40, w.text.begin() + 100);
                           values.insert(values.end(), w.text.begin() + 240, w.text.begin() + 270);
                           const std::vector<std::int32_t> offsets{0, 60, 90};
                           StepInput input = batch.input(w.table, w.s2);
                           input.token_values = values;
                           input.token_offsets = offsets;
                           const StepOutput output = w.manager.step(input);
                           EXPECT_EQ(std::vector<int>(output.ok.begin(), output.ok.end()), (std::vector<int>{1, 1}));
                       }}),
        ::testing::Bool()),
    [](const auto& tested) {
        return std::string(std::get<0>(tested.param).name) + (std::get<1>(tested.param) ? "_with_state" : "");
    });

// The old owner's write may not land on the new owner's page, however late it runs.
void expect_new_owner_wins(Manager& manager, CacheHandle cache, StreamId stream) {
    const Ids ids = manager.held_page_indices(cache, 0, 0);
    const Pool pool = manager.pool(0, 0);
    SimDevice& sim = sim_of(manager);
    for (const std::int32_t id : ids) {
        sim.enqueue_write(stream, pool.slot_address(SlotId(id)), "new");
    }
    sim.run_all(SimDevice::Order::adverse, 0);
    for (const std::int32_t id : ids) {
        const auto* bytes = reinterpret_cast<const char*>(pool.arena()->data()) + id * pool.slot_bytes();
        EXPECT_EQ(std::string_view(bytes, 3), "new") << "slot " << id;
    }
}

void write_old(Manager& manager, CacheHandle cache, StreamId stream) {
    const Pool pool = manager.pool(0, 0);
    for (const std::int32_t id : manager.held_page_indices(cache, 0, 0)) {
        sim_of(manager).enqueue_write(stream, pool.slot_address(SlotId(id)), "old");
    }
}

TEST(StreamOrder, AReleasedSlotWaitsForItsFormerOwner) {
    Manager manager(one_layer(4), "sim");
    const StreamId first = sim_of(manager).create_stream();
    const StreamId second = sim_of(manager).create_stream();
    const CacheHandle old = open_active(manager, true, first);
    ASSERT_TRUE(manager.resize(old, 128, 0));
    write_old(manager, old, first);
    manager.close(old);
    const CacheHandle young = open_active(manager, true, second);
    ASSERT_TRUE(manager.resize(young, 128, 0));
    expect_new_owner_wins(manager, young, second);
}

TEST(StreamOrder, StepWaitsAndItsEventCoversThePages) {
    Manager manager(one_layer(4), "sim");
    const StreamId first = sim_of(manager).create_stream();
    const StreamId second = sim_of(manager).create_stream();
    const StreamId third = sim_of(manager).create_stream();
    const CacheHandle old = open_active(manager, true, first);
    ASSERT_TRUE(manager.resize(old, 128, 0));
    write_old(manager, old, first);
    manager.close(old);
    const CacheHandle young = open_active(manager, true, second);
    const Table table(1, 1, 4);
    StepBatch batch;
    batch.add(young, 0, 128, 0);
    const StepOutput output = manager.step(batch.input(table, second));
    ASSERT_NE(output.event, kCompleteEvent);
    sim_of(manager).wait(third, output.event);  // an overlapped executor uses the pages elsewhere
    expect_new_owner_wins(manager, young, third);
}

TEST(StreamOrder, AnotherStreamWaitsForTheOldOne) {
    Manager manager(one_layer(4), "sim");
    const StreamId first = sim_of(manager).create_stream();
    const StreamId second = sim_of(manager).create_stream();
    const CacheHandle cache = open_active(manager, true, first);
    ASSERT_TRUE(manager.resize(cache, 128, 0));
    write_old(manager, cache, first);
    manager.set_stream(cache, second);
    expect_new_owner_wins(manager, cache, second);
}

TEST(StreamOrder, StepHandsCachesOver) {
    Manager manager(one_layer(4), "sim");
    const StreamId first = sim_of(manager).create_stream();
    const StreamId second = sim_of(manager).create_stream();
    const CacheHandle cache = open_active(manager, true, first);
    ASSERT_TRUE(manager.resize(cache, 128, 0));
    write_old(manager, cache, first);
    const Table table(1, 1, 4);
    StepBatch batch;
    batch.add(cache, 0, 128, 0);
    static_cast<void>(manager.step(batch.input(table, second)));
    EXPECT_EQ(manager.stream(cache), second);
    expect_new_owner_wins(manager, cache, second);
}

TEST(StreamOrder, BeamsCopyWhatTheStreamHasWritten) {
    Manager manager(one_layer(4), "sim");
    const StreamId stream = sim_of(manager).create_stream();
    const CacheHandle cache = open_active(manager, true, stream);
    ASSERT_TRUE(manager.resize(cache, 40, 40));
    write_old(manager, cache, stream);
    manager.set_beam_width(cache, 2);
    manager.synchronize();
    const Pool pool = manager.pool(0, 0);
    const auto* copy =
        reinterpret_cast<const char*>(pool.arena()->data()) + manager.page_indices(cache, 0, 1)[1] * pool.slot_bytes();
    EXPECT_EQ(std::string_view(copy, 3), "old");
}

}  // namespace
}  // namespace kvpool
