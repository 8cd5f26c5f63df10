"""Token ids: prompts from the request, outputs from what a request can see, or made up where no bytes are to be seen.

Ids of prompts are below 2^30 and those of outputs from 2^30, so that an answer never equals fresh text by chance; only a
trace with hash ids from 2^21 reaches into the upper half.
"""

from __future__ import annotations

import hashlib

import numpy as np
import numpy.typing as npt

from kvpool.sim.requests import TraceRequest
from kvpool.sim.traces import PIECE_TOKENS

Ids = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
FIRST_OUTPUT_ID = 1 << 30
_ID_SHIFT = np.uint64(64 - 30)
_WORD_0, _WORD_1 = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xC2B2AE3D27D4EB4F)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_S30, _S27, _S31 = np.uint64(30), np.uint64(27), np.uint64(31)
_MASK_64 = (1 << 64) - 1
_SYSTEM = 1 << 62  # keeps the streams of system prompts apart from those of requests


def mix(words: U64) -> U64:
    """A bijective scramble of 64-bit words (the finalizer of splitmix64)."""
    first: U64 = (words ^ (words >> _S30)) * _MIX_1
    second: U64 = (first ^ (first >> _S27)) * _MIX_2
    last: U64 = second ^ (second >> _S31)
    return last


def combine(first: U64, second: U64) -> U64:
    """One word that depends on every bit of two; broadcasts."""
    return mix((first * _WORD_0) ^ (second * _WORD_1))


def prompt_tokens(request: TraceRequest, seed: int, before: Ids | None = None) -> Ids:
    """The prompt's ids, in [0, 2^30) but for those of an answer.

    ``before``: the whole sequence of the request that this one follows.  Text that nothing is shared of is fresh for each
    request and seed.
    """
    count = request.prompt_tokens
    if request.hash_ids is not None:
        pieces = np.asarray(request.hash_ids, np.int32)[:, None] * np.int32(PIECE_TOKENS)
        ids: Ids = (pieces + np.arange(PIECE_TOKENS, dtype=np.int32)).astype(np.int32, copy=False).ravel()
        return ids[:count]
    prompt = np.empty(count, np.int32)
    if request.follows is not None:
        if before is None:
            raise ValueError(f"request {request.index} follows {request.follows}: its prompt begins with that sequence")
        shared = len(before)
        prompt[:shared] = before
    else:
        shared = request.system_tokens
        prompt[:shared] = _fresh(_SYSTEM + (request.system or 0), seed, 0, shared)
    prompt[shared:] = _fresh(request.index, seed, shared, count)
    return prompt


def _fresh(stream: int, seed: int, first: int, end: int) -> Ids:
    scope = mix(np.asarray([(seed * 0x1_0000_0001 + stream + 1) & _MASK_64], np.uint64))
    words = combine(scope, np.arange(first, end, dtype=np.uint64))
    fresh: Ids = (words >> _ID_SHIFT).astype(np.int32)
    return fresh


def next_token(seen: int) -> int:
    """The token that follows, from the wrapped sum over the stamps a request can see."""
    return FIRST_OUTPUT_ID | int(mix(np.asarray([seen & _MASK_64], np.uint64))[0] >> _ID_SHIFT)


def made_up_tokens(prompt: Ids, count: int) -> Ids:
    """An answer where no bytes exist: equal prompts get equal answers, as a model's memory would make them."""
    scope = np.frombuffer(hashlib.blake2b(np.ascontiguousarray(prompt, "<i4").data, digest_size=8).digest(), "<u8")
    words = combine(scope.astype(np.uint64), np.arange(count, dtype=np.uint64))
    answer: Ids = (words >> _ID_SHIFT).astype(np.int32) | np.int32(FIRST_OUTPUT_ID)
    return answer
