"""A model as its cache sees it: layers, their sizes on one rank, and the layers of a cache configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from math import lcm
from typing import TYPE_CHECKING, NamedTuple

from kvpool.errors import ConfigError
from kvpool.models.layers import (
    AttentionLayer,
    CachePart,
    CompressedLayer,
    Layer,
    MlaLayer,
    NoCacheLayer,
    StateLayer,
    Storage,
    check_int,
)

if TYPE_CHECKING:
    from kvpool.v2.config import AttentionLayerConfig, BufferConfig, SsmLayerConfig

__all__ = ["CacheLayerRef", "ModelGeometry", "ModelParameters", "Sharding"]

DEFAULT_TOKENS_PER_BLOCK = 32


@dataclass(frozen=True, slots=True)
class ModelParameters:
    """Sizes for a step model. ``total`` and ``active`` count parameters in billions, of the whole model."""

    total: float
    active: float  # used for one token
    bytes_per_parameter: float  # of the published checkpoint
    source: str

    def __post_init__(self) -> None:
        if not 0 < self.active <= self.total:
            raise ConfigError(f"parameters: 0 < active={self.active} <= total={self.total} does not hold")
        if not self.bytes_per_parameter > 0:
            raise ConfigError(f"bytes_per_parameter={self.bytes_per_parameter} must be positive")

    @property
    def total_weight_bytes(self) -> float:
        """Bytes of all weights."""
        return self.total * 1e9 * self.bytes_per_parameter

    @property
    def active_weight_bytes(self) -> float:
        """Bytes of the weights that one token uses."""
        return self.active * 1e9 * self.bytes_per_parameter


@dataclass(frozen=True, slots=True)
class Sharding:
    """Which rank of which split a geometry describes."""

    tp: int = 1
    tp_rank: int = 0
    pp: int = 1
    pp_rank: int = 0
    attention_dp: bool = False

    def __post_init__(self) -> None:
        for size, rank in (("tp", "tp_rank"), ("pp", "pp_rank")):
            check_int(size, getattr(self, size), 1)
            check_int(rank, getattr(self, rank), 0)
            if getattr(self, rank) >= getattr(self, size):
                raise ConfigError(f"{rank}={getattr(self, rank)} must be below {size}={getattr(self, size)}")


class CacheLayerRef(NamedTuple):
    """Where a layer of the cache configuration comes from."""

    layer_id: int  # in layer_configs()
    model_layer: int  # index in the whole model; draft layers follow the model's own
    part: str  # "kv", "window", "compressed" or "state"


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The cached layers of a model, or of one rank of it after :meth:`shard`.

    Describe a model that has no preset by hand::

        ModelGeometry("mine", max_position_embeddings=32768,
                      layers=(AttentionLayer(kv_heads=8, head_dim=128, window=1024),
                              AttentionLayer(kv_heads=8, head_dim=128)) * 16)

    Sizes are bytes, lengths tokens.  ``parameters`` always count the whole model.
    """

    name: str
    max_position_embeddings: int
    layers: tuple[Layer, ...]
    draft_layers: tuple[Layer, ...] = ()  # MTP or EAGLE layers, on the last pipeline rank only
    draft_kind: Layer | None = None  # what with_draft_layers() adds; None: as the last full-attention layer
    published_draft_layers: int = 0  # how many the checkpoint has
    parameters: ModelParameters | None = None
    source: str = ""
    sharding: Sharding | None = None
    global_layer_ids: tuple[int, ...] = ()  # of layers, then draft_layers, in the whole model
    first_cache_layer: int = 0  # cache layers on earlier pipeline ranks
    block_multiple: int = (
        0  # tokens_per_block is a multiple of it: of all compression ratios; 0: computed, kept by shard()
    )

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise TypeError(f"name must be a string, not {type(self.name).__name__}")
        check_int("max_position_embeddings", self.max_position_embeddings, 1)
        check_int("published_draft_layers", self.published_draft_layers, 0)
        check_int("first_cache_layer", self.first_cache_layer, 0)
        for name in ("layers", "draft_layers"):
            layers = tuple(getattr(self, name))
            for layer in layers:
                if not isinstance(layer, (AttentionLayer, MlaLayer, CompressedLayer, StateLayer, NoCacheLayer)):
                    raise TypeError(f"{name} must hold layer descriptions, not {type(layer).__name__}")
            object.__setattr__(self, name, layers)
        count = len(self.layers) + len(self.draft_layers)
        ids = tuple(self.global_layer_ids) or tuple(range(count))
        if len(ids) != count:
            raise ConfigError(f"global_layer_ids names {len(ids)} layers, the geometry has {count}")
        object.__setattr__(self, "global_layer_ids", ids)
        if not check_int("block_multiple", self.block_multiple, 0):
            ratios = {x.ratio for x in self.all_layers if isinstance(x, CompressedLayer) and x.ratio}
            object.__setattr__(self, "block_multiple", lcm(*ratios))

    # ---- whole model ------------------------------------------------------------------------------------------------

    @property
    def all_layers(self) -> tuple[Layer, ...]:
        """The model's layers, then its draft layers."""
        return self.layers + self.draft_layers

    @property
    def num_layers(self) -> int:
        """Model layers here, those without a cache included, draft layers not."""
        return len(self.layers)

    @property
    def has_state(self) -> bool:
        """Whether any layer keeps a state per sequence."""
        return any(isinstance(layer, StateLayer) for layer in self.all_layers)

    @property
    def default_tokens_per_block(self) -> int:
        """Tokens per block to use when nobody says otherwise: 32, DeepSeek-V4 128; the same on every rank."""
        return -(-DEFAULT_TOKENS_PER_BLOCK // self.block_multiple) * self.block_multiple

    def with_draft_layers(self, count: int) -> ModelGeometry:
        """The same model with ``count`` draft layers of :attr:`draft_kind`, instead of those it has."""
        check_int("mtp_layers", count, 0)
        if self.sharding is not None:
            raise ConfigError("add draft layers before shard(): they belong to the last pipeline rank")
        kind = self.draft_kind or next((x for x in reversed(self.layers) if x.kind in ("full", "mla")), None)
        if count and kind is None:
            raise ConfigError(f"{self.name} has no full-attention layer to copy; give draft_kind")
        drafts = (kind,) * count if kind is not None else ()
        return replace(self, draft_layers=drafts, global_layer_ids=(), block_multiple=0)

    def shard(
        self,
        tp: int = 1,
        tp_rank: int = 0,
        pp: int = 1,
        pp_rank: int = 0,
        attention_dp: bool = False,
        *,
        pp_layers: Sequence[int] | None = None,
    ) -> ModelGeometry:
        """What one rank holds.

        Heads are divided by ``tp`` (fewer KV heads than ranks: one replicated head a rank; latents: replicated), unless
        ``attention_dp``.  Layers are cut into contiguous runs; the first ranks take one more where they do not divide,
        or ``pp_layers`` says how many each takes.  A rank may hold none.  Draft layers go to the last rank.
        ConfigError when heads can not be divided, or when this is already one rank's geometry.
        """
        if self.sharding is not None:
            raise ConfigError(f"{self.name} is already sharded: {self.sharding}")
        sharding = Sharding(tp, tp_rank, pp, pp_rank, attention_dp)
        first, last = _pipeline_range(len(self.layers), sharding, pp_layers)
        ways = 1 if attention_dp else tp
        drafts = self.draft_layers if pp_rank == pp - 1 else ()
        ids = self.global_layer_ids[first:last] + self.global_layer_ids[len(self.layers) :][: len(drafts)]
        return replace(
            self,
            layers=tuple(layer.shard(ways) for layer in self.layers[first:last]),
            draft_layers=tuple(layer.shard(ways) for layer in drafts),
            sharding=sharding,
            global_layer_ids=ids,
            first_cache_layer=sum(len(layer.parts(Storage())) for layer in self.layers[:first]),
        )

    # ---- sizes ------------------------------------------------------------------------------------------------------

    def parts(self, storage: Storage | None = None) -> Iterator[tuple[int, CachePart]]:
        """(global model layer, part) of everything that is cached, in order."""
        storage = storage or Storage()
        for model_layer, layer in zip(self.global_layer_ids, self.all_layers, strict=True):
            for part in layer.parts(storage):
                yield model_layer, part

    def bytes_per_token(
        self,
        *,
        kv_dtype: str = "bfloat16",
        store_shared_kv: bool = False,
        store_index_keys: bool | None = None,
    ) -> float:
        """Bytes that one more token adds over all layers, as long as no window is full; an int whenever it is whole."""
        storage = Storage(kv_dtype, None, None, store_shared_kv, store_index_keys)
        total = sum((Fraction(p.entry_bytes, p.ratio) for _, p in self.parts(storage) if not p.is_state), Fraction())
        return int(total) if total.denominator == 1 else float(total)

    def state_bytes_per_sequence(self, *, state_dtype: str | None = None, conv_dtype: str | None = None) -> int:
        """Bytes of the states of one sequence over all layers."""
        storage = Storage(state_dtype=state_dtype, conv_dtype=conv_dtype)
        return sum(part.entry_bytes for _, part in self.parts(storage) if part.is_state)

    def kv_read_bytes(
        self,
        context: int,
        *,
        kv_dtype: str = "bfloat16",
        state_dtype: str | None = None,
        store_shared_kv: bool = False,
        include_state: bool = True,
    ) -> int:
        """Live bytes of one request with ``context`` tokens: windows capped, whole compressed entries, its states."""
        check_int("context", context, 0)
        storage = Storage(kv_dtype, state_dtype, None, store_shared_kv)
        total = 0
        for _, part in self.parts(storage):
            if part.is_state:
                total += part.entry_bytes if include_state else 0
            else:
                live = context if part.window is None else min(context, part.window)
                total += live // part.ratio * part.entry_bytes
        return total

    # ---- cache configuration ----------------------------------------------------------------------------------------

    def cache_layers(self) -> tuple[CacheLayerRef, ...]:
        """One reference for each layer of :meth:`layer_configs`, in its order."""
        parts = enumerate(self.parts())
        return tuple(CacheLayerRef(i, model_layer, part.name) for i, (model_layer, part) in parts)

    def layer_configs(
        self,
        tokens_per_block: int,
        *,
        kv_dtype: str = "bfloat16",
        state_dtype: str | None = None,
        max_seq_len: int | None = None,
        store_shared_kv: bool = False,
        conv_dtype: str | None = None,
        store_index_keys: bool | None = None,
        kernel_tokens_per_block: int | None = None,
        global_ids: bool = False,
    ) -> list[AttentionLayerConfig | SsmLayerConfig]:
        """The layers of a V2 configuration, ids 0..n-1 (``global_ids``: as in the whole model; see cache_layers()).

        A window of ``max_seq_len`` or more is full attention.  ``kernel_tokens_per_block`` gives attention buffers pages
        of their own (V2's ``tokens_per_block_override``).  ConfigError when a compression ratio does not divide the
        block.  Roles are those of :data:`kvpool.models.ROLES`.
        """
        from kvpool.v2.config import AttentionLayerConfig, SsmLayerConfig

        check_int("tokens_per_block", tokens_per_block, 1)
        if max_seq_len is not None:
            check_int("max_seq_len", max_seq_len, 1)
        storage = Storage(kv_dtype, state_dtype, conv_dtype, store_shared_kv, store_index_keys)
        self._check_block(tokens_per_block, kernel_tokens_per_block)
        configs: list[AttentionLayerConfig | SsmLayerConfig] = []
        first = self.first_cache_layer if global_ids else 0
        for layer_id, (_, part) in enumerate(self.parts(storage), start=first):
            if part.is_state:
                configs.append(SsmLayerConfig(layer_id=layer_id, buffers=_buffers(part, 1, None)))
                continue
            window = part.window
            if window is not None and max_seq_len is not None and window >= max_seq_len:
                window = None
            buffers = _buffers(part, tokens_per_block, kernel_tokens_per_block)
            configs.append(AttentionLayerConfig(layer_id=layer_id, buffers=buffers, sliding_window_size=window))
        return configs

    def _check_block(self, tokens_per_block: int, kernel_tokens_per_block: int | None) -> None:
        if kernel_tokens_per_block is not None:
            check_int("kernel_tokens_per_block", kernel_tokens_per_block, 1)
            if tokens_per_block % kernel_tokens_per_block:
                raise ConfigError(
                    f"kernel_tokens_per_block={kernel_tokens_per_block} must divide tokens_per_block={tokens_per_block}"
                )
        pages = {"tokens_per_block": tokens_per_block, "kernel_tokens_per_block": kernel_tokens_per_block}
        for name, tokens in pages.items():
            if tokens is not None and tokens % self.block_multiple:
                raise ConfigError(
                    f"{name}={tokens} must be a multiple of {self.block_multiple}, as the compression ratios of "
                    f"{self.name} are: a block holds whole compressed entries"
                )


def _buffers(part: CachePart, tokens_per_block: int, own_tokens: int | None) -> list[BufferConfig]:
    from kvpool.v2.config import BufferConfig

    entries = (own_tokens or tokens_per_block) // part.ratio
    override = None if own_tokens in (None, tokens_per_block) else own_tokens
    return [
        BufferConfig(role=t.role, size=t.entry_bytes * entries, tokens_per_block_override=override)
        for t in part.tensors
    ]


def _pipeline_range(layers: int, sharding: Sharding, counts: Sequence[int] | None) -> tuple[int, int]:
    pp = sharding.pp
    if counts is None:
        counts = [layers // pp + (rank < layers % pp) for rank in range(pp)]
    for count in counts:
        check_int("pp_layers", count, 0)
    if len(counts) != pp or sum(counts) != layers:
        raise ConfigError(f"pp_layers={list(counts)} must name pp={pp} counts that sum to {layers} layers")
    first = sum(counts[: sharding.pp_rank])
    return first, first + counts[sharding.pp_rank]
