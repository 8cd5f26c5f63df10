"""Token ids for content checks: prompts from the request, outputs from what a request can see."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvpool.sim.requests import TraceRequest
from kvpool.sim.traces import PIECE_TOKENS

U64 = npt.NDArray[np.uint64]
_WORD_0, _WORD_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK_64 = (1 << 64) - 1


def mix(words: U64) -> U64:
    """A bijective scramble of 64-bit words (the finalizer of splitmix64)."""
    first: U64 = (words ^ (words >> _S30)) * _MIX_1
    second: U64 = (first ^ (first >> _S27)) * _MIX_2
    last: U64 = second ^ (second >> _S31)
    return last


def combine(first: U64, second: U64) -> U64:
    """One word that depends on every bit of two; broadcasts."""
    return mix((first * _WORD_0) ^ (second * _WORD_1))


def prompt_tokens(request: TraceRequest, seed: int) -> npt.NDArray[np.int32]:
    """The prompt's ids: equal for equal trace ids, otherwise fresh ones for each request; all in [0, 2^31)."""
    count = request.prompt_tokens
    if request.hash_ids is not None:
        pieces = np.asarray(request.hash_ids, np.int32)[:, None] * np.int32(PIECE_TOKENS)
        ids: npt.NDArray[np.int32] = (pieces + np.arange(PIECE_TOKENS, dtype=np.int32)).astype(np.int32).ravel()
        return ids[:count]
    scope = mix(np.asarray([(seed * 0x1_0000_0001 + request.index + 1) & _MASK_64], np.uint64))
    words = combine(scope, np.arange(count, dtype=np.uint64))
    fresh: npt.NDArray[np.int32] = (words >> np.uint64(33)).astype(np.int32)
    return fresh


def next_token(seen: int) -> int:
    """The token that follows, from the wrapped sum over the stamps a request can see."""
    return int(mix(np.asarray([seen & _MASK_64], np.uint64))[0] >> np.uint64(33))
