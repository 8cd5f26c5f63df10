"""The configuration of a replay's manager, and the longest sequence that it can promise.

``typical_step`` is one request at (c, c - 1), c the mean prompt plus the mean output of the requests to run;
``constraints`` are (M, M - 1) and (min(max_num_tokens, M), 0): one request of full length decodes, and one fresh prompt chunk
fits.  M, ``max_seq_len_effective``, is the largest multiple of ``tokens_per_block`` up to the wanted maximum with which
construction succeeds.  A window of M or more is full attention.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from kvpool.errors import ConfigError
from kvpool.models import config_for
from kvpool.sim.requests import TraceRequest
from kvpool.sim.settings import MAX_UTIL_FOR_RESUME
from kvpool.v2 import KVCacheManager

if TYPE_CHECKING:
    from kvpool.models import ModelGeometry
    from kvpool.v2 import KVCacheManagerConfig


def executor_config(
    model: ModelGeometry,
    *,
    memory: int,
    tokens_per_block: int,
    max_seq_len: int,
    max_num_tokens: int | None,
    typical: tuple[int, int] | None = None,
    max_util_for_resume: float = MAX_UTIL_FOR_RESUME,
    kv_dtype: str = "bfloat16",
) -> KVCacheManagerConfig:
    """One rank's configuration with ``memory`` bytes for sequences up to ``max_seq_len``.

    ``max_num_tokens`` None promises no prompt chunk.
    """
    constraints = [(max_seq_len, max_seq_len - 1)]
    if max_num_tokens is not None:
        constraints.append((min(max_num_tokens, max_seq_len), 0))
    return config_for(
        model,
        quota=memory,
        tokens_per_block=tokens_per_block,
        max_seq_len=max_seq_len,
        typical=typical,
        constraints=constraints,
        max_util_for_resume=max_util_for_resume,
        kv_dtype=kv_dtype,
    )


def longest_constructible(
    make_config: Callable[[int], KVCacheManagerConfig], tokens_per_block: int, longest: int, backend: str | None
) -> int:
    """The largest multiple of ``tokens_per_block`` up to ``longest`` whose configuration a manager accepts.

    Managers on the virtual device are made and thrown away, so the backend's own sizing decides and nothing is reserved.
    ConfigError, that of the shortest sequence, when not even one block can be promised.
    """

    def succeeds(blocks: int) -> bool:
        try:
            _construct(make_config(blocks * tokens_per_block), backend)
        except ConfigError:
            return False
        return True

    most = longest // tokens_per_block
    if most == 0:
        raise ConfigError(f"max_seq_len = {longest}: must be at least one block of {tokens_per_block} tokens")
    if succeeds(most):
        return most * tokens_per_block
    _construct(make_config(tokens_per_block), backend)
    good, bad = 1, most
    while bad - good > 1:
        middle = (good + bad) // 2
        if succeeds(middle):
            good = middle
        else:
            bad = middle
    return good * tokens_per_block


def _construct(config: KVCacheManagerConfig, backend: str | None) -> None:
    KVCacheManager(config, backend=backend, device="virtual").shutdown()


def typical_length(requests: Sequence[TraceRequest], max_seq_len: int) -> int:
    """c: mean prompt plus mean output, rounded down, of the requests that will run (of all, if none is short enough)."""
    fitting = [request for request in requests if request.total_tokens <= max_seq_len] or list(requests)
    return max(1, sum(request.total_tokens for request in fitting) // len(fitting))
