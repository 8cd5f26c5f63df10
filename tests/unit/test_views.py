"""Views of the pools' memory: shapes, aliasing, life time (DESIGN §4)."""

from __future__ import annotations

import gc
import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kvpool.errors import ArgumentError, UnknownBufferError, UnsupportedError
from kvpool.v2 import (
    AttentionLayerConfig,
    BufferConfig,
    GpuCacheTierConfig,
    KVCacheManager,
    KVCacheManagerConfig,
    PageIndexMode,
    SsmLayerConfig,
)

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")
HEADS, DIM, TPB = 2, 64, 32
BYTES = TPB * HEADS * DIM * 2
LAYERS = [
    AttentionLayerConfig(0, [BufferConfig("key", BYTES), BufferConfig("value", BYTES)]),
    AttentionLayerConfig(1, [BufferConfig("key", BYTES // 4, 8), BufferConfig("value", BYTES)], 64),
    SsmLayerConfig(2, [BufferConfig("state", 4096)]),
]


def make(backend: str = "python", device: str = "host") -> KVCacheManager:
    config = KVCacheManagerConfig(TPB, [GpuCacheTierConfig(24 << 20)], LAYERS, commit_min_snapshot=True)
    return KVCacheManager(config, backend=backend, device=device)


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_shapes(backend: str) -> None:
    with make(backend) as manager:
        slots = [group.num_slots for group in manager.pool_group_descs]
        nhd = manager.get_buffers(0, "value", np.float16, HEADS, DIM)
        assert nhd.shape == (slots[0], TPB, HEADS, DIM)
        hnd = manager.get_buffers(0, "value", np.float16, HEADS, DIM, "HND")
        assert hnd.shape == (slots[0], HEADS, TPB, DIM)
        own = manager.get_buffers(1, "key", "float16", HEADS, DIM, layout="NHD")
        assert own.shape == (slots[0], TPB, HEADS, DIM)
        assert manager.get_buffers(1, "key", np.uint16, HEADS, DIM, "HND").shape == (slots[0], 4, HEADS, 8, DIM)
        state = manager.get_buffers(2, "state", np.float32, 8, 128)
        assert state.shape == (slots[-1], 8, 128)
        assert nhd.dtype == np.float16
        assert nhd.flags.writeable


def test_first_axis_is_the_slot_id(backend: str) -> None:
    """Element 0 of slot s, kernel page e lies where base + stride · index says."""
    with make(backend) as manager:
        for layer, role in manager.all_buffer_ids:
            stride = manager.get_page_stride(layer, role)
            convert = manager.get_page_index_converter(layer, role)
            tokens = 1 if layer == 2 else TPB // convert.expansion
            view = manager.get_buffers(layer, role, np.uint8, 1, stride // tokens, "HND")
            base = manager.get_mem_pool_base_address(layer, role, PageIndexMode.PER_LAYER)
            for slot in (0, 1, view.shape[0] - 1):
                pages = [view[slot, e] for e in range(convert.expansion)] if convert.expansion > 1 else [view[slot]]
                indices = convert([slot], PageIndexMode.PER_LAYER)
                assert [address(page) for page in pages] == [base + stride * index for index in indices]


def test_buffers_do_not_overlap(backend: str) -> None:
    with make(backend) as manager:
        for layer in (0, 1):  # groups of one pool group share slots, so one layer at a time
            views = {role: manager.get_buffers(layer, role, np.uint16, HEADS, DIM) for role in ("key", "value")}
            for number, view in enumerate(views.values(), 1):
                view[...] = number
            for number, view in enumerate(views.values(), 1):
                assert (view == number).all()


def test_one_memory(backend: str) -> None:
    with make(backend) as manager:
        first = manager.get_buffers(0, "key", np.float16, HEADS, DIM)
        again = manager.get_buffers(0, "key", np.float16, HEADS, DIM, "HND")
        first[3] = np.arange(TPB * HEADS * DIM).reshape(TPB, HEADS, DIM) % 97
        assert (again[3].reshape(-1) == first[3].reshape(-1)).all()
        assert np.shares_memory(first, again)


def test_views_outlive_the_manager(backend: str) -> None:
    manager = make(backend)
    view = manager.get_buffers(0, "key", np.int16, HEADS, DIM)
    view[...] = 7
    manager.shutdown()
    del manager
    gc.collect()
    assert (view == 7).all()
    view[-1] = 8
    assert view[-1].min() == 8


def test_dlpack(backend: str) -> None:
    with make(backend) as manager:
        view = manager.get_buffers(0, "key", np.float16, HEADS, DIM)
        twin = np.from_dlpack(view)
        view[5] = 3
        assert (twin[5] == 3).all()


@pytest.mark.parametrize(
    ("role", "heads", "dim", "text"),
    [
        ("key", HEADS, DIM + 1, r"8192 bytes per page of 32 tokens: heads \* head_dim must be 128 .* not .*2 \* 65"),
        ("key", 1, DIM, "must be 128"),
        ("key", 4, DIM, "must be 128"),
    ],
)
def test_sizes_must_match(backend: str, role: str, heads: int, dim: int, text: str) -> None:
    with make(backend) as manager:
        with pytest.raises(ArgumentError, match=text) as caught:
            manager.get_buffers(0, role, np.float16, heads, dim)
        assert "layer 0" in str(caught.value)
        assert "'key'" in str(caught.value)


def test_arguments(backend: str) -> None:
    with make(backend) as manager:
        with pytest.raises(TypeError, match="layout"):
            manager.get_buffers(0, "key", np.float16, HEADS, DIM, None)
        for layout in ("nhd", "DHN"):
            with pytest.raises(ArgumentError, match="'NHD' or 'HND'"):
                manager.get_buffers(0, "key", np.float16, HEADS, DIM, layout)
        for heads, dim in ((0, DIM), (HEADS, 0), (-1, DIM)):
            with pytest.raises(ArgumentError):
                manager.get_buffers(0, "key", np.float16, heads, dim)
        for heads, dim in ((2.0, DIM), (True, DIM), ("2", DIM)):
            with pytest.raises(TypeError):
                manager.get_buffers(0, "key", np.float16, heads, dim)
        for dtype in (None, "no such type"):
            with pytest.raises(TypeError):
                manager.get_buffers(0, "key", dtype, HEADS, DIM)
        with pytest.raises(ArgumentError, match="objects"):
            manager.get_buffers(0, "key", object, HEADS, DIM)
        for layer, role in ((0, "state"), (9, "key")):
            with pytest.raises(UnknownBufferError):
                manager.get_buffers(layer, role, np.float16, HEADS, DIM)


def test_virtual_has_no_bytes(backend: str) -> None:
    with make(backend, "virtual") as manager, pytest.raises(UnsupportedError, match="virtual"):
        manager.get_buffers(0, "key", np.float16, HEADS, DIM)


@needs_torch
@pytest.mark.parametrize("name", ["float16", "bfloat16", "int16"])
def test_torch(backend: str, name: str) -> None:
    import torch

    manager = make(backend)
    plain = manager.get_buffers(0, "value", np.int16, HEADS, DIM)
    tensor = manager.get_buffers(0, "value", getattr(torch, name), HEADS, DIM)
    assert tuple(tensor.shape) == plain.shape
    assert tensor.data_ptr() == address(plain)
    assert [s * 2 for s in tensor.stride()] == list(plain.strides)
    tensor[4].fill_(2)
    assert (plain[4] == plain[4, 0, 0, 0]).all()
    assert plain[4, 0, 0, 0] == torch.tensor(2, dtype=getattr(torch, name)).view(torch.int16).item()
    hnd = manager.get_buffers(1, "key", getattr(torch, name), HEADS, DIM, "HND")
    assert tuple(hnd.shape) == (plain.shape[0], 4, HEADS, 8, DIM)
    twin = torch.from_dlpack(tensor)
    twin[6].fill_(1)
    assert (tensor[6] == 1).all()
    manager.shutdown()
    del manager, plain, twin
    gc.collect()
    assert (tensor[6] == 1).all()


@needs_torch
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_torch_fp8(backend: str, name: str) -> None:
    import torch

    with make(backend) as manager:
        tensor = manager.get_buffers(0, "key", getattr(torch, name), 2 * HEADS, DIM)
        tensor[1].copy_(torch.full((TPB, 2 * HEADS, DIM), 1.5))
        assert (tensor[1].to(torch.float32) == 1.5).all()
        assert (manager.get_buffers(0, "key", np.uint8, 2 * HEADS, DIM)[1] != 0).all()
        with pytest.raises(ArgumentError, match="must be 256 at 1 bytes"):
            manager.get_buffers(0, "key", getattr(torch, name), HEADS, DIM)


def test_torch_is_loaded_only_when_asked_for(backend: str) -> None:
    code = (
        "import sys, numpy; from tests.unit.test_views import *\n"
        f"m = make({backend!r}); m.get_buffers(0, 'key', numpy.float16, 2, 64); m.shutdown()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_names_that_numpy_lacks_point_to_torch(backend: str) -> None:
    with make(backend) as manager, pytest.raises(TypeError, match=r"torch\.bfloat16"):
        manager.get_buffers(0, "key", "bfloat16", HEADS, DIM)
