"""What one model layer caches, before and after tensor parallelism.

Every kind answers two questions: :meth:`parts` (which tensors, of how many bytes, kept for which tokens) and :meth:`shard`
(the same layer on one of ``tp`` ranks).  All sizes anywhere in :mod:`kvpool.models` are derived from ``parts``, after
sharding, never before: the ratio between the layers of a model changes with the number of ranks.

Words: entry = what is stored for ``ratio`` consecutive tokens (1 for everything but compressed attention); window = the
last tokens that stay live, the current one included (GPT-OSS: 128 = 127 earlier + self).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar, TypeAlias

from kvpool.errors import ConfigError
from kvpool.models import formats

__all__ = [
    "ROLES",
    "AttentionLayer",
    "CachePart",
    "CompressedLayer",
    "Layer",
    "MlaLayer",
    "NoCacheLayer",
    "StateLayer",
    "Storage",
    "Tensor",
    "check_int",
]

ROLES = {
    "key": "keys; with MLA the latent and rope parts; with shared k = v the one stored tensor",
    "value": "values",
    "key_block_scale": "nvfp4 scales of the keys",
    "value_block_scale": "nvfp4 scales of the values",
    "index_key": "keys of a sparse-attention indexer",
    "conv_state": "the last conv_width - 1 inputs of a causal convolution",
    "ssm_state": "the recurrent state",
}
"""Every role that a preset's buffers can have."""


def check_int(field: str, value: object, minimum: int) -> int:
    """``value`` when it is an integer of at least ``minimum``; TypeError or ConfigError naming ``field`` otherwise."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{field} must be an integer, not {type(value).__name__}")
    if value < minimum:
        raise ConfigError(f"{field}={value} must be at least {minimum}")
    return value


@dataclass(frozen=True, slots=True)
class Storage:
    """How tensors are stored. Types as in :data:`kvpool.models.formats.DTYPES`; None: the layer's own."""

    kv_dtype: str = "bfloat16"
    state_dtype: str | None = None
    conv_dtype: str | None = None
    store_shared_kv: bool = False
    """True: layers whose keys are their values store one tensor; False: both, as the engines do."""
    store_index_keys: bool | None = None
    """None: index keys of latent attention only, as the geometry table counts; True: all; False: none."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "kv_dtype", formats.check_dtype("kv_dtype", self.kv_dtype))
        for field in ("state_dtype", "conv_dtype"):
            value = getattr(self, field)
            if value is not None:
                object.__setattr__(self, field, formats.check_dtype(field, value, packed=False))


@dataclass(frozen=True, slots=True)
class Tensor:
    """One buffer: ``entry_bytes`` per entry (per sequence for a state)."""

    role: str
    entry_bytes: int


@dataclass(frozen=True, slots=True)
class CachePart:
    """Tensors of one layer that live and die together: one layer of the cache configuration."""

    name: str  # "kv", "window", "compressed" or "state"
    tensors: tuple[Tensor, ...]
    window: int | None = None  # tokens that stay live, None: all
    ratio: int = 1  # tokens per entry

    @property
    def is_state(self) -> bool:
        """Whether there is one copy per sequence and not one entry per token."""
        return self.name == "state"

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry of all tensors."""
        return sum(t.entry_bytes for t in self.tensors)


def _stored(role: str, elements: int, dtype: str) -> tuple[Tensor, ...]:
    data = Tensor(role, formats.packed_bytes(elements, dtype))
    if not formats.has_block_scale(dtype):
        return (data,)
    return data, Tensor(f"{role}_block_scale", formats.scale_bytes(elements))


def _index_key(elements: int, storage: Storage, default: bool) -> tuple[Tensor, ...]:
    wanted = default if storage.store_index_keys is None else storage.store_index_keys
    if not (elements and wanted):
        return ()
    return (Tensor("index_key", formats.index_key_bytes(elements, storage.kv_dtype)),)


def _split(what: str, heads: int, tp: int) -> int:
    """Heads of one rank: an equal share, or one replicated head when there are fewer heads than ranks."""
    if heads >= tp:
        if heads % tp:
            raise ConfigError(f"{heads} {what} can not be divided over tp={tp} ranks")
        return heads // tp
    if tp % heads:
        raise ConfigError(f"{heads} {what} can not be replicated evenly over tp={tp} ranks")
    return 1


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Attention with keys and values per head: full, sliding (``window``) or chunked (``chunk``), lengths in tokens.

    A chunked layer (Llama-4) sees the tokens since the last multiple of ``chunk``; it is kept as a trailing window of
    that length, which holds too much on average but never too little.
    """

    kv_heads: int
    head_dim: int  # elements of a key
    v_head_dim: int | None = None  # elements of a value; None: as a key
    window: int | None = None
    chunk: int | None = None
    shared_kv: bool = False  # keys are values (attention_k_eq_v)
    index_dim: int = 0  # elements of a block-sparse indexer's key per token, replicated on every rank; 0: none
    has_cache: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for field in ("kv_heads", "head_dim"):
            check_int(field, getattr(self, field), 1)
        for field in ("v_head_dim", "window", "chunk"):
            if getattr(self, field) is not None:
                check_int(field, getattr(self, field), 1)
        check_int("index_dim", self.index_dim, 0)
        if self.window is not None and self.chunk is not None:
            raise ConfigError("an attention layer has a window or a chunk, not both")
        if self.shared_kv and self.v_head_dim not in (None, self.head_dim):
            raise ConfigError("shared_kv needs v_head_dim equal to head_dim")

    @property
    def kind(self) -> str:
        """``full``, ``sliding`` or ``chunked``."""
        return "sliding" if self.window is not None else "chunked" if self.chunk is not None else "full"

    def parts(self, storage: Storage) -> tuple[CachePart, ...]:
        """One part: key and value (key alone where one shared tensor is stored), scales and index keys."""
        key = _stored("key", self.kv_heads * self.head_dim, storage.kv_dtype)
        value = _stored("value", self.kv_heads * (self.v_head_dim or self.head_dim), storage.kv_dtype)
        if self.shared_kv and storage.store_shared_kv:
            value = ()
        tensors = (key[0], *value[:1], *key[1:], *value[1:], *_index_key(self.index_dim, storage, default=False))
        return (CachePart("kv", tensors, self.window or self.chunk),)

    def shard(self, tp: int) -> AttentionLayer:
        """KV heads are divided; fewer heads than ranks are replicated, one head a rank."""
        return replace(self, kv_heads=_split("KV heads", self.kv_heads, tp))


@dataclass(frozen=True, slots=True)
class MlaLayer:
    """Multi-head latent attention: one latent and one rope key per token, the same on every rank."""

    latent_dim: int
    rope_dim: int
    index_dim: int = 0  # elements of a lightning indexer's key (DeepSeek-V3.2, GLM-5); 0: none
    has_cache: ClassVar[bool] = True
    kind: ClassVar[str] = "mla"

    def __post_init__(self) -> None:
        check_int("latent_dim", self.latent_dim, 1)
        check_int("rope_dim", self.rope_dim, 0)
        check_int("index_dim", self.index_dim, 0)

    def parts(self, storage: Storage) -> tuple[CachePart, ...]:
        """One part: one ``key`` buffer of latent and rope, and the index key in the same layer."""
        key = _stored("key", self.latent_dim + self.rope_dim, storage.kv_dtype)
        return (CachePart("kv", (*key, *_index_key(self.index_dim, storage, default=True))),)

    def shard(self, tp: int) -> MlaLayer:
        """Latents are replicated: the same layer."""
        return self


@dataclass(frozen=True, slots=True)
class CompressedLayer:
    """Compressed attention of DeepSeek-V4: a window of plain entries and, for ``ratio`` > 0, one entry per ``ratio`` tokens.

    An entry is one latent that serves as key and value.  The two have different life cycles, so they are two layers of
    the cache configuration: ``window`` and ``compressed`` (full attention).
    """

    ratio: int  # tokens per compressed entry; 0: the window alone
    window: int  # tokens
    entry_dim: int  # elements, rope included
    rope_dim: int = 64
    index_dim: int = 0  # elements of the index key of one compressed entry; 0: none
    fp8_row_bytes: int | None = (
        None  # bytes of an fp8 entry that keeps rope in bfloat16 and scales inline; None: 1 B/element
    )
    has_cache: ClassVar[bool] = True
    kind: ClassVar[str] = "compressed"

    def __post_init__(self) -> None:
        check_int("ratio", self.ratio, 0)
        check_int("rope_dim", self.rope_dim, 0)
        check_int("index_dim", self.index_dim, 0)
        for field in ("window", "entry_dim"):
            check_int(field, getattr(self, field), 1)
        if self.fp8_row_bytes is not None:
            check_int("fp8_row_bytes", self.fp8_row_bytes, 1)
        if self.rope_dim > self.entry_dim:
            raise ConfigError(f"rope_dim={self.rope_dim} is part of entry_dim={self.entry_dim}")

    def parts(self, storage: Storage) -> tuple[CachePart, ...]:
        """The window part and, with a ratio, the compressed part with its index keys."""
        if storage.kv_dtype == "fp8" and self.fp8_row_bytes is not None:
            entry: tuple[Tensor, ...] = (Tensor("key", self.fp8_row_bytes),)
        else:
            entry = _stored("key", self.entry_dim, storage.kv_dtype)
        window = CachePart("window", entry, self.window)
        if not self.ratio:
            return (window,)
        index = _index_key(self.index_dim, storage, default=True)
        return window, CachePart("compressed", (*entry, *index), None, self.ratio)

    def shard(self, tp: int) -> CompressedLayer:
        """Latents are replicated: the same layer."""
        return self


@dataclass(frozen=True, slots=True)
class StateLayer:
    """A layer with one state per sequence: Mamba-2, gated delta net (GDN) or Kimi delta attention (KDA)."""

    kind: str  # "mamba2", "gdn" or "kda": a label
    conv_heads: tuple[tuple[int, int], ...]  # (heads, channels of one head) of each convolved tensor
    conv_width: int  # taps k of the convolution; k - 1 inputs are kept
    recurrent: tuple[int, int, int]  # heads, rows, columns
    state_dtype: str = "float32"
    conv_dtype: str = "bfloat16"
    has_cache: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_int("conv_width", self.conv_width, 1)
        for heads, channels in self.conv_heads:
            check_int("conv heads", heads, 1)
            check_int("conv channels", channels, 1)
        if len(self.recurrent) != 3:
            raise ConfigError(f"recurrent={self.recurrent} must be (heads, rows, columns)")
        for size in self.recurrent:
            check_int("recurrent", size, 1)
        for field in ("state_dtype", "conv_dtype"):
            object.__setattr__(self, field, formats.check_dtype(field, getattr(self, field), packed=False))

    @classmethod
    def mamba2(cls, heads: int, head_dim: int, state: int, groups: int, conv_width: int = 4) -> StateLayer:
        """Mamba-2: convolved channels = heads x head_dim + 2 x groups x state."""
        return cls("mamba2", ((heads, head_dim), (groups, 2 * state)), conv_width, (heads, head_dim, state))

    @classmethod
    def gdn(cls, k_heads: int, v_heads: int, k_dim: int, v_dim: int, conv_width: int = 4) -> StateLayer:
        """Gated delta net: convolved channels = 2 x k_heads x k_dim + v_heads x v_dim."""
        return cls("gdn", ((k_heads, 2 * k_dim), (v_heads, v_dim)), conv_width, (v_heads, k_dim, v_dim))

    @classmethod
    def kda(cls, heads: int, head_dim: int, conv_width: int = 4) -> StateLayer:
        """Kimi delta attention with q, k and v convolved: 3 x heads x head_dim channels."""
        return cls("kda", ((heads, 3 * head_dim),), conv_width, (heads, head_dim, head_dim))

    @property
    def conv_dim(self) -> int:
        """Channels of the convolution."""
        return sum(heads * channels for heads, channels in self.conv_heads)

    def parts(self, storage: Storage) -> tuple[CachePart, ...]:
        """One part of bytes per sequence: conv_dim x (conv_width - 1) and the recurrent state."""
        conv = self.conv_dim * (self.conv_width - 1) * formats.element_bytes(storage.conv_dtype or self.conv_dtype)
        state = prod(self.recurrent) * formats.element_bytes(storage.state_dtype or self.state_dtype)
        tensors = (Tensor("conv_state", conv), Tensor("ssm_state", state))
        return (CachePart("state", tuple(t for t in tensors if t.entry_bytes)),)

    def shard(self, tp: int) -> StateLayer:
        """State heads are divided; convolved groups that are fewer than the ranks are replicated."""
        heads, rows, columns = self.recurrent
        if heads % tp:
            raise ConfigError(f"{heads} state heads can not be divided over tp={tp} ranks")
        conv = tuple((_split("convolution groups", n, tp), channels) for n, channels in self.conv_heads)
        return replace(self, conv_heads=conv, recurrent=(heads // tp, rows, columns))


@dataclass(frozen=True, slots=True)
class NoCacheLayer:
    """A model layer that caches nothing (an MLP or expert layer of a hybrid, a layer that reads another's keys)."""

    has_cache: ClassVar[bool] = False
    kind: ClassVar[str] = "none"

    def parts(self, storage: Storage) -> tuple[CachePart, ...]:
        """No parts."""
        return ()

    def shard(self, tp: int) -> NoCacheLayer:
        """The same layer."""
        return self


Layer: TypeAlias = AttentionLayer | MlaLayer | CompressedLayer | StateLayer | NoCacheLayer
