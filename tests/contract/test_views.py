"""Arrays and tensors over the pools: they alias the memory, have the documented shapes and keep it alive."""

from __future__ import annotations

import ctypes
import gc

import numpy as np
import pytest

from kvpool.errors import UnsupportedError
from kvpool.v2 import AttentionLayerConfig, BufferConfig, PageIndexMode
from tests.support.arms import build
from tests.support.configs import MIB, config, ssm

HEADS, DIM = 4, 64
SIZE = 32 * HEADS * DIM * 2


def layout_config():
    layers = [
        AttentionLayerConfig(
            i, [BufferConfig("key", SIZE), BufferConfig("value", SIZE), BufferConfig("scale", 32 * 16)]
        )
        for i in range(3)
    ]
    return config(layers, 8 * MIB)


@pytest.mark.parametrize("device", ["host", "sim"])
def test_numpy_nhd_and_hnd(make, device) -> None:
    manager = make(layout_config(), device)
    count = manager.pool_group_descs[0].num_slots
    nhd = manager.get_buffers(1, "value", np.float16, HEADS, DIM)
    hnd = manager.get_buffers(1, "value", np.float16, HEADS, DIM, layout="HND")
    assert nhd.shape == (count, 32, HEADS, DIM)
    assert hnd.shape == (count, HEADS, 32, DIM)
    assert nhd.dtype == np.float16
    assert nhd.flags.writeable
    nhd[3].fill(0)
    nhd[3, 5, 2, 7] = 1.5
    flat = 5 * HEADS * DIM + 2 * DIM + 7
    head, rest = divmod(flat, 32 * DIM)
    assert hnd[3, head, rest // DIM, rest % DIM] == 1.5  # the same bytes, read in the other order
    stride = manager.get_page_stride(1, "value")
    (index,) = manager.get_page_index_converter(1, "value")([3], PageIndexMode.SHARED)
    address = manager.get_mem_pool_base_address(1, "value") + stride * index
    assert nhd[3].__array_interface__["data"][0] == address
    raw = np.frombuffer(ctypes.string_at(address, SIZE), np.float16)
    assert raw[flat] == 1.5
    assert np.count_nonzero(raw) == 1


def test_buffers_do_not_overlap(make) -> None:
    manager = make(layout_config(), "host")
    views = {
        (layer, role): manager.get_buffers(layer, role, np.uint8, 1, width)
        for layer in range(3)
        for role, width in (("key", HEADS * DIM * 2), ("value", HEADS * DIM * 2), ("scale", 16))
    }
    for k, view in enumerate(views.values()):
        view[...] = k + 1
    for k, view in enumerate(views.values()):
        assert (view == k + 1).all()


def test_own_tokens_per_block(make) -> None:
    layer = AttentionLayerConfig(0, [BufferConfig("key", 8 * 2 * 16, 8), BufferConfig("value", 32 * 2 * 16)])
    manager = make(config([layer], 2 * MIB), "host")
    count = manager.pool_group_descs[0].num_slots
    key = manager.get_buffers(0, "key", np.uint8, 2, 16)
    assert key.shape == (count, 32, 2, 16)  # in NHD the pages of a slot follow one another
    assert manager.get_buffers(0, "key", np.uint8, 2, 16, "HND").shape == (count, 4, 2, 8, 16)
    converter = manager.get_page_index_converter(0, "key")
    base = manager.get_mem_pool_base_address(0, "key")
    for i, index in enumerate(converter([7])):
        assert key[7, 8 * i].__array_interface__["data"][0] == base + manager.get_page_stride(0, "key") * index


def test_state_views(make) -> None:
    manager = make(config([ssm(0, 4096)], 2 * MIB), "host")
    assert manager.get_buffers(0, "state", np.float32, 4, 256).shape == (512, 4, 256)


def test_arguments(make) -> None:
    manager = make(layout_config(), "host")
    for args in (
        (1, "value", np.float16, HEADS, DIM + 1),
        (1, "value", np.float16, 0, DIM),
        (1, "value", np.float16, -HEADS, -DIM),
        (1, "value", np.float32, HEADS, DIM),
        (1, "value", np.float16, HEADS, DIM, "DHN"),
    ):
        with pytest.raises(ValueError, match="(?i)head|layout|bytes|dtype"):
            manager.get_buffers(*args)
    with pytest.raises((TypeError, ValueError)):
        manager.get_buffers(1, "value", "no such type", HEADS, DIM)
    with pytest.raises((TypeError, ValueError)):
        manager.get_buffers(1, "value", object, HEADS, DIM)


def test_virtual_has_no_bytes(make) -> None:
    manager = make(layout_config(), "virtual")
    with pytest.raises(UnsupportedError, match="(?i)virtual"):
        manager.get_buffers(1, "value", np.float16, HEADS, DIM)


def test_dlpack(make) -> None:
    manager = make(layout_config(), "host")
    view = manager.get_buffers(0, "key", np.float16, HEADS, DIM)
    other = np.from_dlpack(view)
    assert other.shape == view.shape
    view[2] = 3
    assert (other[2] == 3).all()
    assert other.__array_interface__["data"][0] == view.__array_interface__["data"][0]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_torch(make, layout) -> None:
    torch = pytest.importorskip("torch")
    manager = make(layout_config(), "host")
    count = manager.pool_group_descs[0].num_slots
    plain = manager.get_buffers(2, "key", np.uint16, HEADS, DIM, layout)
    for dtype in (torch.float16, torch.bfloat16):
        tensor = manager.get_buffers(2, "key", dtype, HEADS, DIM, layout)
        assert isinstance(tensor, torch.Tensor)
        assert tensor.dtype == dtype
        assert tuple(tensor.shape) == plain.shape
        assert tensor.shape[0] == count
        assert tensor.data_ptr() == plain.__array_interface__["data"][0]
        tensor[4].fill_(1.0)
        assert (plain[4] == torch.ones(1, dtype=dtype).view(torch.int16).item()).all()
        assert tuple(s * 2 for s in tensor.stride()) == plain.strides
        from_capsule = torch.from_dlpack(tensor)
        assert from_capsule.data_ptr() == tensor.data_ptr()
    eight = manager.get_buffers(2, "key", torch.float8_e4m3fn, HEADS, DIM * 2, layout)
    assert eight.dtype == torch.float8_e4m3fn
    assert eight.data_ptr() == plain.__array_interface__["data"][0]


@pytest.mark.parametrize("kind", ["numpy", "torch", "dlpack"])
def test_a_view_keeps_the_memory(arm, kind) -> None:
    manager = build(arm, layout_config(), "host")
    view = manager.get_buffers(0, "key", np.uint16, HEADS, DIM)
    if kind == "torch":
        torch = pytest.importorskip("torch")
        view = manager.get_buffers(0, "key", torch.int16, HEADS, DIM)
    elif kind == "dlpack":
        view = np.from_dlpack(view)
    view[:4] = 1234
    manager.shutdown()
    del manager
    gc.collect()
    filler = [build(arm, layout_config(), "host") for _ in range(3)]
    for other in filler:
        other.get_buffers(0, "key", np.uint16, HEADS, DIM)[:4] = 9
    assert (view[:4] == 1234).all()
    view[:4] = 5
    for other in filler:
        assert (other.get_buffers(0, "key", np.uint16, HEADS, DIM)[:4] == 9).all()
        other.shutdown()


def test_slices_of_views_keep_the_memory(arm) -> None:
    manager = build(arm, layout_config(), "host")
    part = manager.get_buffers(0, "key", np.uint16, HEADS, DIM)[3, 2:5]
    part[...] = 77
    manager.shutdown()
    del manager
    gc.collect()
    assert (part == 77).all()
