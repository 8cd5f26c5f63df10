// Short ways to build managers and to read them in tests.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "kvpool/core/errors.hpp"
#include "kvpool/device/sim_device.hpp"
#include "kvpool/manager/manager.hpp"
#include "storage_configs.hpp"

namespace kvpool::testing_managers {

inline constexpr std::int64_t kMiB = std::int64_t{1} << 20;
using Ids = std::vector<std::int32_t>;

// One layer whose slots are 2 MiB, so that the quota gives exactly `slots` of them. Blocks of 32 tokens.
inline ManagerConfig one_layer(std::int64_t slots, std::optional<std::int64_t> window = std::nullopt,
                               std::int64_t sink_tokens = 0) {
    ManagerConfig config =
        testing_configs::config_of({testing_configs::attention(0, {2 * kMiB}, window, sink_tokens)}, slots * 2 * kMiB);
    config.max_util_for_resume = 1.0;
    return config;
}

// `layers` windowed layers of K and V, 8 KiB each, with scratch reuse.
inline ManagerConfig scratch_layers(std::int64_t layers, std::int64_t window, std::int64_t rewind, std::int64_t quota) {
    std::vector<LayerConfig> list;
    for (std::int64_t i = 0; i < layers; ++i) {
        list.push_back(testing_configs::attention(i, {8192, 8192}, window));
    }
    ManagerConfig config = testing_configs::config_of(std::move(list), quota);
    config.scratch_max_rewind_len = rewind;
    return config;
}

// Full attention, a window with a sink, and recurrent state; small pools.
inline ManagerConfig mixed(std::int64_t quota, bool with_state) {
    std::vector<LayerConfig> layers = {testing_configs::attention(0, {2 * kMiB}),
                                       testing_configs::attention(1, {kMiB, kMiB}, 48, 32)};
    if (with_state) {
        layers.push_back(testing_configs::ssm(2, 3 * kMiB));
    }
    ManagerConfig config = testing_configs::config_of(std::move(layers), quota);
    config.commit_min_snapshot = with_state;
    config.typical_step = ::kvpool::Batch{std::vector<Request>(8, Request{100, 99}), 0};
    config.max_util_for_resume = 1.0;
    return config;
}

inline CacheHandle open_active(Manager& manager, bool stop = true, std::optional<StreamId> stream = std::nullopt) {
    const CacheHandle handle = manager.create();
    if (stop) {
        manager.stop_committing(handle);
    }
    EXPECT_TRUE(manager.resume(handle, stream));
    return handle;
}

inline std::int64_t used(Manager& manager, std::size_t group = 0) {
    return static_cast<std::int64_t>(manager.snapshot().pool_groups[group].used.size());
}

// A step table of the test's own.
class Table {
public:
    Table(std::int64_t groups, std::int64_t rows, std::int64_t blocks)
        : memory_(std::make_shared<Ids>(static_cast<std::size_t>(groups * rows * blocks), 99)),
          view_{memory_->data(), groups, rows, blocks} {}

    [[nodiscard]] const TableView& view() const { return view_; }
    [[nodiscard]] std::shared_ptr<void> memory() const { return memory_; }
    [[nodiscard]] Ids row(std::int64_t group, std::int64_t row) const {
        const auto* first = view_.data + (group * view_.rows + row) * view_.blocks;
        return {first, first + view_.blocks};
    }

private:
    std::shared_ptr<Ids> memory_;
    TableView view_;
};

struct StepBatch {
    std::vector<CacheHandle> handles;
    Ids rows;
    Ids capacities;
    Ids histories;

    void add(CacheHandle handle, std::int32_t row, std::int32_t capacity, std::int32_t history) {
        handles.push_back(handle);
        rows.push_back(row);
        capacities.push_back(capacity);
        histories.push_back(history);
    }
    [[nodiscard]] StepInput input(const Table& table, std::optional<StreamId> stream = std::nullopt) const {
        return {handles, rows, capacities, histories, table.view(), table.memory(), stream};
    }
};

inline SimDevice& sim_of(Manager& manager) { return dynamic_cast<SimDevice&>(*manager.device()); }

}  // namespace kvpool::testing_managers
