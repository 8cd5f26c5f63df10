"""The batch step: its form and its manual. Both cores offer it as it stands here."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvpool.v2._backend import StepResult
from kvpool.v2.types import CudaStream


class StepMethod(Protocol):
    """``manager.step``: commit, resize and write the page tables of a whole batch in one call."""

    def __call__(
        self,
        handles: npt.NDArray[np.int64],
        rows: npt.NDArray[np.int32],
        capacities: npt.NDArray[np.int32],
        histories: npt.NDArray[np.int32],
        table: npt.NDArray[np.int32],
        tokens: tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None = None,
        stream: CudaStream | None = None,
    ) -> StepResult:
        """Requests are served in list order: tokens committed, lengths set, their rows of ``table`` brought up to date.

        ``handles`` int64[n] (:attr:`KVCache.handle`), ``rows``, ``capacities``, ``histories`` int32[n], ``table`` a
        writable int32[layer group, row, block] of slot ids, all C-contiguous.  ``table`` is BAD_PAGE_INDEX beyond
        num_blocks and for scratch; a cache keeps its row. The answer: ``ok`` bool[n]; ``dirty`` int32[k, 4] of (group,
        row, first block, end block), what changed; both are views, valid until the next step; ``event``: when the
        pages may be used on other streams, 0 for at once. A request that does not fit changes nothing and the rest go
        on; a wrong type, shape, handle or length fails the whole call before any change.

        ``tokens``: None, or (values int32[m], offsets int32[n + 1]), ids only: request i commits the values from
        ``offsets[i]`` up to ``offsets[i + 1]`` before it grows. Blocks that a step adds get the last priority that the
        cache's callback has answered.
        """
