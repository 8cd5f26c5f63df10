"""Tensor views of one buffer over a whole pool: the first axis is the slot id, nothing is copied.

A view holds the pool's memory: it stays valid (and its memory stays mapped) after the manager has been shut down.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.v2._checks import arg_int


@dataclass(frozen=True, slots=True)
class BufferPlace:
    """Where one buffer lies in its pool. Bytes, except ``slots``, ``expansion`` and ``tokens``."""

    name: str
    slots: int
    slot_bytes: int
    offset: int
    page_bytes: int
    """Bytes of one page at the buffer's own tokens per block; ``expansion`` of them make its part of the slot."""
    expansion: int
    tokens: int | None
    """Tokens of one page; None for recurrent state, which has no token axis."""


def make_view(memory: Any, place: BufferPlace, dtype: Any, heads: int, head_dim: int, layout: str) -> Any:
    """A numpy array (numpy dtype) or a torch tensor (torch dtype) over ``memory``, the bytes of the whole pool.

    Shape and strides are those that :meth:`KVCacheManager.get_buffers` documents.
    """
    heads = arg_int("heads", heads, 1)
    head_dim = arg_int("head_dim", head_dim, 1)
    if not isinstance(layout, str):
        raise TypeError(f"layout must be a string, not {type(layout).__name__}")
    if layout not in ("NHD", "HND"):
        raise ArgumentError(f"layout must be 'NHD' or 'HND', not {layout!r}")
    if type(dtype).__module__.partition(".")[0] == "torch":
        return _torch_view(memory, place, dtype, heads, head_dim, layout)
    if dtype is None:
        raise TypeError("dtype must be a numpy or torch dtype, not None")
    try:
        kind = np.dtype(dtype)
    except TypeError:
        legal = "a numpy dtype, or a torch dtype where numpy has none (torch.bfloat16, torch.float8_e4m3fn)"
        raise TypeError(f"dtype {dtype!r} is unknown to numpy; legal: {legal}") from None
    if kind.hasobject or kind.itemsize == 0:
        raise ArgumentError(f"dtype must have a fixed size and hold no objects, not {kind}")
    shape, strides = _geometry(place, kind.itemsize, heads, head_dim, layout)
    return np.ndarray(shape, kind, buffer=memory, offset=place.offset, strides=strides)


def _torch_view(memory: Any, place: BufferPlace, dtype: Any, heads: int, head_dim: int, layout: str) -> Any:
    import torch

    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a numpy or torch dtype, not {type(dtype).__name__}")
    shape, strides = _geometry(place, dtype.itemsize, heads, head_dim, layout)
    if any(position % dtype.itemsize for position in (place.offset, *strides)):
        raise ArgumentError(f"dtype {dtype}: {place.name} does not lie at whole elements of {dtype.itemsize} bytes")
    # through uint8: frombuffer itself does not know every narrow float
    whole = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    return whole.as_strided(shape, [stride // dtype.itemsize for stride in strides], place.offset // dtype.itemsize)


def _geometry(
    place: BufferPlace, itemsize: int, heads: int, head_dim: int, layout: str
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape, and strides in bytes."""
    tokens = 1 if place.tokens is None else place.tokens
    _check_product(place, tokens, itemsize, heads, head_dim)
    split = place.expansion != 1 and layout == "HND"  # in NHD the pages of a slot follow one another token by token
    inner: tuple[int, ...] = (heads, head_dim)
    if place.tokens is not None:
        inner = (heads, tokens, head_dim) if layout == "HND" else (tokens * place.expansion, heads, head_dim)
    strides = [math.prod(inner[axis + 1 :]) * itemsize for axis in range(len(inner))]
    outer: tuple[int, ...] = (place.slots,)
    outer_strides = [place.slot_bytes]
    if split:
        outer += (place.expansion,)
        outer_strides.append(place.page_bytes)
    return outer + inner, (*outer_strides, *strides)


def _check_product(place: BufferPlace, tokens: int, itemsize: int, heads: int, head_dim: int) -> None:
    if tokens * heads * head_dim * itemsize == place.page_bytes:
        return
    page = f"{place.name} has {place.page_bytes} bytes per page"
    if place.tokens is not None:
        page += f" of {tokens} tokens"
    legal, remainder = divmod(place.page_bytes, tokens * itemsize)
    wanted = f"heads * head_dim = {heads} * {head_dim} at {itemsize} bytes an element"
    if remainder:
        raise ArgumentError(f"{page}: no heads * head_dim of {itemsize}-byte elements makes that, {wanted} does not")
    raise ArgumentError(f"{page}: heads * head_dim must be {legal} at {itemsize} bytes an element, not {wanted}")
