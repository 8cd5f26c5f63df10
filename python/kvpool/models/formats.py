"""Element types of cached tensors and the bytes that a number of elements takes in each.

Sources: bfloat16, float16, float32 and fp8 (e4m3) are 2, 2, 4 and 1 bytes.  nvfp4 packs two 4-bit elements in a byte and
adds one fp8 scale byte for every 16 elements (NVIDIA Blackwell NVFP4), which is a tensor, and so a buffer, of its own.
"""

from __future__ import annotations

from kvpool.errors import ConfigError

__all__ = [
    "DTYPES",
    "check_dtype",
    "element_bytes",
    "has_block_scale",
    "index_key_bytes",
    "packed_bytes",
    "scale_bytes",
]

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
_ALIASES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp8_e4m3": "fp8", "float8_e4m3fn": "fp8"}

DTYPES = (*_BYTES, "nvfp4")
"""Legal values of ``kv_dtype``."""

NVFP4_BLOCK = 16
"""Elements that share one scale byte."""

INDEX_SCALE_BLOCK = 128
"""Elements of an fp8 index key that share one float32 scale (DeepSeek-V3.2: 128 + 4 = 132 bytes)."""


def check_dtype(field: str, dtype: str, *, packed: bool = True) -> str:
    """The canonical name of ``dtype``; ``packed=False`` refuses nvfp4. ConfigError names the legal ones."""
    if not isinstance(dtype, str):
        raise TypeError(f"{field} must be a string, not {type(dtype).__name__}")
    name = _ALIASES.get(dtype, dtype)
    legal = DTYPES if packed else tuple(_BYTES)
    if name not in legal:
        raise ConfigError(f"{field}={dtype!r} is unknown; legal: {', '.join(legal)}")
    return name


def element_bytes(dtype: str) -> int:
    """Bytes of one element of a type that is not packed."""
    return _BYTES[dtype]


def has_block_scale(dtype: str) -> bool:
    """Whether tensors of this type need a second tensor of scales."""
    return dtype == "nvfp4"


def packed_bytes(elements: int, dtype: str) -> int:
    """Bytes of ``elements`` elements without their scales. ConfigError when they do not fill nvfp4 blocks."""
    if not has_block_scale(dtype):
        return elements * _BYTES[dtype]
    if elements % NVFP4_BLOCK:
        raise ConfigError(f"nvfp4 needs a multiple of {NVFP4_BLOCK} elements per token and tensor, got {elements}")
    return elements // 2


def scale_bytes(elements: int) -> int:
    """Bytes of the nvfp4 scales of ``elements`` elements."""
    return elements // NVFP4_BLOCK


def index_key_bytes(elements: int, dtype: str) -> int:
    """Bytes of one index key: as ``dtype``, but fp8 with its float32 scales whenever the cache is fp8 or nvfp4."""
    if dtype in ("fp8", "nvfp4"):
        return elements + 4 * -(-elements // INDEX_SCALE_BLOCK)
    return elements * _BYTES[dtype]
