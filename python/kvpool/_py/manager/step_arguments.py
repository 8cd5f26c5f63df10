"""The arrays of a batch step: their form, and the tokens in them."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvpool.errors import ArgumentError


class StepTokens:
    """What each request of a batch commits: request i the values from ``offsets[i]`` to ``offsets[i + 1]``."""

    __slots__ = ("_offsets", "counts", "data")

    def __init__(self, values: npt.NDArray[np.int32], offsets: list[int], counts: list[int]) -> None:
        self.data = values.tobytes()  # encoded: ids are their own codes
        self.counts = counts  # tokens of each request
        self._offsets = offsets

    @staticmethod
    def make(values: npt.NDArray[np.int32], offsets: npt.NDArray[np.int32], num_requests: int) -> StepTokens:
        """Of arrays of the right form; ArgumentError for what is in them."""
        limits: list[int] = offsets.tolist()
        if len(limits) != num_requests + 1:
            raise ArgumentError(f"step(): offsets has {len(limits)} entries, {num_requests + 1} are needed")
        counts: list[int] = np.diff(offsets.astype(np.int64)).tolist()
        if limits[0] != 0 or limits[-1] != len(values) or min(counts, default=0) < 0:
            raise ArgumentError(f"step(): offsets must begin with 0, never decrease and end with {len(values)}")
        if len(values) and int(values.min()) < 0:
            position = int((values < 0).argmax())
            request = int(np.searchsorted(offsets, position, side="right")) - 1
            raise ArgumentError(
                f"step(): request {request}: tokens[{position}]: token ids must be from 0 to 2147483647, "
                f"not {int(values[position])}"
            )
        return StepTokens(values, limits, counts)

    def of(self, request: int) -> bytes:
        """Tokens of a request, encoded."""
        return self.data[4 * self._offsets[request] : 4 * self._offsets[request + 1]]


def token_arrays(tokens: Any) -> tuple[Any, Any]:
    """The two arrays of a step's ``tokens``; TypeError or ArgumentError for another form."""
    if not isinstance(tokens, (tuple, list)) or len(tokens) != 2:
        raise TypeError("step(): tokens must be (values, offsets)")
    values = require_array(tokens[0], "tokens values", np.int32, 1)
    return values, require_array(tokens[1], "tokens offsets", np.int32, 1)


def require_array(value: Any, name: str, dtype: type[np.generic], ndim: int, writable: bool = False) -> Any:
    """``value`` as an array without a copy.

    TypeError for what is no buffer; ArgumentError naming the argument for another dtype, number of dimensions, for
    strides that are not C-contiguous, and for read-only memory where it will be written.
    """
    if not isinstance(value, np.ndarray):
        try:
            value = np.asarray(memoryview(value))
        except TypeError as error:
            raise TypeError(
                f"step(): {name} must be an array of {np.dtype(dtype)}, not {type(value).__name__}"
            ) from error
    if value.dtype != dtype:
        raise ArgumentError(f"step(): {name} must have dtype {np.dtype(dtype)}, not {value.dtype}")
    if value.ndim != ndim:
        raise ArgumentError(f"step(): {name} must have {ndim} dimension(s), not {value.ndim}")
    if not value.flags.c_contiguous:
        raise ArgumentError(f"step(): {name} must be C-contiguous")
    if not value.flags.aligned:
        raise ArgumentError(f"step(): {name} must be aligned")
    if writable and not value.flags.writeable:
        raise ArgumentError(f"step(): {name} must be writable")
    if type(value) is not np.ndarray:
        return value.view(np.ndarray)  # no code of the caller's class under the lock
    return value
