"""Runs of integers of different lengths, side by side in flat arrays."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def ragged(starts: I64, counts: I64) -> tuple[I64, I64]:
    """For every i the integers ``starts[i] … starts[i] + counts[i] - 1``: (the i of each, the integers)."""
    owners = np.repeat(np.arange(len(starts)), counts)
    before = np.cumsum(counts) - counts
    values = np.arange(len(owners)) - before[owners] + starts[owners]
    return owners, values
