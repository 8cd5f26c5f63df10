"""fork (B192) and interpreter exit (B189)."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest

import kvpool
from tests.support.arms import BACKEND_OF
from tests.support.configs import full, used
from tests.support.engine import Engine

SOURCE = Path(kvpool.__file__).absolute().parents[1]  # where this very package lies, installed or not; links kept

CHILD_CALLS = {
    "create": lambda m, c: m.create_kv_cache(),
    "resize": lambda m, c: c.resize(96),
    "suspend": lambda m, c: c.suspend(),
    "resume": lambda m, c: c.resume(),
    "stop": lambda m, c: c.stop_committing(),
    "indices": lambda m, c: list(c.get_base_page_indices(0)),
    "snapshot": lambda m, c: m.snapshot(),
    "audit": lambda m, c: m.audit(),
    "statistics": lambda m, c: m.get_storage_statistics(),
    "descs": lambda m, c: m.pool_group_descs,
    "clamp": lambda m, c: m.clamp_max_seq_len_for_mem(1, 64),
    "synchronize": lambda m, c: m.synchronize(),
    "stream": lambda m, c: setattr(c, "cuda_stream", 3),
    "shutdown": lambda m, c: m.shutdown(),
    "close": lambda m, c: c.close(),
}


@pytest.mark.parametrize("device", ["host", "virtual", "sim"])
def test_B192_every_call_in_a_forked_child_is_refused(make, device) -> None:
    manager = make(full(8), device)
    cache = make.open(manager)
    assert cache.resize(64)
    if device == "host":
        engine = Engine(manager)
        engine.write(cache, 1, 0, 64)
    before = manager.snapshot()
    read_end, write_end = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        report = []
        for name, call in CHILD_CALLS.items():
            try:
                call(manager, cache)
            except Exception as error:
                kinds = [k.__name__ for k in type(error).__mro__]
                report.append(f"{name}:{'LogicError' in kinds and 'process' in str(error)}")
            else:
                report.append(f"{name}:no error")
        os.write(write_end, ",".join(report).encode())
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert answer == ",".join(f"{name}:True" for name in CHILD_CALLS)
    assert manager.snapshot() == before
    if device == "host":
        engine.check(cache, 1, 64)
    assert cache.resize(128)
    manager.audit()
    assert used(manager) == [4]


def test_B192_child_that_exits_normally_leaves_the_parent_alone(make) -> None:
    manager = make(full(8), "host")
    cache = make.open(manager)
    assert cache.resize(64)
    engine = Engine(manager)
    engine.write(cache, 2, 0, 64)
    run_python(
        make.arm,
        """
        import os, sys
        cache = manager.create_kv_cache(); cache.stop_committing(); assert cache.resume() and cache.resize(64)
        view = manager.get_buffers(0, "key", "uint8", 1, 64 * 1024)
        view[0] = 7
        pid = os.fork()
        if pid == 0:
            del cache, manager, view   # whatever finalizers there are run here
            sys.exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert (view[0] == 7).all()
        assert cache.resize(96)
        manager.audit()
        cache.close(); manager.shutdown()
        """,
    )
    engine.check(cache, 2, 64)


PRELUDE = """
import warnings; warnings.simplefilter("ignore", DeprecationWarning)
from kvpool.v2 import *
config = KVCacheManagerConfig(32, [GpuCacheTierConfig(16 << 20)],
    [AttentionLayerConfig(0, [BufferConfig("key", 2 << 20)])])
def new(device="host"):
    return KVCacheManager(config, backend=BACKEND, device=device)
manager = new()
"""


def run_python(arm: str, body: str) -> subprocess.CompletedProcess:
    script = f"BACKEND = {BACKEND_OF[arm]!r}\n" + PRELUDE + textwrap.dedent(body)
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


EXITS = {
    "alive in a global": "cache = manager.create_kv_cache(); assert cache.resume() and cache.resize(64)",
    "in a thread-local": """
        import threading
        local = threading.local()
        def work():
            local.manager = new(); local.cache = local.manager.create_kv_cache(); local.cache.resume()
            local.cache.resize(64)
        t = threading.Thread(target=work); t.start(); t.join()
        work()
        """,
    "in a cycle": """
        class Node: pass
        a, b = Node(), Node()
        a.b, b.a, a.manager = b, a, manager
        a.cache = manager.create_kv_cache(); a.cache.id = a
        a.cache.resume(); a.cache.resize(64)
        del a, b, manager
        """,
    "with a live view": """
        view = manager.get_buffers(0, "key", "uint8", 1, 64 * 1024)
        view[0] = 1
        del manager
        """,
    "in a running daemon thread": """
        import threading
        go = threading.Event()
        def work():
            cache = manager.create_kv_cache(); cache.stop_committing(); cache.resume()
            go.set()
            while True:
                cache.resize(64); cache.resize(32)
        threading.Thread(target=work, daemon=True).start()
        go.wait()
        """,
    "every device": """
        keep = [new(d) for d in ("host", "virtual", "sim")]
        for m in keep:
            c = m.create_kv_cache(); c.resume(); c.resize(96); m.step
        """,
    "in an attribute of a module": """
        import sys
        sys.kept_manager = manager
        sys.kept_cache = manager.create_kv_cache(); sys.kept_cache.resume(); sys.kept_cache.resize(64)
        """,
    "half built": """
        try:
            KVCacheManager(KVCacheManagerConfig(32, [GpuCacheTierConfig(1)], config.layers), backend=BACKEND)
        except ValueError:
            pass
        """,
    "atexit shutdown": "import atexit; atexit.register(manager.shutdown)",
}


@pytest.mark.parametrize("name", EXITS)
def test_B189_exit_code_is_zero(arm, name) -> None:
    run_python(arm, EXITS[name])
