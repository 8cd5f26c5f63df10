"""The layouts that the benchmarks measure, written out so that a reader sees every number."""

from __future__ import annotations

from kvpool.v2 import AttentionLayerConfig, BufferConfig, GpuCacheTierConfig, KVCacheManagerConfig

GPT_OSS_LAYERS = 36
GPT_OSS_WINDOW = 128
GPT_OSS_TOKEN_BYTES = 8 * 64 * 2  # KV heads x head dim x bf16: one of K and V, one layer


def gpt_oss_120b(tokens_per_block: int, slots: int) -> KVCacheManagerConfig:
    """36 layers, alternately window 128 and full, 8 KV heads of 64 in bf16; `slots` slots in their one pool group."""
    page = tokens_per_block * GPT_OSS_TOKEN_BYTES
    buffers = [BufferConfig("key", page), BufferConfig("value", page)]
    layers = [
        AttentionLayerConfig(i, list(buffers), GPT_OSS_WINDOW if i % 2 == 0 else None) for i in range(GPT_OSS_LAYERS)
    ]
    slot_bytes = GPT_OSS_LAYERS // 2 * 2 * page
    grain = 32 * 2**20
    quota = -(-slots * slot_bytes // grain) * grain
    return KVCacheManagerConfig(tokens_per_block, [GpuCacheTierConfig(quota)], layers)
