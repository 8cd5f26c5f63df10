"""Smoke test of an installed kvpool: argument = the backends that must exist; every other one must say why it does not."""

import subprocess
import sys
import sysconfig
from pathlib import Path

import kvpool

expected = set(sys.argv[1:])
assert "site-packages" in (kvpool.__file__ or ""), f"not the installed package: {kvpool.__file__}"
for optional in ("torch", "cupy", "cuda"):
    assert optional not in sys.modules, f"import kvpool loads {optional}"

from kvpool import v2  # noqa: E402

config = v2.KVCacheManagerConfig(
    tokens_per_block=32,
    cache_tiers=[v2.GpuCacheTierConfig(quota=64 << 20)],
    layers=[
        v2.AttentionLayerConfig(
            layer_id=layer,
            buffers=[v2.BufferConfig(role=v2.DataRole(role), size=4096) for role in ("key", "value")],
            sliding_window_size=None if layer % 2 else 128,
        )
        for layer in range(4)
    ],
)
for backend in ("cpp", "python"):
    try:
        manager = v2.KVCacheManager(config, backend=backend, device="virtual")
    except ImportError as error:
        assert backend not in expected, error
        assert "KVPOOL_NATIVE" in str(error), f"no remedy in: {error}"
        continue
    assert backend in expected, f"{backend} exists although it should not"
    assert manager.backend == backend
    cache = manager.create_kv_cache()
    assert cache.resume(None)
    assert cache.resize(1000, 500)
    cache.close()
    manager.shutdown()

script = Path(sysconfig.get_path("scripts")) / "kvpool"
subprocess.run([script, "doctor"], check=True)
subprocess.run([script, "replay", "--limit", "4"], check=True)
print(f"smoke test: {', '.join(sorted(expected))} ok, version {kvpool.__version__}")
