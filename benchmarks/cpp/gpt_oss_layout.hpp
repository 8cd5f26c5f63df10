// The layout of GPT-OSS-120B, for the programs that count instructions.
#pragma once

#include <cstdint>
#include <optional>

#include "kvpool/core/config.hpp"

namespace kvpool_benchmarks {

constexpr std::int64_t kBlock = 32;  // tokens

// A configuration with room for `slots` slots: 36 layers, every other one with a window of 128.
inline kvpool::ManagerConfig gpt_oss_120b(std::int64_t slots) {
    constexpr std::int64_t kLayers = 36;
    constexpr std::int64_t kPageBytes = kBlock * 8 * 64 * 2;
    constexpr std::int64_t kSlotBytes = kLayers / 2 * 2 * kPageBytes;
    constexpr std::int64_t kGrain = std::int64_t{32} << 20;
    kvpool::ManagerConfig config;
    config.tokens_per_block = kBlock;
    config.gpu_quota = (slots * kSlotBytes + kGrain - 1) / kGrain * kGrain;
    for (std::int64_t i = 0; i < kLayers; ++i) {
        kvpool::LayerConfig layer;
        layer.layer_id = kvpool::LayerId(i);
        if (i % 2 == 0) {
            layer.window = 128;
        }
        layer.buffers = {{"key", kPageBytes, std::nullopt}, {"value", kPageBytes, std::nullopt}};
        config.layers.push_back(layer);
    }
    return config;
}

}  // namespace kvpool_benchmarks
