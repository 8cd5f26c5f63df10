"""Checks of what names a prefix: tokens and the reuse scope."""

from __future__ import annotations

from typing import Any

import numpy as np

from kvpool.errors import ArgumentError
from kvpool.v2._checks import INT32_MAX, is_integer
from kvpool.v2.types import MmItemContext, ReuseScope

DIGEST_BYTES = 32
_UINT64_MAX = 2**64 - 1


def check_reuse_scope(scope: Any) -> ReuseScope:
    """The scope, the default one for None."""
    if scope is None:
        return ReuseScope()
    if not isinstance(scope, ReuseScope):
        raise TypeError(f"reuse_scope must be a ReuseScope or None, not {type(scope).__name__}")
    for name, value in zip(scope._fields, scope, strict=True):
        if value is None:
            continue
        if not is_integer(value):
            raise TypeError(f"reuse_scope.{name} must be an integer or None, not {type(value).__name__}")
        if not 0 <= value <= _UINT64_MAX:
            raise ArgumentError(f"reuse_scope.{name} must be from 0 to 2^64 - 1, not {value}")
    return scope


def check_tokens(name: str, tokens: Any, text_only: bool) -> None:
    """TypeError or ArgumentError unless ``tokens`` is None, a list or tuple of tokens, or an int32 vector."""
    if tokens is None:
        return
    if isinstance(tokens, np.ndarray):
        _check_array(name, tokens)
    elif isinstance(tokens, (list, tuple)):
        _check_sequence(name, tokens, text_only)
    else:
        raise TypeError(f"{name} must be a list, a tuple or an int32 array, not {type(tokens).__name__}")


def _check_array(name: str, tokens: Any) -> None:
    if tokens.dtype != np.int32 or tokens.ndim != 1 or not tokens.flags.c_contiguous:
        raise ArgumentError(
            f"{name} must be a one-dimensional C-contiguous int32 array, not {tokens.dtype}{list(tokens.shape)}"
        )
    if tokens.size and tokens.min() < 0:
        raise ArgumentError(f"{name}: token ids must be from 0 to {INT32_MAX}")


def _check_sequence(name: str, tokens: list[Any] | tuple[Any, ...], text_only: bool) -> None:
    if set(map(type, tokens)) <= {int}:  # the usual case, without a Python loop over a long prompt
        if tokens and not 0 <= min(tokens) <= max(tokens) <= INT32_MAX:
            raise ArgumentError(f"{name}: token ids must be from 0 to {INT32_MAX}")
        return
    for position, token in enumerate(tokens):
        if is_integer(token):
            if not 0 <= token <= INT32_MAX:
                raise ArgumentError(f"{name}[{position}]: token ids must be from 0 to {INT32_MAX}, not {token}")
            continue
        digest = token.digest if isinstance(token, MmItemContext) else token
        if not isinstance(digest, bytes):
            raise TypeError(f"{name}[{position}] must be a token id or a digest, not {type(token).__name__}")
        if len(digest) != DIGEST_BYTES:
            raise ArgumentError(f"{name}[{position}] has {len(digest)} bytes: a digest has {DIGEST_BYTES}")
        if text_only:
            raise ArgumentError(f"{name}[{position}] is a digest, but text_only was promised")
