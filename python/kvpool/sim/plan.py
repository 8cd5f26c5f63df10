"""What a memory holds for requests of one length: our sizing beside an equal split, a split by maximum length, the ideal.

For length L the typical step is (c, c - 1) with the c ≤ L at which one request holds most bytes; ``ideal`` is how many such
requests the bytes alone would hold.  Our slot counts are those of a manager made on the virtual device with that typical
step, whose floor is one sequence of ``max_seq_len`` (and one prompt chunk of ``max_num_tokens``, when that is given), not
divided by the resume limit; nothing is opened in it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, Field

from kvpool import __version__
from kvpool.errors import ConfigError
from kvpool.sim.arms import backend_problems
from kvpool.sim.config import executor_config, longest_constructible
from kvpool.sim.layer_groups import GroupSize, group_sizes
from kvpool.sim.options import MOST_TOKENS, check_block, load_model
from kvpool.sim.sizes import parse_size
from kvpool.sim.usage import UsageError
from kvpool.v2 import KVCacheManager
from kvpool.v2.backend_choice import ENVIRONMENT_VARIABLE, choose_backend

if TYPE_CHECKING:
    from kvpool.models import ModelGeometry
    from kvpool.v2 import KVCacheManagerConfig


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The options of ``kvpool plan`` as they were given; None: not given."""

    model: str = "gpt-oss-120b"
    memory: str = "80GiB"
    length: int | None = None
    max_seq_len: int | None = None
    max_num_tokens: int | None = None
    tokens_per_block: int | None = None
    tp: int = 1
    dtype: str = "bfloat16"


class PlanSettings(BaseModel):
    """The effective options."""

    model: str
    memory: int
    length: int
    max_seq_len: int
    max_num_tokens: int | None
    tokens_per_block: int
    tp: int
    dtype: str
    typical_step: tuple[int, int]  # capacity, history
    backend: str


class PlanGroup(BaseModel):
    """One layer group; ``slots_per_request`` at the typical step."""

    group: int
    kind: Literal["attention", "ssm"]
    window: int | None
    layers: list[int]
    slot_bytes: int
    slots_per_request: int


class PlanPool(BaseModel):
    """One pool group of our sizing."""

    pool_group: int
    layer_groups: list[int]
    slots: int
    slot_bytes: int
    pool_bytes: int
    slots_per_request: int


class Split(BaseModel):
    """Another way to divide the memory: slots per layer group, each with a pool of its own."""

    slots: list[int]
    fits: int


class Splits(BaseModel):
    """``equal``: the same bytes for every layer group; ``max_length``: bytes as a sequence of max_seq_len needs them."""

    equal: Split
    max_length: Split


class PlanResult(BaseModel):
    """The file that ``kvpool plan --json`` writes."""

    schema_: Literal[1] = Field(alias="schema")
    kvpool: str
    settings: PlanSettings
    bytes_per_token: float | int
    request_bytes: int
    ideal: int
    fits: int
    longest_fitting: int | None
    """Where not even one request fits: the longest multiple of tokens_per_block at which one does (0: none)."""
    layer_groups: list[PlanGroup]
    pools: list[PlanPool]
    splits: Splits


def make_plan(options: PlanOptions) -> PlanResult:
    """The plan; UsageError for a wrong option."""
    memory, model, settings = _settings(options)
    block, backend = settings["tokens_per_block"], settings["backend"]

    def config_for(length: int, max_seq_len: int | None = None) -> tuple[KVCacheManagerConfig, tuple[int, int]]:
        return plan_config(
            model,
            memory=memory,
            tokens_per_block=block,
            length=length,
            max_seq_len=max_seq_len,
            max_num_tokens=options.max_num_tokens,
            kv_dtype=options.dtype,
        )

    config, typical = config_for(settings["length"], settings["max_seq_len"])
    groups = group_sizes(config)
    need = [group.blocks(*typical) for group in groups]
    request_bytes = sum(count * group.slot_bytes for count, group in zip(need, groups, strict=True))
    ideal = memory // request_bytes if request_bytes else 0
    pools = _pools(config, backend, need) if ideal or not groups else None
    fits = _fits(pools)
    longest = None if fits else _longest_fitting(config_for, block, settings["length"], backend)
    return PlanResult.model_construct(
        schema_=1,
        kvpool=__version__,
        settings=PlanSettings(typical_step=typical, **settings),
        bytes_per_token=model.bytes_per_token(kv_dtype=options.dtype),
        request_bytes=request_bytes,
        ideal=ideal,
        fits=fits,
        longest_fitting=longest,
        layer_groups=[
            PlanGroup(
                group=group.group,
                kind="ssm" if group.is_state else "attention",
                window=group.window,
                layers=list(group.layers),
                slot_bytes=group.slot_bytes,
                slots_per_request=count,
            )
            for group, count in zip(groups, need, strict=True)
        ],
        pools=pools or [],
        splits=Splits(
            equal=_split(memory, groups, need, [1] * len(groups)),
            max_length=_split(memory, groups, need, [_weight(g, settings["max_seq_len"]) for g in groups]),
        ),
    )


def plan_config(
    model: ModelGeometry,
    *,
    memory: int,
    tokens_per_block: int,
    length: int,
    max_seq_len: int | None = None,
    max_num_tokens: int | None = None,
    kv_dtype: str = "bfloat16",
) -> tuple[KVCacheManagerConfig, tuple[int, int]]:
    """The configuration planned for ``length`` (``max_seq_len``: the same unless given), and its typical step."""

    def config(typical: tuple[int, int]) -> KVCacheManagerConfig:
        return executor_config(
            model,
            memory=memory,
            tokens_per_block=tokens_per_block,
            max_seq_len=length if max_seq_len is None else max_seq_len,
            max_num_tokens=max_num_tokens,
            typical=typical,
            max_util_for_resume=1.0,
            kv_dtype=kv_dtype,
        )

    capacity = heaviest_capacity(group_sizes(config((length, length - 1))), length, tokens_per_block)
    typical = (capacity, capacity - 1)
    return config(typical), typical


def heaviest_capacity(groups: Sequence[GroupSize], length: int, tokens_per_block: int) -> int:
    """The c ≤ ``length`` at which a request at (c, c - 1) holds most bytes, the largest such c.

    Two blocks are enough to look at: full layers only grow with c, and a window's pages repeat with every block.
    """
    candidates = range(max(1, length - 2 * tokens_per_block), length + 1)
    return max(candidates, key=lambda c: (sum(g.blocks(c, c - 1) * g.slot_bytes for g in groups), c))


def _settings(options: PlanOptions) -> tuple[int, ModelGeometry, dict[str, Any]]:
    from kvpool.models.formats import DTYPES, check_dtype

    memory = parse_size("--memory", options.memory)
    for name in ("length", "max_seq_len", "max_num_tokens", "tokens_per_block", "tp"):
        value = getattr(options, name)
        if value is not None and not 1 <= value <= MOST_TOKENS:
            argument = "--" + name.replace("_", "-")
            raise UsageError(argument, f"{value} is out of range", f"an integer from 1 to {MOST_TOKENS}")
    try:
        dtype = check_dtype("dtype", options.dtype)
    except (ConfigError, TypeError):
        raise UsageError("--dtype", f"{options.dtype!r} is unknown", ", ".join(DTYPES)) from None
    model = load_model(options.model, options.tp)
    block = options.tokens_per_block or model.default_tokens_per_block
    check_block(model, block)
    length = options.length or options.max_seq_len or model.max_position_embeddings
    longest = options.max_seq_len or length
    if length > longest:
        raise UsageError("--length", f"{length} is longer than --max-seq-len", f"from 1 to {longest}")
    return (
        memory,
        model,
        {
            "model": model.name,
            "memory": memory,
            "length": length,
            "max_seq_len": longest,
            "max_num_tokens": options.max_num_tokens,
            "tokens_per_block": block,
            "tp": options.tp,
            "dtype": dtype,
            "backend": _backend(),
        },
    )


def _backend() -> str:
    """What the environment asks for, else the first that can run; both size alike."""
    if ENVIRONMENT_VARIABLE in os.environ:
        backend = choose_backend()
        problem = backend_problems()[backend]
        if problem is not None:
            raise UsageError(ENVIRONMENT_VARIABLE, problem)
        return backend
    for backend, problem in backend_problems().items():
        if problem is None:
            return backend
    raise UsageError(ENVIRONMENT_VARIABLE, "no backend can run here")


def _pools(config: KVCacheManagerConfig, backend: str, need: Sequence[int]) -> list[PlanPool] | None:
    """Our pool groups; None when the floors are above the memory."""
    try:
        manager = KVCacheManager(config, backend=backend, device="virtual")
    except ConfigError:
        return None
    with manager:
        pools = []
        for desc in manager.pool_group_descs:
            groups = [variant.layer_group_id for variant in desc.slot_desc.variants]
            slot_bytes = sum(desc.slot_desc.slot_size_list)
            pools.append(
                PlanPool(
                    pool_group=desc.pool_group_index,
                    layer_groups=groups,
                    slots=desc.num_slots,
                    slot_bytes=slot_bytes,
                    pool_bytes=desc.num_slots * slot_bytes,
                    slots_per_request=sum(need[group] for group in groups),
                )
            )
        return pools


def _fits(pools: Sequence[PlanPool] | None) -> int:
    return min(pool.slots // pool.slots_per_request for pool in pools) if pools else 0


def _longest_fitting(
    config_for: Callable[[int], tuple[KVCacheManagerConfig, tuple[int, int]]], block: int, length: int, backend: str
) -> int:
    """Construction keeps room for the longest length; on its way there a request may hold a page more per window."""
    try:
        longest = longest_constructible(lambda length: config_for(length)[0], block, length, backend)
    except ConfigError:
        return 0
    while longest:
        config, typical = config_for(longest)
        if _fits(_pools(config, backend, [group.blocks(*typical) for group in group_sizes(config)])):
            break
        longest -= block
    return longest


def _split(memory: int, groups: Sequence[GroupSize], need: Sequence[int], weights: Sequence[int]) -> Split:
    total = sum(weights)
    slots = [
        int(Fraction(memory * weight, total * group.slot_bytes)) for group, weight in zip(groups, weights, strict=True)
    ]
    fits = min((have // count for have, count in zip(slots, need, strict=True)), default=0)
    return Split(slots=slots, fits=fits)


def _weight(group: GroupSize, max_seq_len: int) -> int:
    """Bytes of a sequence of ``max_seq_len``, counted in tokens that stay live."""
    if group.is_state:
        return group.slot_bytes * group.tokens_per_block
    return group.slot_bytes * min(group.window or max_seq_len, max_seq_len)
