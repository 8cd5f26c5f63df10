// Short ways to write configurations in tests of storage.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "kvpool/core/config.hpp"

namespace kvpool::testing_configs {

// A layer with one buffer per size; roles are r0, r1, ...
inline LayerConfig attention(std::int64_t id, const std::vector<std::int64_t>& sizes,
                             std::optional<std::int64_t> window = std::nullopt, std::int64_t sink_tokens = 0) {
    LayerConfig layer;
    layer.layer_id = LayerId(id);
    layer.window = window;
    layer.sink_tokens = sink_tokens;
    for (std::size_t i = 0; i < sizes.size(); ++i) {
        layer.buffers.push_back({"r" + std::to_string(i), sizes[i], std::nullopt});
    }
    return layer;
}

inline LayerConfig ssm(std::int64_t id, std::int64_t bytes) {
    LayerConfig layer = attention(id, {bytes});
    layer.is_ssm = true;
    return layer;
}

// tokens_per_block 32.
inline ManagerConfig config_of(std::vector<LayerConfig> layers, std::int64_t quota = std::int64_t{1} << 30) {
    ManagerConfig config;
    config.tokens_per_block = 32;
    config.gpu_quota = quota;
    config.layers = std::move(layers);
    return config;
}

// GPT-OSS-120B: 36 layers, alternately window 128 and full, K and V of 32 KiB a block each.
inline ManagerConfig gpt_oss_120b(std::int64_t quota) {
    std::vector<LayerConfig> layers;
    for (std::int64_t i = 0; i < 36; ++i) {
        layers.push_back(attention(i, {32768, 32768}, i % 2 == 0 ? std::optional<std::int64_t>(128) : std::nullopt));
    }
    return config_of(std::move(layers), quota);
}

}  // namespace kvpool::testing_configs
